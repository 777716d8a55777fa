"""What extraction costs beside the forward itself: `python bench/extraction.py [--rounds 5]`.

A model of 12 blocks on texts of random tokens. *forward* runs the same batches through the model
and drops what comes; the others keep values of the last block in a store. All in one process, in
turns, since others use the machine too.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models import Size, TrainedGPT
from tables import Table, judge_least

import hookline as hl

SIZE = Size(blocks=12, width=256, heads=4, vocabulary=1000, length=128, batch=16)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=24, help="of a round")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = TrainedGPT(SIZE).eval()
    count = options.batches * SIZE.batch
    tokens = torch.randint(0, SIZE.vocabulary, (count, SIZE.length))
    folder = Path(tempfile.mkdtemp(prefix="hookline-"))
    ways: dict[str, Callable[[], None]] = {
        "forward": lambda: forward(model, tokens),
        "hl.extract, last token": lambda: extract(model, tokens, folder, "last"),
        "hl.extract, all tokens": lambda: extract(model, tokens, folder, None),
        "hl.extract, all blocks, all tokens": lambda: extract(model, tokens, folder, None, "h.*"),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name, work in ways.items():
            begun = time.perf_counter()
            work()
            if turn:
                rates[name].append(count / (time.perf_counter() - begun))
            shutil.rmtree(folder / "out", ignore_errors=True)
    table = Table("Extraction of a model of 12 blocks", ["way", "samples/s", "x forward", "target"])
    for name, found in rates.items():
        shares = [one / plain for one, plain in zip(found, rates["forward"], strict=True)]
        share = statistics.median(shares)
        mark = judge_least(share, 0.9) if "extract" in name else ""
        table.rows.append([name, f"{statistics.median(found):.1f}", f"{share:.3f}", mark])
    table.notes = [measure_memory(model, folder)]
    print(table.markdown())
    shutil.rmtree(folder)


def forward(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    """Run all batches, and drop what comes."""
    with torch.no_grad():
        for batch in tokens.split(SIZE.batch):
            model(batch)


def extract(
    model: torch.nn.Module, tokens: Any, folder: Path, reduce: Any, sites: str = "h.11"
) -> None:
    """Keep values of all samples."""
    hl.extract(model, tokens, sites, folder / "out", reduce=reduce, batch_size=SIZE.batch)


class Endless:
    """Samples that are made when they are asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.count):
            yield torch.randint(0, SIZE.vocabulary, (SIZE.length,))


def measure_memory(model: torch.nn.Module, folder: Path) -> str:
    """Tell how the most memory that was used grows with the data."""
    peaks = []
    for count in (200, 2000):
        extract(model, Endless(count), folder, None)
        shutil.rmtree(folder / "out")
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return f"The most memory used: {peaks[0]:.0f} MiB after 200 samples, {peaks[1]:.0f} after 2000."


if __name__ == "__main__":
    main()
