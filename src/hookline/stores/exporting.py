"""A store in the formats of others: Arrow, Parquet, datasets, zarr. Read piece by piece.

What these formats have no name for becomes something that holds the same values: bfloat16 and the
floats of 8 bits become float32, in Arrow complex numbers two float32. The dtype and the shape of a
row are in the metadata of each column, as `hookline.dtype` and `hookline.shape`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hookline._errors import RunExists, StoreError
from hookline._tables import import_optional
from hookline.stores.layout import Column

if TYPE_CHECKING:
    from hookline.stores.store import Store

PIECE = 64 << 20
"""Bytes that are read, converted and written at once."""

_CHUNK = 4 << 20
"""Bytes of a chunk of zarr."""

_ID = "id"


def make_arrow(store: Store, columns: Sequence[str] | None = None) -> Any:
    """Give samples as a `pyarrow.Table`; see `Store.to_arrow`."""
    arrow = import_optional("pyarrow", extra="parquet")
    names = _choose(store, columns, _ID)
    schema = _make_schema(arrow, store, names)
    return arrow.Table.from_batches(_read_arrow(arrow, schema, store, names), schema)


def make_datasets(store: Store, columns: Sequence[str] | None = None) -> Any:
    """Give samples as a `datasets.Dataset`; see `Store.to_datasets`."""
    datasets = import_optional("datasets")
    return datasets.Dataset(make_arrow(store, columns))


def write_parquet(
    store: Store, path: str | os.PathLike[str], columns: Sequence[str] | None = None
) -> None:
    """Write samples into a file of Parquet; see `Store.to_parquet`."""
    arrow = import_optional("pyarrow", extra="parquet")
    parquet = import_optional("pyarrow.parquet", extra="parquet")
    names = _choose(store, columns, _ID)
    schema = _make_schema(arrow, store, names)
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with parquet.ParquetWriter(part, schema) as writer:
            for batch in _read_arrow(arrow, schema, store, names):
                writer.write_batch(batch, row_group_size=len(batch))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def write_zarr(
    store: Store, path: str | os.PathLike[str], columns: Sequence[str] | None = None
) -> None:
    """Write samples into a group of zarr; see `Store.to_zarr`."""
    zarr = import_optional("zarr")
    names = _choose(store, columns, "ids")
    if Path(path).exists():
        raise RunExists(f"`{path}` is there already; choose another name, or remove it first")
    group = zarr.open_group(str(path), mode="w-")
    ids = group.create_array(name="ids", data=np.ascontiguousarray(store.ids))
    ids.attrs["samples"] = len(store)
    for name, own in names.items():
        column = store[own].column
        node, target = group, _name_node(name)
        total = len(store)
        if column.is_ragged:
            node, target = group.create_group(target), "rows"
            lengths = store[own].lengths
            total = int(lengths.sum())
            node.create_array(name="ends", data=np.cumsum(lengths, dtype=np.int64))
        sample = _to_numpy(torch.empty((0, *column.shape), dtype=column.dtype))
        each = max(1, _CHUNK // max(column.row_bytes, 1))
        array = node.create_array(
            name=target,
            shape=(total, *column.shape),
            dtype=sample.dtype,
            chunks=(each, *(max(one, 1) for one in column.shape)),
        )
        array.attrs.update({"column": own, "dtype": str(column.dtype).removeprefix("torch.")})
        at = 0
        for begin, end in _find_pieces(store, [own]):
            rows = store[own].rows(np.arange(begin, end))
            if rows.numel():
                array[at : at + len(rows)] = _to_numpy(rows)
            at += len(rows)


def _choose(store: Store, columns: Sequence[str] | None, number: str) -> dict[str, str]:
    """Give by the name that was asked for the one that the store has."""
    asked = list(store.columns) if columns is None else list(columns)
    if number in asked:
        raise StoreError(
            f"`{number}` is what the number of a sample is called, and a column of the store "
            f"`{store.place.name}` as well: leave it out with `columns=[...]`"
        )
    return {name: store[name].name for name in asked}


def _find_pieces(store: Store, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Divide the samples, so that each piece has about so many bytes; at least one sample."""
    count = len(store)
    sizes = np.full(count, 8, np.int64)
    for name in names:
        sizes += store[name].lengths * store[name].column.row_bytes
    until = np.cumsum(sizes)
    begin = 0
    while begin < count:
        before = int(until[begin - 1]) if begin else 0
        end = max(int(np.searchsorted(until, before + PIECE, side="right")), begin + 1)
        yield begin, end
        begin = end


def _to_numpy(rows: Tensor) -> Any:
    """Give rows as an array; floats that NumPy has not as float32."""
    if rows.dtype == torch.bfloat16 or (rows.dtype.itemsize == 1 and rows.is_floating_point()):
        rows = rows.float()
    return rows.numpy()


def _read_arrow(arrow: Any, schema: Any, store: Store, names: dict[str, str]) -> Iterator[Any]:
    """Read samples as record batches."""
    for begin, end in _find_pieces(store, list(names.values())):
        positions = np.arange(begin, end)
        arrays = [arrow.array(store.ids[begin:end])]
        for field, own in zip(list(schema)[1:], names.values(), strict=True):
            column = store[own]
            rows = column.rows(positions)
            kind = field.type.value_type if column.column.is_ragged else field.type
            values = _make_rows(arrow, kind, rows)
            if column.column.is_ragged:
                ends = np.cumsum([0, *column.lengths[positions]], dtype=np.int32)
                values = arrow.ListArray.from_arrays(ends, values, type=field.type)
            arrays.append(values)
        yield arrow.RecordBatch.from_arrays(arrays, schema=schema)


def _make_rows(arrow: Any, kind: Any, rows: Tensor) -> Any:
    """Make an array with an element for each row."""
    flat = torch.view_as_real(rows) if rows.is_complex() else rows
    values = arrow.array(_to_numpy(flat).reshape(-1))
    if not arrow.types.is_fixed_size_list(kind):
        return values
    # Also where a row is empty, of which the values cannot tell how many there are.
    return arrow.Array.from_buffers(kind, len(rows), [None], children=[values])


def _make_schema(arrow: Any, store: Store, names: dict[str, str]) -> Any:
    """Say what the columns hold."""
    fields = [arrow.field(_ID, arrow.int64(), nullable=False)]
    for name, own in names.items():
        column = store[own].column
        kind = _make_kind(arrow, column)
        metadata = {
            "hookline.dtype": str(column.dtype).removeprefix("torch."),
            "hookline.shape": json.dumps(list(column.shape)),
        }
        fields.append(arrow.field(name, kind, nullable=False, metadata=metadata))
    return arrow.schema(fields)


def _make_kind(arrow: Any, column: Column) -> Any:
    """Give the type of a column: a number, a list of so many, or any number of these."""
    empty = torch.empty(0, dtype=column.dtype)
    is_complex = empty.is_complex()
    number = _to_numpy(torch.view_as_real(empty) if is_complex else empty).dtype
    kind = arrow.from_numpy_dtype(number)
    if column.shape or is_complex:
        kind = arrow.list_(kind, math.prod(column.shape) * (1 + is_complex))
    return arrow.list_(kind) if column.is_ragged else kind


def _name_node(name: str) -> str:
    """Give a name without what would lead into another folder."""
    plain = name.replace("%", "%25").replace("/", "%2F").replace("\\", "%5C")
    return plain if plain.strip(".") else plain.replace(".", "%2E")
