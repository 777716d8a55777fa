"""Rows of a Ray Dataset as samples: in the driver, which deals them out, and in its actors.

Blocks of rows stay where Ray has them. The driver is told how many rows each has, in order, and so
it numbers them without reading one and without waiting for the last.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookline.extractions.ray_cluster import import_ray
from hookline.extractions.samples import Source, digest, read_sample
from hookline.extractions.wanted import Ids, Wanted


def is_ray_dataset(data: Any) -> bool:
    """Tell whether data is a Ray Dataset; where Ray was not imported, nothing is."""
    module = sys.modules.get("ray.data")
    return module is not None and isinstance(data, module.Dataset)


class RayRows(Source):
    """The rows of a Ray Dataset, numbered by their places or by a column.

    Args:
        data: the data set.
        column: the field that is the sample; no other is read.
        ids: the column of integers that numbers the samples.
        limit: so many rows, from the first one on.
    """

    def __init__(
        self, data: Any, *, column: str | None = None, ids: str | None = None, limit: int | None
    ) -> None:
        with in_order(data):
            schema = data.schema()  # where it is not known, a first block is made
        names = [] if schema is None else list(schema.names)
        for key, name in (("column", column), ("ids", ids)):
            if name is not None and names and name not in names:
                raise ValueError(f"{key}={name!r} is not among the columns: {', '.join(names)}")
        self.ids = ids
        """The column that numbers the samples; None where their places do."""
        self.wanted = Wanted.of_ranges([(0, limit)])
        """The places of the rows that are to be read."""
        # Asked without running anything: to count all rows Ray may have to read them.
        count = data._meta_count() if hasattr(data, "_meta_count") else None
        super().__init__(type(data).__name__, None if count is None else self.wanted.count(count))
        self._fingerprint = _describe(data, schema, column, ids)
        self._data, self._column = data, column
        if column is not None and names:
            self._data = data.select_columns(list(dict.fromkeys([column, ids or column])))

    def fingerprint(self) -> str:
        """Give the columns and the files, where Ray knows them, and what the numbers depend on."""
        return self._fingerprint

    def samples(self, wanted: Wanted) -> Generator[tuple[int, Any]]:
        """Yield the wanted rows, read here."""
        with in_order(self._data):
            for place, row in enumerate(self._data.iter_rows()):
                if place >= self.wanted.end:
                    return
                id = place if self.ids is None else int(row[self.ids])
                if id in wanted:
                    yield id, _pick(id, row, self._column, self.ids)

    def blocks(self) -> Iterator[tuple[Any, int, int]]:
        """Yield blocks in order, as Ray makes them: a reference, its first row, the row after all.

        Ray makes as many ahead as its memory for objects holds.
        """
        with in_order(self._data):
            for bundle in self._data.iter_internal_ref_bundles():
                slices = getattr(bundle, "slices", None) or [None] * len(bundle.block_refs)
                found = zip(bundle.block_refs, bundle.metadata, slices, strict=True)
                for ref, metadata, piece in found:
                    if piece is not None:
                        yield ref, piece.start_offset, piece.end_offset
                    else:
                        yield ref, 0, metadata.num_rows


@contextlib.contextmanager
def in_order(data: Any) -> Iterator[None]:
    """Have Ray give rows in the order of the data set, and say nothing meanwhile."""
    context, logger = data.context, logging.getLogger("ray.data")
    before = context.execution_options.preserve_order, context.enable_progress_bars
    level = logger.level
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    logger.setLevel(logging.CRITICAL)  # what it says of errors is in the error
    try:
        yield
    finally:
        context.execution_options.preserve_order, context.enable_progress_bars = before
        logger.setLevel(level)


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a block."""

    begins: list[int]
    """Where each run of rows begins in the block."""
    ends: list[int]
    """Where it ends."""
    first: int
    """The place in the data set of the block's row 0."""


def cut_blocks(
    blocks: Iterable[tuple[Any, int, int]], wanted: Wanted, find_size: Callable[[int], int]
) -> Iterator[tuple[list[Part], list[Any]]]:
    """Cut the rows at wanted places into tasks: parts, and the references of their blocks.

    `find_size` says how many rows a task has that comes after so many.
    """
    parts: list[Part] = []
    refs: list[Any] = []
    place = seen = held = 0
    size = find_size(0)
    for ref, begin, end in blocks:
        first = place - begin
        ids = wanted.within(place, place + end - begin)
        while len(ids):
            taken, ids = ids[: size - held], ids[size - held :]
            rows = Wanted.of_ids(taken - first)
            parts.append(Part(rows.starts.tolist(), rows.ends.tolist(), first))
            refs.append(ref)
            held += len(taken)
            if held == size:
                yield parts, refs
                parts, refs, seen, held = [], [], seen + held, 0
                size = find_size(seen)
        place += end - begin
        if place >= wanted.end:
            break
    if parts:
        yield parts, refs


def read_parts(
    parts: Sequence[Part], blocks: Sequence[Any], ids: str | None
) -> tuple[Ids, Iterator[dict[str, Any]]]:
    """Give the numbers of the rows of a task, and the rows as they are asked for."""
    import_ray()
    from ray.data.block import BlockAccessor

    pieces: list[Any] = []
    numbers = [np.empty(0, np.int64)]
    for part, block in zip(parts, blocks, strict=True):
        for begin, end in zip(part.begins, part.ends, strict=True):
            piece = BlockAccessor.for_block(BlockAccessor.for_block(block).slice(begin, end))
            places = np.arange(part.first + begin, part.first + end, dtype=np.int64)
            pieces.append(piece)
            numbers.append(places if ids is None else _read_ids(piece.to_numpy(ids), ids))
    found = np.concatenate(numbers)
    if len(np.unique(found)) < len(found):
        raise ValueError(
            f"the column `{ids}` holds a number twice; each sample needs one of its own"
        )
    return found, (row for piece in pieces for row in piece.iter_rows(public_row_format=True))


class HandedRows(Source):
    """Rows that an actor was handed, one task after the other."""

    def __init__(self, column: str | None, ids: str | None) -> None:
        super().__init__("rows of a Ray Dataset", None)
        self._column, self._own = column, ids
        self._held: Iterable[tuple[int, Mapping[str, Any]]] = ()

    def fingerprint(self) -> str:
        """Give nothing: the driver knows what the rows are of."""
        return ""

    @contextlib.contextmanager
    def holding(self, ids: Ids, rows: Iterable[Mapping[str, Any]]) -> Iterator[None]:
        """Have these rows as samples."""
        self._held = zip(ids.tolist(), rows, strict=True)
        try:
            yield
        finally:
            self._held = ()

    def samples(self, wanted: Wanted) -> Generator[tuple[int, Any]]:
        """Yield the wanted rows that are held, in the order they came in."""
        kept = set(wanted.ids(None))
        for id, row in self._held:
            if id in kept:
                yield id, _pick(id, row, self._column, self._own)


def _pick(id: int, row: Mapping[str, Any], column: str | None, ids: str | None) -> Any:
    """Give the sample of a row: a field, or all of them but the number."""
    if column is None and ids is not None:
        row = {name: value for name, value in row.items() if name != ids}
    return read_sample(id, _as_it_is, row, column)


def _as_it_is(row: Any) -> Any:
    return row


def _read_ids(values: Any, column: str) -> Ids:
    """Give the numbers that a column holds."""
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise ValueError(
            f"the column `{column}` holds {values.dtype}; the numbers of samples are integers, "
            "and none is missing"
        )
    return np.asarray(values, np.int64)


def _describe(data: Any, schema: Any, column: str | None, ids: str | None) -> str:
    """Say what tells a data set apart, in words; the same before and after it was read."""
    ray, files = import_ray(), data.input_files()
    from ray.data.dataset import MaterializedDataset

    facts = ["Ray Dataset"]
    if schema is not None:
        kinds = zip(schema.names, map(str, schema.types), strict=True)
        # What is in a list has one name in a file and another in memory.
        facts += [f"{name} {kind.replace('<element: ', '<item: ')}" for name, kind in kinds]
    if files:
        facts.append(f"{len(files)} files {digest(sorted(files))}")
    if isinstance(data, MaterializedDataset):
        facts.append(f"{data.count()} samples")
    if column is not None:
        facts.append(f"column {column}")
    # In which order the rows of many files come is for Ray to say.
    facts.append(f"in the order of Ray {ray.__version__}" if ids is None else f"numbers {ids}")
    return ", ".join(facts)
