"""What a tensor store reaches: `python bench/stores.py [--gib 2] [--folder DIR]`.

Writing is compared with plain writes of the same bytes and with `save_file`, reading with a memory
map, random rows with a memory map: all in one run, since disks differ and others use them too.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tables import Table, judge_least

from hookline.stores import StoreWriter, open_store

WIDTH = 4096
BATCH = 8192
"""Rows of a batch: 64 MiB."""
ROWS = 1024
"""Random rows of a try."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="how much is written")
    parser.add_argument("--folder", type=Path, help="on the disk that is meant")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hookline-", dir=options.folder))
    try:
        batches = max(1, round(options.gib * 2**30 / (BATCH * WIDTH * 2)))
        print(measure_writing(folder, batches, options.rounds).markdown(), end="\n\n", flush=True)
        print(measure_reading(folder, batches, options.rounds).markdown(), end="\n\n", flush=True)
        print(measure_rows(folder, batches, options.rounds).markdown())
    finally:
        shutil.rmtree(folder)


def make_batch(number: int) -> torch.Tensor:
    """Make rows that no disk can compress."""
    random = np.random.default_rng(number).integers(0, 2**16, (BATCH, WIDTH), np.uint16)
    return torch.from_numpy(random).view(torch.bfloat16)


def write_plainly(path: Path, data: list[torch.Tensor]) -> None:
    """Write the bytes one after the other, through the page cache."""
    with path.open("wb", buffering=0) as file:
        for one in data:
            file.write(one.view(torch.uint8).numpy().data)
        os.fsync(file.fileno())


def write_files(folder: Path, data: list[torch.Tensor]) -> None:
    """Write a file of safetensors for each four batches."""
    folder.mkdir()
    for at in range(0, len(data), 4):
        path = folder / f"{at}.safetensors"
        save_file({str(number): one for number, one in enumerate(data[at : at + 4])}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def write_store(folder: Path, data: list[torch.Tensor]) -> None:
    """Write a store."""
    with StoreWriter(folder) as writer:
        for number, one in enumerate(data):
            writer.add(np.arange(number * BATCH, (number + 1) * BATCH), {"x": one})


def measure_writing(folder: Path, batches: int, rounds: int) -> Table:
    """Write the same bytes each way, in turns."""
    data = [make_batch(number) for number in range(min(batches, 8))]
    data = [data[number % len(data)] for number in range(batches)]
    size = sum(one.nbytes for one in data) / 2**30
    ways: dict[str, Callable[[Path, list[torch.Tensor]], None]] = {
        "write() and fsync": write_plainly,
        "safetensors save_file": write_files,
        "hookline": write_store,
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in in_turn(list(ways), turn):
            path = folder / f"{name.split()[0]}-{turn}"
            os.sync()  # what was removed before is not this one's work
            begun = time.perf_counter()
            ways[name](path, data)
            rates[name].append(size / (time.perf_counter() - begun))
            if name != "hookline" or turn < rounds - 1:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            else:
                path.rename(folder / "store")
    table = Table(f"Writing {size:.3g} GiB of bfloat16", ["way", "GiB/s", "x write()", "target"])
    table.rows = compare(rates, "hookline", 1)
    return table


def in_turn(names: list[str], turn: int) -> list[str]:
    """Give who is measured in which order: each is the first one at times."""
    return names[turn % len(names) :] + names[: turn % len(names)]


def compare(rates: dict[str, list[float]], judged: str, least: float) -> list[list[str]]:
    """Give rows of rates, and of what they are of the first one's in the same turn."""
    plain = next(iter(rates.values()))
    rows = []
    for name, found in rates.items():
        share = statistics.median(one / other for one, other in zip(found, plain, strict=True))
        mark = judge_least(share, least) if name == judged else ""
        rows.append([name, f"{statistics.median(found):.2f}", f"{share:.2f}", mark])
    return rows


def forget(folder: Path) -> None:
    """Have the pages of a store's files dropped, as far as this machine holds them."""
    for path in (folder / "store" / "shards").iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure_reading(folder: Path, batches: int, rounds: int) -> Table:
    """Add up all bytes, from a memory map of the files and from the store."""
    size = batches * BATCH * WIDTH * 2 / 2**30
    ways = {"memory map": read_mapped, "hookline": read_store}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in in_turn(list(ways), turn):
            forget(folder)
            begun = time.perf_counter()
            ways[name](folder / "store")
            rates[name].append(size / (time.perf_counter() - begun))
    table = Table("Reading all of it, cold", ["way", "GiB/s", "x memory map", "target"])
    table.rows = compare(rates, "hookline", 0.85)
    return table


def read_mapped(store: Path) -> None:
    """Add up the bytes of all files."""
    for path in sorted((store / "shards").iterdir()):
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            whole = torch.frombuffer(mapped, dtype=torch.int64, count=len(mapped) // 8)
            for part in whole.split(1 << 21):
                part.sum()


def read_store(store: Path) -> None:
    """Add up all rows."""
    for batch in open_store(store)["x"].batches(2048):
        batch.view(torch.int64).sum()


def measure_rows(folder: Path, batches: int, rounds: int) -> Table:
    """Read random rows, each time others."""
    count = batches * BATCH
    random = np.random.default_rng(0)
    rates: dict[str, list[float]] = {"memory map": [], "hookline": []}
    store = open_store(folder / "store")
    store["x"][[0, 1, count - 1]]
    for _ in range(rounds):
        forget(folder)
        which = random.integers(0, count, ROWS)
        begun = time.perf_counter()
        for one in which.tolist():
            store["x"][one].float().sum()
        rates["memory map"].append(ROWS / (time.perf_counter() - begun))
        forget(folder)
        which = random.integers(0, count, ROWS)
        begun = time.perf_counter()
        store["x"][which]
        rates["hookline"].append(ROWS / (time.perf_counter() - begun))
    table = Table(f"{ROWS} random rows of 8 KiB, cold", ["way", "rows/s", "target"])
    for name, found in rates.items():
        rate = statistics.median(found)
        mark = judge_least(rate, 15_000) if name == "hookline" else ""
        table.rows.append([name, f"{rate:,.0f}", mark])
    return table


if __name__ == "__main__":
    main()
