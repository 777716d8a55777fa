"""Samples are found by position and by number, one or many, without a file too many open."""

from __future__ import annotations

import os
import pickle
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from made_stores import fill, list_files, make_ragged, make_row, make_rows, make_store

from hookline import _errors as errors
from hookline.stores import Column, Store, StoreWriter, open_store, rows_at


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Twenty samples whose numbers are a hundred more than their positions."""
    fill(tmp_path, range(100, 120), batch=3, group_bytes=150, shard_bytes=600)
    return open_store(tmp_path)


@pytest.fixture
def few_files() -> Iterator[int]:
    """Leave this process 20 open files beyond what it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(list(Path("/proc/self/fd").iterdir())) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


POSITIONS = [
    [3],
    [0, 1, 2],
    [19, 0, 7, 7, 3],
    [-1, -20],
    [],
    list(range(20)),
    [4, 5, 6, 11, 12],
]


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_rows_at_any_positions_are_theirs(positions: list[int], store: Store) -> None:
    ids = [range(100, 120)[one] for one in positions]
    for given in (positions, np.array(positions), torch.tensor(positions)):
        assert torch.equal(store["rows"][given], make_rows(ids))
        found = store["ragged"][given]
        assert [one.tolist() for one in found] == [make_ragged(one).tolist() for one in ids]
    assert torch.equal(store["rows"].of(ids), make_rows(ids))


@pytest.mark.parametrize(
    "part", [slice(None), slice(5, 9), slice(None, None, -3), slice(18, 99), slice(7, 3)], ids=str
)
def test_slice_gives_what_a_list_gives(part: slice, store: Store) -> None:
    ids = range(100, 120)[part]
    assert torch.equal(store["rows"][part], make_rows(ids))
    assert [len(one) for one in store["ragged"][part]] == [len(make_ragged(one)) for one in ids]


def test_mask_gives_those_that_are_marked(store: Store) -> None:
    mask = np.zeros(20, bool)
    mask[[2, 17]] = True
    assert torch.equal(store["rows"][mask], make_rows([102, 117]))


def test_one_sample_is_a_row(store: Store) -> None:
    assert torch.equal(store["rows"][2], make_row(102))
    assert torch.equal(store["rows"][-1], make_row(119))
    assert torch.equal(store["ragged"][3], make_ragged(103))
    assert [int(one[0]) // 100 for one in store["rows"]] == list(range(100, 120))


@pytest.mark.parametrize("which", [20, -21, [0, 20], [-21]])
def test_position_that_is_not_there_is_an_index_error(which: int | list[int], store: Store) -> None:
    with pytest.raises(IndexError, match="of 20 samples"):
        store["rows"][which]


def test_missing_samples_and_columns_are_named(store: Store) -> None:
    with pytest.raises(errors.StoreError, match=r"holds no sample 5 \(nor 1 others"):
        store["rows"].of([100, 5, 6])
    with pytest.raises(errors.StoreError, match=r"holds no sample 5$"):
        store["rows"].of([5])
    with pytest.raises(errors.StoreError, match=r"holds no sample 5 \(nor 2 others"):
        store["rows"].of([5, 6, 7])
    with pytest.raises(errors.StoreError, match="no column `row`; it has rows, ragged"):
        store["row"]


def test_rows_are_read_where_the_system_takes_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = torch.randn(600, 1000)
    with StoreWriter(tmp_path) as writer:
        writer.add(range(600), {"x": wide})
    monkeypatch.delattr(os, "posix_fadvise")
    assert torch.equal(open_store(tmp_path)["x"][:], wide)
    assert torch.equal(open_store(tmp_path)["x"][[5, 9, 1]], wide[[5, 9, 1]])


def test_output_of_a_site_needs_no_suffix(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.add([0], {"layers.2:output": torch.ones(1, 2)})
    assert open_store(tmp_path)["layers.2"].name == "layers.2:output"


def test_many_rows_from_all_over_are_read_by_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()
    real = rows_at._read_pieces

    def note(*args: object) -> None:
        names.add(threading.current_thread().name.rpartition("_")[0])
        real(*args)

    monkeypatch.setattr(rows_at, "_read_pieces", note)
    store = make_store(tmp_path, 300, shard_bytes=5000)
    order = np.random.default_rng(0).permutation(300)
    assert torch.equal(store["rows"][order], make_rows(order.tolist()))
    assert names == {"hookline-rows"}


def test_store_of_more_shards_than_open_files_is_read(
    tmp_path: Path, few_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_at, "_MOST_OPEN", 8)
    store = make_store(tmp_path, 200, group_bytes=1, shard_bytes=1)
    assert len(store.shards) == 50
    order = np.random.default_rng(0).permutation(200)
    for _ in range(2):
        assert torch.equal(store["rows"][order], make_rows(order.tolist()))
    held = [store["rows"][at : at + 1] for at in range(200)]  # each where it lies
    assert torch.equal(torch.cat(held), make_rows(range(200)))


def test_row_holds_no_more_memory_than_its_own(store: Store) -> None:
    """A worker of a data loader would send all that a row holds."""
    assert store["rows"][3].untyped_storage().nbytes() == 20


def test_writing_to_a_row_leaves_the_file_as_it_is(store: Store) -> None:
    before = [one.read_bytes() for one in list_files(store.place.local)]
    store["rows"][0].fill_(7)
    assert [one.read_bytes() for one in list_files(store.place.local)] == before


def test_file_that_shrinks_while_it_is_open_is_damaged(store: Store) -> None:
    store.ids
    for path in list_files(store.place.local):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(errors.CorruptShard, match="ends before byte"):
        store["rows"][list(range(19, -1, -1))]


def test_store_goes_to_another_process_with_what_it_saw(store: Store) -> None:
    data = pickle.dumps(store)
    fill(store.place.local, [0, 1], name="later")
    found = pickle.loads(data)
    assert found.ids.tolist() == list(range(100, 120))
    assert torch.equal(found["rows"][[9, 2]], make_rows([109, 102]))
    assert len(open_store(store.place.local)) == 22


def test_batches_go_through_all_samples_in_order(store: Store) -> None:
    found = list(store["rows"].batches(7))
    assert [len(one) for one in found] == [7, 7, 6]
    assert torch.equal(torch.cat(found), make_rows(range(100, 120)))


def test_array_of_a_dtype_that_numpy_has_not_is_float32(tmp_path: Path) -> None:
    values = torch.tensor([0.5, -2.0, 1.5])
    with StoreWriter(tmp_path) as writer:
        writer.add(range(3), {"x": values.bfloat16(), "y": values.to(torch.float8_e5m2)})
    store = open_store(tmp_path)
    for name in "xy":
        assert store[name].numpy().dtype == np.float32
        assert store[name].numpy().tolist() == values.tolist()


def test_store_of_no_samples_is_empty(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.add([], {"x": torch.empty(0, 3)})
    for path in (None, *list_files(tmp_path)):
        if path is not None:
            path.unlink()
        store = open_store(tmp_path)
        assert (len(store), store.ids.tolist(), store.nbytes) == (0, [], 0)
        assert store["x"][:].shape == (0, 3)
        assert store["x"].lengths.tolist() == []


def test_store_and_column_describe_themselves(store: Store) -> None:
    assert repr(store).endswith(": 20 samples; rows, ragged>")
    assert repr(store["rows"]) == "<rows: 20 samples, a row of float32 [5]>"
    assert repr(store["ragged"]) == "<ragged: 20 samples, any number of rows of int64 [2]>"
    assert store.columns["rows"] == Column("rows", torch.float32, (5,))
    assert "rows" in store
    assert "row" not in store
