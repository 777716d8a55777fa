"""A shard, an index or a `store.json` that does not tell the truth is refused, by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_stores import change_head, flip_bit, list_files, make_store, split_head

from hookline import _errors as errors
from hookline.stores import Store, StoreWriter, open_store

Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Make a store, and give the second of its shards."""
    make_store(tmp_path)
    return list_files(tmp_path)[1]


def set_entry(key: str, **facts: Any) -> Change:
    return lambda head, told: head[key].update(facts)


def set_group(**facts: Any) -> Change:
    return lambda head, told: told["groups"][0].update(facts)


LIES: dict[str, Change] = {
    "offsets outside": set_entry("000000/rows", data_offsets=[10**6, 10**6 + 80]),
    "offsets far outside": set_entry("000000/rows", data_offsets=[2**70, 2**70 + 80]),
    "negative offsets": set_entry("000000/rows", data_offsets=[-80, 0]),
    "offsets the wrong way round": set_entry("000000/rows", data_offsets=[80, 0]),
    "offsets that are fractions": set_entry("000000/rows", data_offsets=[64.0, 144.0]),
    "offsets that are text": set_entry("000000/rows", data_offsets=["0", "80"]),
    "offsets without an end": set_entry("000000/rows", data_offsets=[0]),
    "too many rows": set_entry("000000/rows", shape=[10**9, 5]),
    "rows of another width": set_entry("000000/rows", shape=[5, 4]),
    "rows of more dimensions": set_entry("000000/rows", shape=[4, 5, 1]),
    "negative shape": set_entry("000000/rows", shape=[-4, -5]),
    "infinite shape": set_entry("000000/rows", shape=[float("inf"), 5]),
    "shape that is none": set_entry("000000/rows", shape=None),
    "another dtype": set_entry("000000/rows", dtype="I32"),
    "a dtype that is none": set_entry("000000/rows", dtype="X9"),
    "ids of another dtype": set_entry("000000/#ids", dtype="F64"),
    "ids of fewer samples": lambda head, told: told["groups"][0].update(samples=3),
    "ends of another dtype": set_entry("000000/#ends/ragged", dtype="F64"),
    "no rows": lambda head, told: head.pop("000000/rows"),
    "no ids": lambda head, told: head.pop("000000/#ids"),
    "no ends": lambda head, told: head.pop("000000/#ends/ragged"),
    "no groups": lambda head, told: told.pop("groups"),
    "groups that are a number": lambda head, told: told.update(groups=7),
    "groups that are names": lambda head, told: told.update(groups=["a"]),
    "group outside": set_group(end=10**9),
    "group that does not reach its rows": set_group(begin=0, end=0, crc=0),
    "entry that is a list": lambda head, told: head.update({"000000/rows": [1, 2]}),
    "no version": lambda head, told: told.pop("version"),
}


@pytest.mark.parametrize("lie", LIES)
def test_head_that_lies_is_refused(lie: str, shard: Path, tmp_path: Path) -> None:
    change_head(shard, lambda head, told: None)
    assert len(open_store(tmp_path)) == 20  # the change alone does no harm
    change_head(shard, LIES[lie])
    with pytest.raises(errors.StoreError, match=shard.name) as caught:
        open_store(tmp_path)
    if lie != "no version":
        assert isinstance(caught.value, errors.CorruptShard)
        assert "`hookline verify --repair`" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\1\2\3",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 50) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc",
        struct.pack("<Q", 6) + b"[1, 2]",
        struct.pack("<Q", 20_000) + b"[" * 20_000,
        struct.pack("<Q", 33) + b'{"__metadata__": {"hookline": ""}}',
        struct.pack("<Q", 44) + b'{"__metadata__": {"hookline.store": "[1]"}} ',
    ],
    ids=range(10),
)
def test_file_without_a_head_is_refused(data: bytes, shard: Path, tmp_path: Path) -> None:
    shard.write_bytes(data)
    with pytest.raises(errors.CorruptShard, match=f"`shards/{shard.name}` in .* is damaged"):
        open_store(tmp_path)


def test_file_that_was_cut_off_anywhere_is_refused(shard: Path, tmp_path: Path) -> None:
    data = shard.read_bytes()
    for end in (7, 8, 100, len(data) // 2, len(data) - 1):
        shard.write_bytes(data[:end])
        with pytest.raises(errors.CorruptShard):
            open_store(tmp_path)


def test_bit_that_flipped_in_the_data_is_found_by_the_checksum(shard: Path, tmp_path: Path) -> None:
    _head, rest = split_head(shard.read_bytes())
    assert len(rest) > 100
    size = shard.stat().st_size
    for at in (size - len(rest), size - 1):
        flip_bit(shard, at)
        found = next(one for one in open_store(tmp_path).shards if one.file == shard.name)
        with pytest.raises(errors.CorruptShard, match="the checksum it was written with"):
            list(found.check())
        flip_bit(shard, at)
    assert sum(found.check()) > 0


@pytest.mark.parametrize("ends", [[0, 1, 99, 0], [2, 1, 3, 6], [-1, 1, 3, 6], [0, 0, 0, 0]])
def test_ends_that_lead_outside_of_the_rows_are_refused(ends: list[int], tmp_path: Path) -> None:
    make_store(tmp_path)
    shard = list_files(tmp_path)[0]
    head, rest = split_head(shard.read_bytes())
    at = shard.stat().st_size - len(rest) + head["000000/#ends/ragged"]["data_offsets"][0]
    data = bytearray(shard.read_bytes())
    assert struct.unpack("<4q", data[at : at + 32]) == (0, 1, 3, 6)
    data[at : at + 32] = struct.pack("<4q", *ends)
    shard.write_bytes(data)
    with pytest.raises(errors.CorruptShard, match="does not say whose the rows of `ragged` are"):
        open_store(tmp_path)["ragged"][5]


def test_shard_of_a_newer_version_is_not_called_damaged(shard: Path, tmp_path: Path) -> None:
    change_head(shard, lambda head, told: told.update(version=99))
    with pytest.raises(errors.NewerRun, match=r"newer hookline \(version 99"):
        open_store(tmp_path)


def test_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path)
    path = tmp_path / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    for open_it in (open_store, StoreWriter):
        with pytest.raises(errors.NewerRun, match="Update hookline to read it"):
            open_it(tmp_path)


COLUMN = {"name": "x", "dtype": "F32", "shape": [3], "is_ragged": False}


@pytest.mark.parametrize(
    "about",
    [
        "not JSON",
        "[]",
        "{}",
        json.dumps({"version": "1", "columns": [], "facts": {}}),
        json.dumps({"version": 1, "columns": [{}], "facts": {}}),
        json.dumps({"version": 1, "columns": 5, "facts": {}}),
        json.dumps({"version": 1, "columns": [COLUMN | {"dtype": "F7"}], "facts": {}}),
        json.dumps({"version": 1, "columns": [COLUMN | {"shape": [-1]}], "facts": {}}),
        json.dumps({"version": 1, "columns": [COLUMN | {"shape": [0.5]}], "facts": {}}),
        json.dumps({"version": 1, "columns": [COLUMN | {"name": "#ids"}], "facts": {}}),
        json.dumps({"version": 1, "columns": [COLUMN]}),
    ],
)
def test_store_that_does_not_say_what_it_holds_is_refused(about: str, tmp_path: Path) -> None:
    make_store(tmp_path)
    (tmp_path / "store.json").write_text(about)
    with pytest.raises(errors.StoreError):
        Store(tmp_path)


def test_folder_that_is_no_store_is_told_of(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(errors.NoSuchRun, match="holds no tensor store"):
            open_store(path)
    (tmp_path / "file").touch()
    with pytest.raises(errors.NoSuchRun):
        open_store(tmp_path / "file")


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", ".", "a/b.safetensors", "a\0b", 7, None]
)
def test_index_that_leads_out_of_the_folder_is_refused(name: object, tmp_path: Path) -> None:
    make_store(tmp_path)
    path = tmp_path / "index" / "writer.jsonl"
    line = {"file": name, "bytes": 1, "samples": 1, "ranges": [[500, 501]]}
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    with pytest.raises(errors.StoreError, match="cannot name a file of a store"):
        StoreWriter(tmp_path).find_done()
    assert len(open_store(tmp_path)) == 20  # which asks the shards, and no index


def test_column_of_any_name_stays_in_its_shard(tmp_path: Path) -> None:
    """Names of columns are addresses, and no names of files."""
    name = "../../../escape"
    with StoreWriter(tmp_path / "store") as writer:
        writer.add([0], {name: torch.ones(1, 2)})
    assert open_store(tmp_path / "store")[name][0].tolist() == [1.0, 1.0]
    assert [one.name for one in tmp_path.iterdir()] == ["store"]
