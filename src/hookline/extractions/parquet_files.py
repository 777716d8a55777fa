"""Samples of Parquet files: a dict a row, read by row groups as they are needed.

pyarrow is needed only to open them; importing this file needs nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from hookline._tables import import_optional
from hookline.extractions.finding_files import Files
from hookline.extractions.samples import Broken, SampleError, Source, pick_column
from hookline.extractions.wanted import Ids, Wanted

_ROWS_AT_ONCE = 1024


class Parquet(Source):
    """The rows of Parquet files, one file after the other."""

    def __init__(self, files: Files, name: str, *, column: str | None = None) -> None:
        self._parquet = import_optional("pyarrow.parquet", extra="parquet")
        self._files = files
        self._column = column
        self._groups: list[tuple[Path, list[int]]] = []
        size = 0
        for path in files.full_paths():
            with self._parquet.ParquetFile(path) as file:
                columns, metadata = file.schema_arrow.names, file.metadata
                if column is not None and column not in columns:
                    raise ValueError(
                        f"column={column!r} is not among the columns of `{path}`: "
                        f"{', '.join(columns)}"
                    )
                counts = [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]
            self._groups.append((path, counts))
            size += sum(counts)
        super().__init__(name, size)

    def fingerprint(self) -> str:
        """Give the names and sizes of the files."""
        return self._files.fingerprint(self._column)

    def samples(self, wanted: Wanted) -> Generator[tuple[int, Any]]:
        """Yield the wanted rows; a row group that holds none of them is not read."""
        start = 0
        for path, counts in self._groups:
            needed = []
            for at, count in enumerate(counts):
                ids = wanted.within(start, start + count)
                if ids.size:
                    needed.append((at, start, ids))
                start += count
            if needed:
                yield from self._read_file(path, needed)

    def _read_file(
        self, path: Path, needed: list[tuple[int, int, Ids]]
    ) -> Iterator[tuple[int, Any]]:
        """Yield the wanted rows of the row groups that are needed."""
        with self._parquet.ParquetFile(path) as file:
            for at, start, ids in needed:
                yield from self._read_group(file, at, start, ids)

    def _read_group(self, file: Any, group: int, start: int, ids: Ids) -> Iterator[tuple[int, Any]]:
        """Yield the wanted rows of a row group; where it cannot be read on, the rest is broken."""
        columns = None if self._column is None else [self._column]
        parts = file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns)
        left = ids
        while left.size:
            try:
                part = next(parts)
                chosen = left[left < start + part.num_rows]
                rows = part.take(chosen - start).to_pylist()
            except Exception as error:
                for number in left.tolist():
                    yield number, Broken(SampleError(number, error))
                return
            for number, row in zip(chosen.tolist(), rows, strict=True):
                yield number, pick_column(row, self._column)
            start += part.num_rows
            left = left[chosen.size :]
