"""How a store lies in its folder, and which names may stand there.

    store.json                  the version, the columns, and what the store says of itself
    shards/NAME.safetensors     samples, in groups; complete, or not there at all
    index/WRITER.jsonl          a line for each shard that a writer has finished
    failed/WRITER.jsonl         samples that were left out, and why

Each shard says by itself what is in it, so that the index can be made anew from the shards.
In a shard the tensors of group 7 are named:

    000007/#ids                 int64, the number of each sample
    000007/#ends/COLUMN         int64, where the rows of each sample end; of ragged columns alone
    000007/COLUMN               the rows
    000007/#pad/N               bytes that put the next tensor on a boundary
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from hookline._errors import NewerRun, StoreError
from hookline.runs.dump_files import DTYPES

VERSION = 1
ABOUT = "store.json"
SHARDS = "shards"
INDEX = "index"
FAILED = "failed"
SUFFIX = ".safetensors"
METADATA = "hookline.store"
"""Under this name a shard's head says what is in the shard."""

IDS = "#ids"
ENDS = "#ends/"
PAD = "#pad/"

ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes, so that they can be used where they lie."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}")
_DTYPES = {kind: getattr(torch, name) for name, kind in DTYPES.items()}


def name_dtype(dtype: torch.dtype) -> str:
    """Give what the format of safetensors calls a dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise StoreError(
            f"a store cannot hold `{name}`: convert the values, to one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def find_dtype(kind: str) -> torch.dtype:
    """Give the dtype that the format of safetensors calls so."""
    if kind not in _DTYPES:
        raise StoreError(f"`{kind}` is no kind of number that a store holds")
    found: torch.dtype = _DTYPES[kind]
    return found


@dataclass(frozen=True, slots=True)
class Column:
    """What is kept of each sample under one name."""

    name: str
    """The address of the value, or any other name."""

    dtype: torch.dtype

    shape: tuple[int, ...]
    """The shape of one row."""

    is_ragged: bool = False
    """Whether a sample has any number of rows, in place of exactly one."""

    @property
    def row_bytes(self) -> int:
        """How many bytes a row takes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def facts(self) -> dict[str, Any]:
        """Describe it, so that JSON can hold it."""
        return asdict(self) | {"dtype": name_dtype(self.dtype), "shape": list(self.shape)}


def read_column(facts: Mapping[str, Any]) -> Column:
    """Read what `Column.facts` wrote."""
    shape = tuple(facts["shape"])
    if not all(isinstance(one, int) and one >= 0 for one in shape):
        raise StoreError(f"{list(shape)} is no shape")
    return Column(
        check_column_name(facts["name"]),
        find_dtype(facts["dtype"]),
        shape,
        bool(facts["is_ragged"]),
    )


def check_column_name(name: Any) -> str:
    """Give a column's name back, if it can be one."""
    if not isinstance(name, str) or not name or name.startswith("#") or "\0" in name:
        raise StoreError(f"{name!r} cannot name a column")
    return name


def check_file_name(name: Any) -> str:
    """Give a file's name back, if it can be one in the folder, and nowhere else."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise StoreError(
            f"{name!r} cannot name a file of a store: letters, digits, `.`, `_` and `-` can"
        )
    return name


def check_version(facts: Mapping[str, Any], place: str) -> None:
    """Refuse what a newer hookline wrote, and what is none of its stores."""
    version = facts.get("version")
    if not isinstance(version, int):
        raise StoreError(f"`{place}` is no store of hookline: it has no version")
    if version > VERSION:
        raise NewerRun(
            f"`{place}` was written by a newer hookline (version {version} of the layout; this one "
            f"reads {VERSION}). Update hookline to read it."
        )
