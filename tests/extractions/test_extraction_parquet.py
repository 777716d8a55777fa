"""Samples of Parquet files: their ids, and what is not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hookline.extractions.sources import Broken, Wanted, open_source

EVERYTHING = Wanted.everything()


def read(data: Any, wanted: Wanted = EVERYTHING, **options: Any) -> list[tuple[int, Any]]:
    """Read the wanted samples of data."""
    return list(open_source(data, **options).samples(wanted))


def write_parquet(path: Path, start: int, count: int, group: int) -> None:
    """Write rows that count from `start`, in row groups of `group`."""
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    numbers = list(range(start, start + count))
    table = pyarrow.table({"n": numbers, "tokens": [[number] * 2 for number in numbers]})
    pyarrow.parquet.write_table(table, path, row_group_size=group, compression="none")


def test_parquet_files_are_read_as_one(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", 0, 7, 3)
    write_parquet(tmp_path / "1.parquet", 7, 4, 10)
    (tmp_path / "README.txt").write_text("what this is")
    source = open_source(tmp_path)
    assert source.size == 11
    assert source.is_repeatable
    expected = [(number, {"n": number, "tokens": [number] * 2}) for number in range(11)]
    assert list(source.samples(EVERYTHING)) == expected
    wanted = Wanted.of_ranges([(1, 4), (6, 9)])
    assert list(source.samples(wanted)) == [*expected[1:4], *expected[6:9]]
    assert read(f"{tmp_path}/1*.parquet", column="n") == [(0, 7), (1, 8), (2, 9), (3, 10)]
    with pytest.raises(ValueError, match=r"not among the columns of .*: n, tokens"):
        open_source(tmp_path, column="text")


def test_row_groups_longer_than_a_part_keep_their_ids(tmp_path: Path) -> None:
    write_parquet(tmp_path / "0.parquet", 0, 5000, 4000)
    wanted = Wanted.of_ranges([(1020, 1030), (3999, 4001), (4990, None)])
    found = read(tmp_path / "0.parquet", wanted, column="n")
    assert [number for number, _ in found] == list(wanted.ids(5000))
    assert all(number == sample for number, sample in found)


def test_row_groups_that_hold_nothing_wanted_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_parquet(tmp_path / "0.parquet", 0, 10, 2)
    write_parquet(tmp_path / "1.parquet", 10, 10, 2)
    source = open_source(tmp_path)
    read_groups = []
    original = parquet.ParquetFile.iter_batches

    def note(self: Any, *args: Any, **options: Any) -> Any:
        read_groups.extend(options["row_groups"])
        return original(self, *args, **options)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", note)
    assert [number for number, _ in source.samples(Wanted.of_ranges([(3, 5), (9, 10)]))] == [
        3,
        4,
        9,
    ]
    assert read_groups == [1, 2, 4]


def test_broken_row_group_is_given_as_such_and_the_rest_is_read(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "0.parquet"
    write_parquet(path, 0, 9, 3)
    with parquet.ParquetFile(path) as file:
        chunk = file.metadata.row_group(1).column(0)
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        end = start + chunk.total_compressed_size
    data = bytearray(path.read_bytes())
    data[start:end] = b"\xff" * (end - start)
    path.write_bytes(data)
    found = read(path, column="n")
    assert [number for number, _ in found] == list(range(9))
    assert [number for number, sample in found if isinstance(sample, Broken)] == [3, 4, 5]
    assert found[6:] == [(6, 6), (7, 7), (8, 8)]
