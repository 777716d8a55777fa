"""One finished shard, read: its head with suspicion, its rows where they lie."""

from __future__ import annotations

import copy
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline._errors import CorruptShard, StoreError
from hookline.stores.layout import (
    ENDS,
    IDS,
    METADATA,
    SHARDS,
    Column,
    check_file_name,
    check_version,
    find_dtype,
    name_dtype,
)
from hookline.stores.places import Place

_MOST_HEAD = 100 << 20
_GUESS = 64 << 10
"""Bytes that are read at once, since most heads are no longer."""

_THREADS = 16
"""So many heads are on their way at once, from a place that is not on this machine."""

_AHEAD = 1 << 20
"""From so many bytes on the disk is told to begin at once, in place of page after page."""

Integers = np.ndarray[Any, np.dtype[np.int64]]

Part = tuple[str, int, int]
"""Bytes of a file: its name in the place, where they begin, where they end."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the rows of one column of a group lie."""

    file: str
    begin: int
    """Counted from the beginning of the file."""
    end: int
    rows: int


class Shard:
    """A shard of a store."""

    def __init__(self, place: Place, file: str, columns: Mapping[str, Column]) -> None:
        self.file = check_file_name(file)
        self._place = place
        self._columns = columns
        self._map: memoryview | None = None
        self.entries, self.told, self._base, self.size = self._read_head()
        self.groups: list[dict[str, Any]] = self._check()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what cannot go to another process."""
        return self.__dict__ | {"_map": None}

    @property
    def path(self) -> str:
        """Where it lies in the place."""
        return f"{SHARDS}/{self.file}"

    def at(self, place: Place) -> Shard:
        """Give the same shard, read through a place that was opened anew."""
        other = copy.copy(self)
        other._place = place
        return other

    def ids(self, group: int) -> Integers:
        """Give the number of each sample of a group."""
        return read_integers(self._place, [self.ids_part(group)])[0]

    def ids_part(self, group: int) -> Part:
        """Give where the numbers of a group's samples lie."""
        return self._part(f"{group:06d}/{IDS}")

    def ends_part(self, group: int, column: str) -> Part:
        """Give where the ends of a group's samples lie, in a ragged column."""
        return self._part(f"{group:06d}/{ENDS}{column}")

    def check_ends(self, group: int, column: str, ends: Integers) -> Integers:
        """Give where the rows of each sample end back, if all rows are somebody's."""
        bounds = np.concatenate([[0], ends])
        if (np.diff(bounds) < 0).any() or bounds[-1] != self.extent(group, column).rows:
            raise self._corrupt(f"group {group} does not say whose the rows of `{column}` are")
        return ends

    def extent(self, group: int, column: str) -> Extent:
        """Give where the rows of a group lie."""
        entry = self.entries[f"{group:06d}/{column}"]
        begin, end = entry["data_offsets"]
        return Extent(self.path, self._base + begin, self._base + end, entry["shape"][0])

    def rows(self, group: int, column: str, begin: int, end: int) -> Tensor:
        """Give rows of a group; on this machine they stay where they lie."""
        extent, spec = self.extent(group, column), self._columns[column]
        size = spec.row_bytes
        shape = (end - begin, *spec.shape)
        at, stop = extent.begin + begin * size, extent.begin + end * size
        if at == stop:
            return torch.empty(shape, dtype=spec.dtype)
        data: Any = self._mapped() if self._place.local is not None else None
        if data is None:
            data, at = bytearray(self._place.read(self.path, at, stop)), 0
        elif stop - at >= _AHEAD:
            self._fetch(at, stop)
        count = int(np.prod(shape, dtype=np.int64))
        return torch.frombuffer(data, dtype=spec.dtype, count=count, offset=at).view(shape)

    def check(self) -> Iterator[int]:
        """Compare every group with its checksum; give the bytes of each as it is done."""
        for number, group in enumerate(self.groups):
            begin, end = self._base + group["begin"], self._base + group["end"]
            crc = 0
            for at in range(begin, end, 16 << 20):
                crc = zlib.crc32(self._place.read(self.path, at, min(at + (16 << 20), end)), crc)
            if crc != group["crc"]:
                raise self._corrupt(
                    f"group {number} does not have the checksum it was written with"
                )
            yield end - begin

    def _mapped(self) -> memoryview:
        if self._map is None:
            assert self._place.local is not None
            path = str(self._place.local / self.path)
            # A private copy where somebody writes to a row; the file stays as it is. Python's own
            # maps hold a descriptor each, and a store has more shards than there are of these.
            mapped = torch.from_file(path, shared=False, size=self.size, dtype=torch.uint8)
            self._map = mapped.numpy().data
        return self._map

    def _fetch(self, begin: int, end: int) -> None:
        """Have the disk begin with bytes that are about to be read."""
        assert self._place.local is not None
        handle = os.open(self._place.local / self.path, os.O_RDONLY)
        try:
            advise(handle, begin, end - begin, "WILLNEED")
        finally:
            os.close(handle)

    def _part(self, key: str) -> Part:
        begin, end = self.entries[key]["data_offsets"]
        return self.path, self._base + begin, self._base + end

    def _read_head(self) -> tuple[dict[str, Any], dict[str, Any], int, int]:
        """Read where each tensor lies, and what the shard says of itself."""
        size = self._place.size(self.path)
        start = self._place.read(self.path, 0, min(_GUESS, size))
        if len(start) < 8:
            raise self._corrupt(f"it has {size} bytes")
        (length,) = struct.unpack("<Q", start[:8])
        if length > min(_MOST_HEAD, size - 8):
            raise self._corrupt("it is shorter than its head says")
        if len(start) < 8 + length:
            start += self._place.read(self.path, len(start), 8 + length)
        try:
            entries = json.loads(start[8 : 8 + length])
            told = json.loads(entries.pop("__metadata__")[METADATA])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._corrupt("its head cannot be read") from None
        if not isinstance(told, dict):
            raise self._corrupt("its head does not say what it holds")
        check_version(told, self.file)
        return entries, told, 8 + length, size

    def _check(self) -> list[dict[str, Any]]:
        """Refuse a head that does not fit itself, the file or the columns."""
        whole = self.size - self._base
        try:
            groups: list[dict[str, Any]] = list(self.told["groups"])
            spans = {f"{number:06d}": _read_span(one, whole) for number, one in enumerate(groups)}
            for key, entry in self.entries.items():
                # Of what lies outside of its group, the checksum says nothing.
                least, most = spans.get(key.partition("/")[0], (0, whole))
                begin, end = map(_check_number, entry["data_offsets"])
                count = math.prod(map(_check_number, entry["shape"]))
                size = count * find_dtype(entry["dtype"]).itemsize
                if not least <= begin <= end <= most or size != end - begin:
                    raise self._corrupt("its head names bytes that it does not have")
            for number, group in enumerate(groups):
                self._check_group(number, group)
        except CorruptShard:
            raise
        except StoreError as error:
            raise self._corrupt(str(error)) from None
        except (KeyError, TypeError, ValueError):
            raise self._corrupt("its head is not that of a shard") from None
        return groups

    def _check_group(self, number: int, group: Mapping[str, Any]) -> None:
        prefix = f"{number:06d}/"
        samples = group["samples"]
        ids = self.entries[f"{prefix}{IDS}"]
        if ids["shape"] != [samples] or ids["dtype"] != "I64":
            raise self._corrupt(f"group {number} does not number its samples")
        for name, column in self._columns.items():
            entry = self.entries[f"{prefix}{name}"]
            is_right = entry["dtype"] == name_dtype(column.dtype)
            is_right &= tuple(entry["shape"][1:]) == column.shape
            if column.is_ragged:
                ends = self.entries[f"{prefix}{ENDS}{name}"]
                is_right &= ends["shape"] == [samples] and ends["dtype"] == "I64"
            else:
                is_right &= entry["shape"][0] == samples
            if not is_right:
                raise self._corrupt(f"group {number} does not fit the column `{name}`")

    def _corrupt(self, reason: str) -> CorruptShard:
        error = CorruptShard(
            f"`{self.path}` in `{self._place.name}` is damaged: {reason}. Its samples are "
            "extracted anew once it is gone: `hookline verify --repair`, then the same extraction."
        )
        error.reason = reason
        return error


def advise(handle: int, begin: int, size: int, how: str) -> None:
    """Tell the system how bytes of a file will be read, where it listens; not every one does."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, begin, size, getattr(os, f"POSIX_FADV_{how}"))


def open_shards(
    place: Place, files: Sequence[str], columns: Mapping[str, Column]
) -> Iterator[Shard]:
    """Open shards, in this order; several at once where each has to be asked for from afar."""

    def open_one(file: str) -> Shard:
        return Shard(place, file, columns)

    if place.local is not None or len(files) < 2:
        yield from map(open_one, files)
        return
    threads = ThreadPoolExecutor(_THREADS, "hookline-heads")
    try:
        yield from threads.map(open_one, files)
    finally:
        threads.shutdown(cancel_futures=True)


def read_integers(place: Place, parts: Sequence[Part]) -> list[Integers]:
    """Read integers from many files, at once where that is possible."""
    return [np.frombuffer(data, "<i8") for data in place.read_many(parts)]


def _read_span(facts: Mapping[str, Any], whole: int) -> tuple[int, int]:
    """Read which of the bytes a group has."""
    begin, end = _check_number(facts["begin"]), _check_number(facts["end"])
    if not begin <= end <= whole:
        raise StoreError("its head names bytes that it does not have")
    return begin, end


def _check_number(value: Any) -> int:
    """Give a count or a position back, if it is one: JSON has fractions, infinity and more."""
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
