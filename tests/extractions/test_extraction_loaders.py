"""Batches of a DataLoader: as it makes them, with the ids of their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from made_data import Counting, Squares
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from hookline.extractions.sources import Wanted, open_source

EVERYTHING = Wanted.everything()


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_keeps_its_batches_and_gets_ids(workers: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4, num_workers=workers)
    source = open_source(loader)
    assert source.is_batched
    assert source.size == 10
    found = list(source.samples(EVERYTHING))
    assert [ids.tolist() for ids, _ in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(ids.dtype == np.int64 for ids, _ in found)
    assert all(torch.equal(batch[0], torch.from_numpy(ids)) for ids, batch in found)


def test_loader_gives_whole_batches_that_hold_a_wanted_sample() -> None:
    data = Squares()
    source = open_source(DataLoader(data, batch_size=2))
    found = list(source.samples(Wanted.of_ranges([(3, 4), (6, 7)])))
    assert [ids.tolist() for ids, _ in found] == [[2, 3], [6, 7]]
    assert [batch.tolist() for _, batch in found] == [[4, 9], [36, 49]]
    assert 8 not in data.taken


def test_loader_collates_as_it_does() -> None:
    def collate_fn(samples: list[int]) -> dict[str, Any]:
        return {"names": ["x"], "part": [torch.tensor(0), torch.tensor(samples)]}

    source = open_source(DataLoader(Squares(), batch_size=6, collate_fn=collate_fn))
    found = list(source.samples(EVERYTHING))
    assert [ids.tolist() for ids, _ in found] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    picked = open_source(DataLoader(Squares(), 6, collate_fn=collate_fn), column="names")
    assert [batch for _, batch in picked.samples(EVERYTHING)] == [["x"], ["x"]]


def test_loader_knows_its_size_where_it_can() -> None:
    assert open_source(DataLoader(Squares(), batch_size=4, drop_last=True)).size == 8
    assert open_source(DataLoader(Counting(5), batch_size=2)).size is None
    assert open_source(DataLoader(torch.zeros(3, 2, 4), batch_size=None)).size is None
    stream = open_source(DataLoader(Counting(5), batch_size=2))
    assert [ids.tolist() for ids, _ in stream.samples(EVERYTHING)] == [[0, 1], [2, 3], [4]]
    rows = open_source(DataLoader(torch.zeros(3, 2, 4), batch_size=None))
    assert [ids.tolist() for ids, _ in rows.samples(EVERYTHING)] == [[0, 1], [2, 3], [4, 5]]


def test_loader_of_another_order_is_refused() -> None:
    class Halves(BatchSampler):
        pass

    data = Squares()
    orders: list[DataLoader[int]] = [
        DataLoader(data, shuffle=True),
        DataLoader(data, sampler=[3, 1, 2]),
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False)),
        DataLoader(data, batch_sampler=Halves(SequentialSampler(data), 2, False)),
        DataLoader(data, shuffle=True, batch_size=None),
    ]
    names = ["RandomSampler", "list", "RandomSampler", "Halves", "RandomSampler"]
    for loader, name in zip(orders, names, strict=True):
        with pytest.raises(ValueError, match=f"`{name}`.*shuffle=False"):
            open_source(loader)
