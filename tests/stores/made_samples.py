"""Samples whose bytes follow from their numbers, so that whoever reads them knows what is right."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from hookline.stores import Store, StoreWriter, open_store
from hookline.stores.shard_reading import read_integers
from hookline.stores.writing import Rows

WIDTH = 8


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
