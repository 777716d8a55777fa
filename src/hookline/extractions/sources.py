"""Where the samples of an extraction come from: from what was given to a source."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from hookline.extractions.file_sources import Lines, open_npy, open_safetensors
from hookline.extractions.finding_files import CHOICES, find_files
from hookline.extractions.image_files import open_images
from hookline.extractions.object_sources import Batches, Stream, rows_of
from hookline.extractions.parquet_files import Parquet
from hookline.extractions.samples import Broken, SampleError, Source
from hookline.extractions.wanted import Wanted

__all__ = ["Broken", "SampleError", "Source", "Wanted", "open_source"]

_CHOICES = (
    "a data set, a list, a tensor or an array (a sample a row), an iterable of samples, a "
    f"DataLoader, or a path: {CHOICES}"
)


def open_source(data: Any, *, column: str | None = None) -> Source:
    """Open what samples come from: a data set, a sequence, an iterable, a DataLoader or a path.

    `column` picks one field of samples that are dicts, the place in those that are tuples, or the
    tensor of a `.safetensors` file.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, (str, os.PathLike)):
        return _open_path(os.fspath(data), column)
    if isinstance(data, DataLoader):
        return Batches(data, column=column)
    _refuse_containers(data)
    if isinstance(data, IterableDataset):
        return Stream(data, column=column)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if getattr(data, "ndim", None) == 0:
            raise ValueError("a tensor of a single number holds no rows; give one with a dimension")
        return rows_of(data, column=column)
    if isinstance(data, Dataset):
        raise TypeError(
            f"the data set `{type(data).__name__}` has no `__len__`, so it is not known which "
            "samples it holds; write one, or make it an IterableDataset"
        )
    if isinstance(data, Iterable):
        return Stream(data, column=column)
    called = " (call it first)" if callable(data) and not isinstance(data, type) else ""
    raise TypeError(f"no samples come from a `{type(data).__name__}`{called}; give {_CHOICES}")


def _open_path(given: str | bytes, column: str | None) -> Source:
    """Open the files that a path means, by their kind."""
    files = find_files(os.fsdecode(given))
    name = os.fsdecode(given)
    if files.kind == "parquet":
        return Parquet(files, name, column=column)
    if files.kind == "jsonl":
        return Lines(files, name, column=column)
    if files.kind in ("npy", "safetensors") and len(files.paths) > 1:
        raise ValueError(f"`{name}` means {len(files.paths)} {files.kind} files; give one of them")
    if files.kind == "safetensors":
        return open_safetensors(files, name, column)
    if column is not None:
        raise ValueError(
            f"column={column!r} picks a field of dict samples, and those of `{name}` are none: "
            "leave it out"
        )
    if files.kind == "npy":
        return open_npy(files, name)
    return open_images(files, name) if files.kind == "images" else Lines(files, name)


def _refuse_containers(data: Any) -> None:
    """Refuse what has a length but no samples by position, and say how to give its samples."""
    kind = type(data).__name__
    if isinstance(data, Mapping):
        keys = ", ".join(map(repr, list(data)[:5]))
        raise TypeError(
            f"a `{kind}` with {keys} is no sequence of samples; give one of its splits, as in "
            'data["train"], or a list of dicts, a dict a sample'
        )
    if isinstance(data, Set):
        raise TypeError(f"a `{kind}` has no order that stays; give sorted(data)")
    if isinstance(data, (bytes, bytearray)):
        raise TypeError(f"no samples come from `{kind}`; give {_CHOICES}")
    # An index into a table gives a column, or a table again.
    if hasattr(data, "iloc") or type(data).__module__.split(".")[0] in ("polars", "pyarrow"):
        raise TypeError(
            f"a `{kind}` is not read by rows; give a list of them: data.to_dict('records') of "
            "pandas, data.to_dicts() of polars, data.to_pylist() of pyarrow"
        )
