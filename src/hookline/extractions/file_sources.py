"""Samples of files that need no other package: lines of text and JSON, rows of arrays."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.extractions.finding_files import Files
from hookline.extractions.line_tables import LineTable, ReadableBytes, count_lines
from hookline.extractions.object_sources import Rows
from hookline.extractions.samples import Source, read_sample
from hookline.extractions.wanted import Wanted


class Lines(Source):
    """A sample a line: its text, or the JSON value that it holds. Other lines are not parsed.

    A blank line is an empty sample in text, so that an id is the number of a line, and none at all
    in JSON. The files are read once when they are opened, to find where their lines begin.
    """

    def __init__(self, files: Files, name: str, *, column: str | None = None) -> None:
        self._files = files
        self._column = column
        self._is_json = files.kind == "jsonl"
        self._tables = [(path, self._count(path)) for path in files.full_paths()]
        super().__init__(name, sum(table.count for _, table in self._tables))

    def fingerprint(self) -> str:
        """Give the names and sizes of the files."""
        return self._files.fingerprint(self._column)

    def samples(self, wanted: Wanted) -> Generator[tuple[int, Any]]:
        """Yield the wanted lines; files before the first and after the last are not opened."""
        read = json.loads if self._is_json else _to_text
        start = 0
        first = int(wanted.starts[0]) if wanted.starts.size else 0
        for path, table in self._tables:
            if start < wanted.end and first < start + table.count:
                with _open(path) as file:
                    for number, line in table.read(file, wanted, start):
                        yield number, read_sample(number, read, line, self._column)
            start += table.count

    def _count(self, path: Path) -> LineTable:
        with _open(path) as file:
            return count_lines(file, leaves_out_blank=self._is_json)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[ReadableBytes]:
    """Open a file for its bytes, unpacked; an error of reading it names it."""
    is_packed = path.name.lower().endswith(".gz")
    with gzip.open(path) if is_packed else path.open("rb") as file:
        try:
            yield file
        except Exception as error:
            error.add_note(f"while reading `{path}`")
            raise


def _to_text(line: bytes) -> str:
    """Give a line's text without its end."""
    return line.removesuffix(b"\n").removesuffix(b"\r").decode()


def open_npy(files: Files, name: str) -> Rows:
    """Open the rows of an array in an `.npy` file, which stays on disk."""
    (path,) = files.full_paths()
    array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    if not array.ndim:
        raise ValueError(f"`{name}` holds a single number, and samples are the rows of an array")
    if array.dtype.kind not in "biufc":
        raise ValueError(f"`{name}` holds {array.dtype}, and rows are read as tensors of numbers")
    native = array.dtype.newbyteorder("=")

    def read(number: int) -> Tensor:
        # A copy, since torch warns of memory that cannot be written.
        return torch.from_numpy(np.array(array[number], dtype=native))

    return Rows(read, len(array), name=name, fingerprint=files.fingerprint())


def open_safetensors(files: Files, name: str, column: str | None) -> Rows:
    """Open the rows of one tensor in a `.safetensors` file, which stays on disk."""
    from safetensors import safe_open  # loaded with the first such file, not with hookline

    (path,) = files.full_paths()
    file: Any = safe_open(path, framework="pt")
    names = list(file.keys())
    if column is None and len(names) == 1:
        (column,) = names
    if column not in names:
        given = "several tensors" if column is None else f"no tensor {column!r}"
        raise ValueError(f"`{name}` holds {given}; give column= one of: {', '.join(names)}")
    rows = file.get_slice(column)
    shape = rows.get_shape()
    if not shape:
        raise ValueError(f"`{column}` in `{name}` is a single number, and samples are rows")
    return Rows(rows.__getitem__, shape[0], name=name, fingerprint=files.fingerprint(column))
