"""Samples of files that need no other package: lines of text and JSON, rows of arrays."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hookline.extractions.finding_files import Files
from hookline.extractions.object_sources import Rows
from hookline.extractions.samples import Source, follow, read_sample
from hookline.extractions.wanted import Wanted

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Lines(Source):
    """A sample a line: its text, or the JSON value that it holds. Other lines are not parsed.

    A blank line is an empty sample in text, so that an id is the number of a line, and none at all
    in JSON.
    """

    def __init__(self, files: Files, name: str, *, column: str | None = None) -> None:
        super().__init__(name, None)
        self._files = files
        self._column = column
        self._is_json = files.kind == "jsonl"

    def fingerprint(self) -> str:
        """Give the names and sizes of the files."""
        return self._files.fingerprint(self._column)

    def samples(self, wanted: Wanted) -> Iterator[tuple[int, Any]]:
        """Yield the wanted lines."""
        read = json.loads if self._is_json else _to_text
        for number, line in follow(wanted, self._lines()):
            yield number, read_sample(number, read, line, self._column)

    def _lines(self) -> Iterator[bytes]:
        """Yield each line that is a sample, as it lies in the files."""
        for path in self._files.full_paths():
            with _open(path) as file:
                try:
                    for at, line in enumerate(file):
                        if not at:
                            line = line.removeprefix(_BYTE_ORDER_MARK)
                        if not self._is_json or line.strip():
                            yield line
                except Exception as error:
                    error.add_note(f"while reading `{path}`")
                    raise


def _open(path: Path) -> gzip.GzipFile | BinaryIO:
    """Open a file for its bytes, unpacked."""
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")


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
