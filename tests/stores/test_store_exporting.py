"""Other formats get the same values, piece by piece."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_stores import fill, make_ragged, make_rows
from torch import Tensor

from hookline import _errors as errors
from hookline.stores import Store, StoreWriter, exporting, layout, open_store

KINDS = {
    **{name: name for name in layout.DTYPES},
    "float16": "halffloat",
    "float32": "float",
    "float64": "double",
    "bfloat16": "float",
    "float8_e4m3fn": "float",
    "float8_e5m2": "float",
    "complex64": "fixed_size_list<item: float>[2]",
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Make a store of 20 samples, numbered from 50."""
    fill(tmp_path / "store", range(50, 70), group_bytes=150, shard_bytes=600)
    return open_store(tmp_path / "store")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read no more than a few samples at once."""
    monkeypatch.setattr(exporting, "PIECE", 200)


def make_of_each_dtype(folder: Path) -> tuple[Store, dict[str, Tensor]]:
    """Make a store with a column of each dtype."""
    values = {}
    for name in layout.DTYPES:
        dtype = getattr(torch, name)
        values[name] = torch.tensor([0.0, 1.0, 1.5, 3.0]).to(dtype)
    with StoreWriter(folder) as writer:
        writer.add(range(4), values)
    return open_store(folder), values


def as_numbers(values: Tensor) -> list[Any]:
    wide = torch.complex128 if values.is_complex() else torch.float64
    return values.to(wide).tolist()


def test_arrow_has_rows_as_lists_of_fixed_size(store: Store, small_pieces: None) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = store.to_arrow()
    assert table.column_names == ["id", "rows", "ragged"]
    assert table.schema.field("rows").type == arrow.list_(arrow.float32(), 5)
    assert table.schema.field("ragged").type == arrow.list_(arrow.list_(arrow.int64(), 2))
    assert table.schema.field("rows").metadata == {
        b"hookline.dtype": b"float32",
        b"hookline.shape": b"[5]",
    }
    assert table["id"].to_pylist() == list(range(50, 70))
    assert table["rows"].to_pylist() == make_rows(range(50, 70)).tolist()
    assert table["ragged"].to_pylist() == [make_ragged(one).tolist() for one in range(50, 70)]
    assert table["rows"].num_chunks > 3
    table.validate(full=True)
    assert store.to_arrow(["ragged"]).column_names == ["id", "ragged"]


def test_arrow_has_a_type_for_each_dtype(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    store, values = make_of_each_dtype(tmp_path)
    table = store.to_arrow()
    table.validate(full=True)
    for name, value in values.items():
        field, found = table.schema.field(name), table[name].to_pylist()
        assert str(field.type) == KINDS[name]
        assert field.metadata[b"hookline.dtype"] == name.encode()
        if name == "complex64":
            found = [complex(*one) for one in found]
        assert [one + 0 for one in found] == as_numbers(value), name


def test_arrow_flattens_rows_of_more_dimensions(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    values = torch.randn(3, 2, 3, 4)
    empty = torch.empty(3, 0)
    with StoreWriter(tmp_path) as writer:
        writer.add(range(3), {"x": values, "empty": empty, "many": list(values)})
    table = open_store(tmp_path).to_arrow()
    table.validate(full=True)
    assert table.schema.field("x").metadata[b"hookline.shape"] == b"[2, 3, 4]"
    assert table["x"].type.list_size == 24
    found = torch.tensor(table["x"].to_pylist()).view(3, 2, 3, 4)
    assert torch.equal(found, values)
    assert table["empty"].to_pylist() == [[], [], []]
    assert table["many"].type.value_type.list_size == 12
    assert torch.equal(torch.tensor(table["many"].to_pylist()).view(3, 2, 3, 4), values)


def test_arrow_of_no_samples_has_columns(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with StoreWriter(tmp_path / "store") as writer:
        writer.add([], {"x": torch.empty(0, 3)})
    store = open_store(tmp_path / "store")
    table = store.to_arrow()
    assert (table.num_rows, table.column_names) == (0, ["id", "x"])
    store.to_parquet(tmp_path / "x.parquet")


def test_parquet_is_written_group_by_group(
    store: Store, small_pieces: None, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "out.parquet"
    store.to_parquet(path)
    file = parquet.ParquetFile(path)
    assert file.num_row_groups > 3
    assert file.read().equals(store.to_arrow())
    assert file.schema_arrow.field("rows").metadata[b"hookline.shape"] == b"[5]"
    file.close()
    store.to_parquet(path, ["ragged"])
    assert parquet.read_table(path).column_names == ["id", "ragged"]


def test_no_piece_is_larger_than_asked(
    store: Store, small_pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    sizes = []
    real = exporting._make_rows

    def note(arrow: Any, kind: Any, rows: Tensor) -> Any:
        sizes.append(rows.nbytes)
        return real(arrow, kind, rows)

    monkeypatch.setattr(exporting, "_make_rows", note)
    store.to_parquet(tmp_path / "out.parquet")
    assert max(sizes) <= 200
    assert sum(sizes) == store.nbytes


def test_parquet_that_failed_leaves_the_old_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")

    def fail(*args: object) -> None:
        raise OSError("gone")

    path = tmp_path / "out.parquet"
    path.write_text("old")
    monkeypatch.setattr(exporting, "_make_rows", fail)
    with pytest.raises(OSError, match="gone"):
        store.to_parquet(path)
    assert path.read_text() == "old"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.parquet", "store"]


def test_dataset_of_datasets_has_the_same_values(store: Store, small_pieces: None) -> None:
    datasets = pytest.importorskip("datasets")
    found = store.to_datasets()
    assert isinstance(found, datasets.Dataset)
    assert len(found) == 20
    assert found[3]["id"] == 53
    assert found[3]["ragged"] == make_ragged(53).tolist()
    assert torch.equal(found.with_format("torch")[4:9]["rows"], make_rows(range(54, 59)))
    assert found.features["rows"].length == 5


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_zarr_has_an_array_for_each_column(
    store: Store, small_pieces: None, tmp_path: Path
) -> None:
    zarr = pytest.importorskip("zarr")
    store.to_zarr(tmp_path / "out")
    found = zarr.open_group(str(tmp_path / "out"), mode="r")
    assert sorted(found) == ["ids", "ragged", "rows"]
    assert found["ids"][:].tolist() == list(range(50, 70))
    assert found["rows"][:].tolist() == make_rows(range(50, 70)).tolist()
    rows, ends = found["ragged/rows"][:], found["ragged/ends"][:]
    parts = np.split(rows, ends[:-1])
    assert [one.tolist() for one in parts] == [make_ragged(one).tolist() for one in range(50, 70)]
    assert found["rows"].attrs["dtype"] == "float32"
    with pytest.raises(errors.RunExists, match="is there already"):
        store.to_zarr(tmp_path / "out")


def test_zarr_has_every_dtype(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    store, values = make_of_each_dtype(tmp_path / "store")
    store.to_zarr(tmp_path / "out")
    found = zarr.open_group(str(tmp_path / "out"), mode="r")
    for name, value in values.items():
        assert (found[name][:] + 0).tolist() == as_numbers(value), name
    assert found["bfloat16"].dtype == found["float8_e5m2"].dtype == np.float32
    assert found["uint16"].dtype == np.uint16


def test_zarr_stays_in_its_folder(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    with StoreWriter(tmp_path / "store") as writer:
        names = ["../../out", "..", "a/b", "%2F", "layers.2:output"]
        writer.add([0], {name: torch.ones(1, 2) for name in names})
    open_store(tmp_path / "store").to_zarr(tmp_path / "out")
    found = zarr.open_group(str(tmp_path / "out"), mode="r")
    assert {found[one].attrs["column"] for one in found if one != "ids"} == set(names)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "store"]


@pytest.mark.parametrize(
    ("package", "extra", "method"),
    [
        ("pyarrow", "parquet", "to_arrow"),
        ("pyarrow", "parquet", "to_parquet"),
        ("datasets", "datasets", "to_datasets"),
        ("zarr", "zarr", "to_zarr"),
    ],
)
def test_missing_package_is_named_with_its_extra(
    package: str,
    extra: str,
    method: str,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    arguments = [tmp_path / "out"] if method in ("to_parquet", "to_zarr") else []
    with pytest.raises(ImportError) as caught:
        getattr(store, method)(*arguments)
    assert f'{package} is not installed; install it with: pip install "hookline[{extra}]"' in str(
        caught.value
    )


def test_column_with_the_name_of_the_number_is_told_of(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with StoreWriter(tmp_path) as writer:
        writer.add([4], {"id": torch.ones(1)})
    with pytest.raises(errors.StoreError, match="`id` is what the number of a sample is called"):
        open_store(tmp_path).to_arrow()
