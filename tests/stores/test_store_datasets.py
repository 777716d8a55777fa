"""Data loaders get every sample once, whoever shares the work and however it is mixed."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from made_stores import fill, make_ragged, make_row, make_rows
from torch import distributed
from torch.utils.data import DataLoader

from hookline import _errors as errors
from hookline.stores import (
    Store,
    StoreDataset,
    StoredColumn,
    StoreIterable,
    StoreWriter,
    datasets,
    open_store,
)

IDS = range(100, 123)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store of 23 samples in several shards."""
    made = tmp_path_factory.mktemp("store")
    fill(made, IDS, group_bytes=150, shard_bytes=600)
    return made


@pytest.fixture
def store(folder: Path) -> Store:
    return open_store(folder)


def check_batch(batch: dict[str, Any]) -> list[int]:
    """Look whether a batch holds the rows of its samples; give their numbers."""
    ids = batch["ids"].tolist()
    assert batch["ids"].dtype == torch.int64
    assert torch.equal(batch["rows"], make_rows(ids))
    assert [one.tolist() for one in batch["ragged"]] == [make_ragged(one).tolist() for one in ids]
    return ids


def read_ids(batches: Any) -> list[list[int]]:
    return [check_batch(one) for one in batches]


def test_sample_is_a_dict_with_its_number(store: Store) -> None:
    dataset = store.dataset()
    assert isinstance(dataset, StoreDataset)
    assert len(dataset) == 23
    for at in (0, 7, -1):
        found = dataset[at]
        assert list(found) == ["id", "rows", "ragged"]
        assert found["id"] == IDS[at]
        assert torch.equal(found["rows"], make_row(IDS[at]))
        assert torch.equal(found["ragged"], make_ragged(IDS[at]))
    with pytest.raises(IndexError):
        dataset[23]


def test_batch_is_read_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = StoredColumn.rows

    def note(self: StoredColumn, positions: Any) -> Any:
        asked.append((self.name, len(positions)))
        return real(self, positions)

    monkeypatch.setattr(StoredColumn, "rows", note)
    loader = DataLoader(store.dataset(["rows"]), batch_size=10)
    assert [one["id"].tolist() for one in loader] == [
        list(part) for part in (IDS[:10], IDS[10:20], IDS[20:])
    ]
    assert asked == [("rows", 10), ("rows", 10), ("rows", 3)]


@pytest.mark.parametrize(("kind", "workers"), [(None, 0), ("fork", 2), ("spawn", 1)])
def test_loader_gives_every_sample_once(kind: str | None, workers: int, folder: Path) -> None:
    """A store that was read before its workers began, too: threads and files do not come along."""
    dataset = open_store(folder).dataset(["rows"])
    dataset.__getitems__([20, 3, 11])
    loader = DataLoader(
        dataset,
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=kind,
        generator=torch.Generator().manual_seed(0),
    )
    found = []
    for batch in loader:
        ids = batch["id"].tolist()
        assert torch.equal(batch["rows"], make_rows(ids))
        found += ids
    assert sorted(found) == list(IDS)
    assert found != list(IDS)


def test_forked_worker_opens_the_store_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = store.dataset()._columns
    assert columns.store is store
    store.ids
    monkeypatch.setattr(datasets.os, "getpid", lambda: -1)
    again = columns.store
    assert again is not store
    assert again.place is not store.place
    assert again._samples is store._samples  # what is known need not be read again
    assert columns.store is again


def test_columns_are_chosen_and_named_as_asked(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.add([4], {"layer:output": torch.ones(1, 2), "other": torch.ones(1)})
    store = open_store(tmp_path)
    assert list(store.dataset(["layer"])[0]) == ["id", "layer"]
    assert list(next(iter(store.iterate(["layer"])))) == ["ids", "layer"]
    with pytest.raises(errors.StoreError, match="no column `nowhere`"):
        store.dataset(["nowhere"])


def test_column_with_the_name_of_the_number_is_told_of(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.add([4], {"id": torch.ones(1), "ids": torch.ones(1)})
    store = open_store(tmp_path)
    assert list(store.dataset(["ids"])[0]) == ["id", "ids"]
    with pytest.raises(errors.StoreError, match="`id` is what the number of a sample is called"):
        store.dataset()
    with pytest.raises(errors.StoreError, match="`ids` is what the number of a sample is called"):
        store.iterate()


def test_batches_are_in_order_and_whole(store: Store) -> None:
    found = store.iterate(batch_size=8)
    assert isinstance(found, StoreIterable)
    assert read_ids(found) == [list(IDS[:8]), list(IDS[8:16]), list(IDS[16:])]
    assert len(found) == 3
    assert read_ids(store.iterate(batch_size=8, drop_last=True)) == [
        list(IDS[:8]),
        list(IDS[8:16]),
    ]
    assert read_ids(store.iterate()) == [list(IDS)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("world", [1, 2, 3, 30])
def test_ranks_share_the_same_batches(world: int, size: int, shuffle: bool, store: Store) -> None:
    alone = read_ids(store.iterate(batch_size=size, shuffle=shuffle))
    shares = []
    for rank in range(world):
        mine = store.iterate(batch_size=size, shuffle=shuffle, rank=rank, world=world)
        shares.append(read_ids(mine))
        assert len(mine) == len(shares[-1])
    assert sorted(itertools.chain(*shares)) == sorted(alone)
    assert sorted(itertools.chain(*alone)) == list(IDS)
    assert alone[::world] == shares[0]


def test_dropping_leaves_every_rank_as_many_full_batches(store: Store) -> None:
    shares = [
        read_ids(store.iterate(batch_size=4, shuffle=True, rank=rank, world=2, drop_last=True))
        for rank in range(2)
    ]
    assert [[len(one) for one in share] for share in shares] == [[4, 4], [4, 4]]
    assert len({id for share in shares for one in share for id in one}) == 16


@pytest.mark.parametrize(("kind", "world"), [("fork", 2), ("spawn", 1)])
def test_workers_and_ranks_together_give_every_sample_once(
    kind: str, world: int, store: Store
) -> None:
    """And in the same order as without workers, epoch after epoch, though workers stay."""
    found: dict[int, list[list[int]]] = {0: [], 1: []}
    for rank in range(world):
        given = {"batch_size": 3, "shuffle": True, "rank": rank, "world": world}
        alone, shared = store.iterate(**given), store.iterate(**given)
        loader = DataLoader(
            shared,
            batch_size=None,
            num_workers=2,
            multiprocessing_context=kind,
            persistent_workers=True,
        )
        assert len(loader) == 8 // world
        for epoch in range(2):
            alone.set_epoch(epoch)
            shared.set_epoch(epoch)
            mine = read_ids(loader)
            assert mine == read_ids(alone)
            found[epoch] += mine
    assert found[0] != found[1]
    for epoch in range(2):
        assert sorted(itertools.chain(*found[epoch])) == list(IDS)


def test_more_workers_than_batches_disturb_nobody(store: Store) -> None:
    loader = DataLoader(store.iterate(batch_size=50), batch_size=None, num_workers=2)
    assert read_ids(loader) == [list(IDS)]


def test_order_is_that_of_seed_and_epoch(store: Store) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        batches = store.iterate(batch_size=5, shuffle=True, seed=seed)
        batches.set_epoch(epoch)
        return list(itertools.chain(*read_ids(batches)))

    assert order(0, 0) == order(0, 0)
    different = {tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(different) == 9
    assert all(sorted(one) == list(IDS) for one in different)


def test_mixing_reaches_over_the_whole_store(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, group_bytes=1) as writer:
        for at in range(0, 1000, 10):
            writer.add(range(at, at + 10), {"x": torch.zeros(10)})
    batches = open_store(tmp_path).iterate(batch_size=100, shuffle=True)
    for batch in batches:
        ids = batch["ids"].double()
        assert 400 < ids.mean() < 600
        assert ids.max() - ids.min() > 800


def test_rank_is_found_in_the_environment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = store.iterate(batch_size=8)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert read_ids(batches) == [list(IDS[8:16])]
    assert read_ids(store.iterate(batch_size=8, rank=0, world=1)) != read_ids(batches)


def test_rank_of_torch_counts_more_and_goes_to_workers(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    batches = store.iterate(batch_size=8)
    meeting = distributed.HashStore()
    distributed.init_process_group("gloo", store=meeting, rank=0, world_size=1)
    try:
        assert len(read_ids(batches)) == 3
        sent = pickle.dumps(batches)
    finally:
        distributed.destroy_process_group()
    assert len(read_ids(pickle.loads(sent))) == 3
    assert len(read_ids(batches)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "at least one sample"),
        ({"rank": 1}, "belong together"),
        ({"world": 2}, "belong together"),
        ({"rank": 2, "world": 2}, "no rank 2 of 2"),
        ({"rank": -1, "world": 2}, "no rank -1 of 2"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: dict[str, int], message: str, store: Store
) -> None:
    with pytest.raises(ValueError, match=message):
        store.iterate(**options)


def test_empty_store_gives_no_batches(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.add([], {"x": torch.empty(0, 3)})
    store = open_store(tmp_path)
    assert list(store.iterate(shuffle=True)) == []
    assert len(store.dataset()) == 0
