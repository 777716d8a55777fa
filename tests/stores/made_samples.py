"""Samples whose bytes follow from their numbers, so that whoever reads them knows what is right."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from hookline.stores import Store, StoreWriter, direct_files, open_store, shard_writing
from hookline.stores.shard_reading import read_integers
from hookline.stores.writing import Rows

WIDTH = 8
BLOCK = 4096
"""What a disk writes at least."""


def use_small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small shards too grow on the disk, by a thread."""
    monkeypatch.setattr(direct_files, "_STAGE", 2 * BLOCK)
    monkeypatch.setattr(shard_writing, "_ROOM", 2 * BLOCK)


def make_row(id: int) -> Tensor:
    """Give the row of a sample in the column `mlp`."""
    return torch.arange(WIDTH, dtype=torch.float32) + id * WIDTH


def make_words(id: int) -> Tensor:
    """Give the rows of a sample in the ragged column `words`: none to three of them."""
    return torch.full((id % 4, 3), id % 30_000, dtype=torch.int16)


def make_values(ids: Iterable[int]) -> dict[str, Rows]:
    """Give what a store keeps of samples."""
    numbers = list(ids)
    return {
        "mlp": torch.stack([make_row(one) for one in numbers]),
        "words": [make_words(one) for one in numbers],
    }


def write_samples(where: str | Path, ids: Iterable[int], each: int = 4, **options: Any) -> int:
    """Write those samples that are not there yet, a few in each shard; give how many these are."""
    with StoreWriter(where, **options) as writer:
        done = set(writer.find_done().tolist())
        left = [one for one in ids if one not in done]
        for at in range(0, len(left), each):
            writer.add(left[at : at + each], make_values(left[at : at + each]))
            writer.finish_shard()
        return len(left)


def check_samples(where: str | Path, ids: Iterable[int]) -> Store:
    """Assert that a store holds exactly these samples, each once, and read every byte of them."""
    store = open_store(where)
    wanted = sorted(ids)
    parts = [one.ids_part(group) for one in store.shards for group in range(len(one.groups))]
    held = np.concatenate([np.empty(0, np.int64), *read_integers(store.place, parts)])
    assert sorted(held.tolist()) == wanted
    if wanted:
        assert torch.equal(store["mlp"][:], torch.stack([make_row(one) for one in wanted]))
        words = store["words"][:]
        assert all(torch.equal(a, make_words(b)) for a, b in zip(words, wanted, strict=True))
    for shard in store.shards:
        for _ in shard.check():
            pass
    return store


def check_folder(folder: Path, ids: Iterable[int]) -> None:
    """Assert the same of a folder, and that safetensors reads it and nothing unfinished is left."""
    check_samples(folder, ids)
    shards = list((folder / "shards").iterdir())
    assert not [one.name for one in shards if one.suffix != ".safetensors"]
    for shard in shards:
        with safe_open(shard, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - a file of safetensors is no mapping
                file.get_tensor(key)


def write_groups(
    where: Path, begin: int, end: int, *, each: int = 160, groups: int = 3, **options: Any
) -> None:
    """Write samples in groups, and so many groups in a shard that these are of several stages."""
    with StoreWriter(where, group_bytes=1, **options) as writer:
        add_groups(writer, begin, end, each=each, groups=groups)


def add_groups(
    writer: StoreWriter, begin: int, end: int, *, each: int = 160, groups: int = 0
) -> None:
    """Add samples in groups; finish a shard after so many of these."""
    for number, at in enumerate(range(begin, end, each), 1):
        ids = range(at, min(at + each, end))
        writer.add(ids, make_values(ids))
        if groups and not number % groups:
            writer.finish_shard()


def start(work: Callable[[], None]) -> int:
    """Do something in a process of its own; give its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def fork(work: Callable[[], None]) -> int:
    """Do something in a process of its own; give the code that it ended with."""
    _, status = os.waitpid(start(work), 0)
    return os.waitstatus_to_exitcode(status)
