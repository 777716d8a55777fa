"""What is written is what is read, whatever it is and however it came."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_stores import fill, list_files, make_ragged, make_row, make_rows, make_store
from safetensors import safe_open
from torch import Tensor

from hookline import _errors as errors
from hookline.stores import StoreWriter, layout, open_store, shard_writing

DTYPES = [getattr(torch, name) for name in layout.DTYPES]


def make_values(dtype: torch.dtype, *shape: int) -> Tensor:
    """Make values of any dtype, from random bytes that all of them can hold."""
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    raw = torch.randint(0, 100, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def as_bytes(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    fixed = make_values(dtype, 40, 3, 2)
    ragged = [make_values(dtype, number % 3, 3) for number in range(40)]
    with StoreWriter(tmp_path, group_bytes=1) as writer:
        for at in range(0, 40, 10):
            values = {"fixed": fixed[at : at + 10], "ragged": ragged[at : at + 10]}
            writer.add(range(at, at + 10), values)
    store = open_store(tmp_path)
    assert store.columns["fixed"].dtype == dtype
    for found in (store["fixed"][:], store["fixed"][list(range(39, -1, -1))].flip(0)):
        assert found.dtype == dtype
        assert as_bytes(found) == as_bytes(fixed)
    for found, wanted in zip(store["ragged"][:], ragged, strict=True):
        assert (found.dtype, found.shape) == (dtype, wanted.shape)
        assert as_bytes(found) == as_bytes(wanted)


def test_dtype_that_the_format_has_not_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(errors.StoreError, match="cannot hold `complex128`: convert"),
        StoreWriter(tmp_path) as writer,
    ):
        writer.add([0], {"x": torch.zeros(1, dtype=torch.complex128)})


@pytest.mark.parametrize(
    ("group", "shard", "shards"), [(1, 1, 5), (150, 10**9, 1), (10**9, 1, 1), (150, 600, None)]
)
def test_sizes_of_groups_and_shards_change_no_row(
    group: int, shard: int, shards: int | None, tmp_path: Path
) -> None:
    store = make_store(tmp_path, group_bytes=group, shard_bytes=shard)
    assert torch.equal(store["rows"][:], make_rows(range(20)))
    assert [one.tolist() for one in store["ragged"][:]] == [
        make_ragged(one).tolist() for one in range(20)
    ]
    assert store.ids.tolist() == list(range(20))
    assert store.nbytes == 20 * 5 * 4 + sum(make_ragged(one).nbytes for one in range(20))
    found = len(list_files(tmp_path))
    assert found == shards if shards else 1 < found < 5


def test_shard_larger_than_what_is_gathered_comes_back(tmp_path: Path) -> None:
    """Such a one is written in blocks, past the page cache where that is possible."""
    data = torch.arange(9 * 2**20, dtype=torch.int32).view(9, -1)
    with StoreWriter(tmp_path) as writer:
        for number in range(9):
            writer.add([number], {"x": data[number : number + 1]})
    (file,) = list_files(tmp_path)
    assert file.stat().st_size > 36 * 2**20
    store = open_store(tmp_path)
    assert torch.equal(store["x"][:], data)
    assert torch.equal(store["x"][[7, 2]], data[[7, 2]])


def test_head_has_room_for_more_columns_than_a_head_mostly_has(tmp_path: Path) -> None:
    values = {f"column {number} é": torch.full((1, 901), float(number)) for number in range(6000)}
    assert sum(one.nbytes for one in values.values()) > 16 * 2**20  # so the room comes first
    with StoreWriter(tmp_path) as writer:
        writer.add([3], values)
    store = open_store(tmp_path)
    assert store["column 5999 é"][0].tolist() == [5999.0] * 901


def test_groups_beyond_the_room_of_a_head_begin_another_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writing, "_ROOM", 16384)
    fill(tmp_path, range(400), batch=2, group_bytes=1)
    assert len(list_files(tmp_path)) > 3
    assert torch.equal(open_store(tmp_path)["rows"][:], make_rows(range(400)))


def test_views_that_lie_otherwise_in_memory_are_written_as_they_look(tmp_path: Path) -> None:
    complex_ = torch.randn(4, 3, dtype=torch.complex64)
    values = {
        "transposed": torch.randn(3, 4).t(),
        "strided": torch.randn(4, 6)[:, ::2],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "conjugated": complex_.conj(),
        "negated": complex_.conj().imag,
        "with a gradient": torch.randn(4, 3, requires_grad=True),
        "scalar": torch.randn(4),
        "empty": torch.randn(4, 0),
    }
    with StoreWriter(tmp_path) as writer:
        writer.add(range(4), values)
    store = open_store(tmp_path)
    for name, value in values.items():
        assert torch.equal(store[name][:], value.detach().resolve_conj()), name


def test_safetensors_itself_reads_every_shard(tmp_path: Path) -> None:
    make_store(tmp_path)
    found: dict[int, Tensor] = {}
    for path in list_files(tmp_path):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no dict)
                if key.endswith("/#ids"):
                    rows = file.get_tensor(key.replace("#ids", "rows"))
                    found |= dict(zip(file.get_tensor(key).tolist(), rows, strict=True))
    assert sorted(found) == list(range(20))
    assert all(torch.equal(row, make_row(id)) for id, row in found.items())


@pytest.mark.parametrize("has_index", [True, False])
def test_writing_goes_on_with_what_is_not_there(has_index: bool, tmp_path: Path) -> None:
    fill(tmp_path, [0, 1, 2, 9, 10], shard_bytes=1)
    if not has_index:
        (tmp_path / "index" / "writer.jsonl").unlink()
    with StoreWriter(tmp_path) as writer:
        done = writer.find_done().tolist()
        assert done == [0, 1, 2, 9, 10]
    fill(tmp_path, [one for one in range(12) if one not in done], shard_bytes=1)
    store = open_store(tmp_path)
    assert store.ids.tolist() == list(range(12))
    assert torch.equal(store["rows"][:], make_rows(range(12)))


def test_new_store_has_nothing_done(tmp_path: Path) -> None:
    assert StoreWriter(tmp_path / "new").find_done().tolist() == []
    assert not (tmp_path / "new").exists()


def test_many_numbers_far_apart_are_found_again(tmp_path: Path) -> None:
    """More ranges than a line of the index has: the shard itself is asked."""
    ids = range(0, 10_000, 2)
    with StoreWriter(tmp_path) as writer:
        writer.add(ids, {"x": torch.zeros(5000, 1)})
    line = json.loads((tmp_path / "index" / "writer.jsonl").read_text())
    assert line["ranges"] is None
    assert StoreWriter(tmp_path).find_done().tolist() == list(ids)


@pytest.mark.parametrize(
    "ranges", ["x", [[0, 10**15]], [[5]], [[3, 1]], {"a": 1}, [["0", "4"]], [[0.5, 2]]]
)
def test_line_with_senseless_ranges_is_not_believed(ranges: object, tmp_path: Path) -> None:
    fill(tmp_path, [3, 4])
    path = tmp_path / "index" / "writer.jsonl"
    line = json.loads(path.read_text())
    for lie in ({"ranges": ranges}, {"ranges": [[0, 10**15]], "samples": 10**18}):
        path.write_text(json.dumps(line | lie) + "\n")
        assert StoreWriter(tmp_path).find_done().tolist() == [3, 4]


def test_line_that_was_cut_off_is_left_out_and_swallows_none(tmp_path: Path) -> None:
    fill(tmp_path, [0, 1])
    path = tmp_path / "index" / "writer.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    fill(tmp_path, [2, 3])
    assert StoreWriter(tmp_path).find_done().tolist() == [0, 1, 2, 3]
    assert json.loads(path.read_text().splitlines()[-1])["ranges"] == [[2, 4]]


def test_two_writers_with_two_names_write_one_store(tmp_path: Path) -> None:
    """One name may begin with the other: neither removes what the other has begun."""
    with (
        StoreWriter(tmp_path, name="rank", group_bytes=1) as first,
        StoreWriter(tmp_path, name="rank-1", group_bytes=1) as second,
    ):
        for at in range(0, 20, 2):
            writer = first if at % 4 else second
            writer.add([at, at + 1], {"x": make_rows([at, at + 1])})
        StoreWriter(tmp_path, name="ran")
        assert len(list((tmp_path / "shards").glob(".*.part"))) == 0  # small: not on the disk yet
        (tmp_path / "shards" / ".rank-1-000000.safetensors.77.part").touch()
        (tmp_path / "shards" / ".rank-000000.safetensors.77.part").touch()
        StoreWriter(tmp_path, name="rank")
        assert len(list((tmp_path / "shards").glob(".*.part"))) == 2  # both of them live
    StoreWriter(tmp_path, name="rank")
    assert not list((tmp_path / "shards").glob(".*"))
    store = open_store(tmp_path)
    assert [one.name for one in list_files(tmp_path)] == [
        "rank-000000.safetensors",
        "rank-1-000000.safetensors",
    ]
    assert torch.equal(store["x"][:], make_rows(range(20)))


def test_name_of_a_shard_that_was_removed_is_not_used_again(tmp_path: Path) -> None:
    """Its line would speak for the new one, until that has a line of its own."""
    fill(tmp_path, [0, 1], shard_bytes=1)
    fill(tmp_path, [2, 3], shard_bytes=1)
    (tmp_path / "shards" / "writer-000001.safetensors").unlink()
    assert StoreWriter(tmp_path).find_done().tolist() == [0, 1]
    fill(tmp_path, [7], shard_bytes=1)
    names = [one.name for one in list_files(tmp_path)]
    assert names == ["writer-000000.safetensors", "writer-000002.safetensors"]


def test_sample_that_came_twice_is_there_once(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, shard_bytes=1, group_bytes=1) as writer:
        writer.add([5, 6], {"x": torch.tensor([1.0, 2.0])})
        writer.add([6, 7], {"x": torch.tensor([3.0, 4.0])})
    store = open_store(tmp_path)
    assert store.ids.tolist() == [5, 6, 7]
    assert store["x"][:].tolist() == [1.0, 2.0, 4.0]


def test_numbers_may_be_any_and_in_any_order(tmp_path: Path) -> None:
    ids = [2**62, -5, 0, 17]
    with StoreWriter(tmp_path) as writer:
        array = np.array(ids)
        writer.add(array, {"x": torch.arange(4)})
        array[:] = 0  # it is the caller's again
    store = open_store(tmp_path)
    assert store.ids.tolist() == sorted(ids)
    assert store["x"].of(ids).tolist() == [0, 1, 2, 3]
    assert StoreWriter(tmp_path).find_done().tolist() == sorted(ids)


def test_error_inside_of_with_keeps_what_came_before(tmp_path: Path) -> None:
    def write() -> None:
        with StoreWriter(tmp_path) as writer:
            writer.add([1], {"x": torch.ones(1, 2)})
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert open_store(tmp_path).ids.tolist() == [1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"x": torch.zeros(2, 3)}, "for 1 samples came 2 rows"),
        ({"x": torch.zeros(1, 4)}, r"there came torch.float32 \[4\]"),
        ({"x": torch.zeros(1, 3).double()}, r"there came torch.float64 \[3\]"),
        ({"y": torch.zeros(1, 3)}, "has the columns x; what came has y"),
        ({"x": [torch.zeros(1, 3)]}, "holds a row for each sample"),
    ],
)
def test_values_that_do_not_fit_the_columns_are_refused(
    values: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.add([0], {"x": torch.zeros(1, 3)})
        with pytest.raises(errors.StoreError, match=message):
            writer.add([1], values)
    assert open_store(tmp_path).ids.tolist() == [0]


@pytest.mark.parametrize("name", ["../out", "a/b", "", ".hidden", "a b", "x" * 300, "a..b"])
def test_writer_of_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(errors.StoreError, match="cannot name a file of a store"):
        StoreWriter(tmp_path, name=name)


def test_facts_are_kept_and_those_of_the_first_writer_count(tmp_path: Path) -> None:
    fill(tmp_path, [0], facts={"model": "small"})
    fill(tmp_path, [1], facts={"model": "large"})
    assert open_store(tmp_path).facts == {"model": "small"}


def test_a_store_that_another_began_meanwhile_is_looked_at(tmp_path: Path) -> None:
    def check_small(facts: Mapping[str, object]) -> None:
        if facts["model"] != "small":
            raise errors.StoreError("another model")

    options = {"facts": {"model": "small"}, "check": check_small}
    values = {"rows": make_rows([0]), "ragged": [make_ragged(0)]}
    writer = StoreWriter(tmp_path, **options)
    fill(tmp_path, [1], name="other", facts={"model": "large"})
    with pytest.raises(errors.StoreError, match="another model"):
        writer.add([0], values)
    with pytest.raises(errors.StoreError, match="another model"):
        StoreWriter(tmp_path, **options)
    # Both began at the same moment, and the other one's facts were written last.
    about = (tmp_path / "store.json").read_text()
    shutil.rmtree(tmp_path)
    late = StoreWriter(tmp_path, **options)
    late.add([0], values)
    (tmp_path / "store.json").write_text(about)
    with pytest.raises(errors.StoreError, match="another model"):
        late.close()
    assert list_files(tmp_path) == []


def test_shards_of_a_task_have_its_name_also_where_a_head_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_writing, "_ROOM", 16384)
    for name in ("first", "again"):
        with StoreWriter(tmp_path, name=name, group_bytes=1) as writer:
            writer.begin_task("task")
            for at in range(200):
                writer.add([at], {"rows": make_rows([at]), "ragged": [make_ragged(at)]})
            writer.finish_shard()
        names = {path.stem for path in list_files(tmp_path)}
        assert names == {"task", *(f"task-{part}" for part in range(1, len(names)))}
        assert len(names) > 1
    store = open_store(tmp_path)
    assert sum(len(shard.ids(group)) for shard, group in store._groups) == 200
    assert torch.equal(store["rows"][:], make_rows(range(200)))


def test_failed_group_leaves_no_shard_and_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a disk was full, nothing is finished that has a hole where bytes should be."""
    real, calls = os.pwrite, []

    def fail_once(handle: int, data: memoryview, at: int) -> int:
        calls.append(at)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return real(handle, data, at)

    monkeypatch.setattr(os, "pwrite", fail_once)
    row = torch.arange(2**21, dtype=torch.int32)[None]  # 8 MiB

    def write(writer: StoreWriter) -> None:
        for number in range(9):
            writer.add([number], {"x": row + number})

    with StoreWriter(tmp_path, group_bytes=1) as writer:
        with pytest.raises(errors.RunWriteError, match="No space left on device"):
            write(writer)
        writer.add([50], {"x": row + 50})
    store = open_store(tmp_path)
    assert store.ids.tolist() == StoreWriter(tmp_path).find_done().tolist() == [50]
    assert torch.equal(store["x"][0], row[0] + 50)
    assert not list((tmp_path / "shards").glob(".*.part"))


batches = st.lists(
    st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 3)), max_size=6), max_size=6
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=batches, group=st.sampled_from([1, 60, 10**6]), shard=st.sampled_from([1, 200, 10**6]))
def test_any_batches_give_the_same_rows_back_by_number(
    data: list[list[tuple[int, int]]],
    group: int,
    shard: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("store")
    wanted: dict[int, tuple[Tensor, Tensor]] = {}
    with StoreWriter(folder, group_bytes=group, shard_bytes=shard) as writer:
        writer.add([99], {"x": torch.zeros(1, 2), "many": [torch.zeros(2, 3)]})
        for batch in data:
            rows = torch.randn(len(batch), 2)
            many = [torch.randn(count, 3) for _, count in batch]
            writer.add([id for id, _ in batch], {"x": rows, "many": many})
            for at, (id, _) in enumerate(batch):
                wanted.setdefault(id, (rows[at], many[at]))
    store = open_store(folder)
    assert store.ids.tolist() == sorted([*wanted, 99])
    ids = list(wanted)
    rows, many = store["x"].of(ids), store["many"].of(ids)
    for at, id in enumerate(ids):
        assert torch.equal(rows[at], wanted[id][0])
        assert torch.equal(many[at], wanted[id][1])
    assert store["many"].lengths.sum() == 2 + sum(len(many) for _, many in wanted.values())
