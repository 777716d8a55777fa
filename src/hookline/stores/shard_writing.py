"""One shard on its way to the disk: groups of samples, in the format of safetensors.

The format says first where each tensor lies. So the head has its room at the beginning, and is
written when the shard is finished; then the file gets its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.stores.direct_files import DirectFile
from hookline.stores.layout import (
    ALIGNMENT,
    ENDS,
    IDS,
    METADATA,
    PAD,
    SHARDS,
    SUFFIX,
    VERSION,
    Column,
    check_file_name,
    name_dtype,
)
from hookline.stores.places import Place, telling_of

_ROOM = 1 << 20
"""Bytes for the head of a shard that is too large to be kept until it is complete."""

_ALIGNED = 4096
"""The room is a multiple of so many bytes."""

_GROUP = 160
"""More bytes than the head needs to say where a group is."""

_ENTRY = 160
"""More bytes than the head needs for a tensor, besides its name and its shape."""


class Group:
    """Some samples, with their rows in every column."""

    def __init__(
        self, ids: np.ndarray[Any, Any], rows: Mapping[str, Tensor], ends: Mapping[str, Any]
    ) -> None:
        self.ids = ids
        """The number of each sample."""
        self.rows = rows
        """By column the rows of all samples, one after the other."""
        self.ends = ends
        """By ragged column where the rows of each sample end."""


class ShardWriter:
    """Write one shard: nothing of it is there until it is finished."""

    def __init__(self, place: Place, name: str, columns: Mapping[str, Column]) -> None:
        self.name = check_file_name(f"{name}{SUFFIX}")
        self._place = place
        self._columns = columns
        folder = place.working_folder()
        self._where = str(folder)
        """Where it is put together; what goes elsewhere has a folder of this machine for that."""
        if place.local is not None:
            folder, self._where = place.local / SHARDS, place.name
        part = folder / f".{self.name}.{os.getpid()}.part"
        with telling_of(self._where):
            folder.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
        self._most = _bound_head(columns)
        self._room = max(_ROOM, _ALIGNED * -(-4 * self._most // _ALIGNED))
        self._file = DirectFile(part, self._room)
        self._entries: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._names = 0
        self.samples = 0
        self._first, self._last = 2**63 - 1, -(2**63)

    @property
    def size(self) -> int:
        """How many bytes are in it."""
        return self._file.size

    @property
    def is_full(self) -> bool:
        """Whether the head might have no room for another group."""
        return self._names + (len(self._groups) + 1) * _GROUP + self._most + 4096 > self._room

    def add(self, group: Group) -> None:
        """Write a group."""
        number = len(self._groups)
        prefix = f"{number:06d}/"
        with telling_of(self._where):
            begin = self._file.size
            self._file.crc = 0
            self._append(f"{prefix}{IDS}", torch.from_numpy(np.ascontiguousarray(group.ids, "<i8")))
            for name, ends in group.ends.items():
                tensor = torch.from_numpy(np.ascontiguousarray(ends, "<i8"))
                self._append(f"{prefix}{ENDS}{name}", tensor)
            for name in self._columns:
                self._append(f"{prefix}{name}", group.rows[name])
        self._groups.append(
            {
                "samples": len(group.ids),
                "begin": begin,
                "end": self._file.size,
                "crc": self._file.crc,
            }
        )
        self.samples += len(group.ids)
        if len(group.ids):
            self._first = min(self._first, int(group.ids.min()))
            self._last = max(self._last, int(group.ids.max()))

    def finish(self) -> dict[str, Any]:
        """Put the shard in its place; give the line of the index."""
        told = {
            "version": VERSION,
            "samples": self.samples,
            "first": self._first if self.samples else 0,
            "last": self._last if self.samples else 0,
            "groups": self._groups,
        }
        head = json.dumps({"__metadata__": {METADATA: json.dumps(told)}, **self._entries}).encode()
        # Without data on the disk yet the head takes what it needs; the data stay aligned.
        room = -(-(len(head) + 8) // ALIGNMENT) * ALIGNMENT if self._file.is_small else self._room
        if len(head) + 8 > room:
            raise AssertionError(f"a head of {len(head)} bytes has no room")
        with telling_of(self._where):
            self._file.finish((room - 8).to_bytes(8, "little") + head.ljust(room - 8))
        size = room + self._file.size
        self._place.take(self._file.path, f"{SHARDS}/{self.name}")
        short = {key: told[key] for key in ("samples", "first", "last")}
        return {"file": self.name, "bytes": size, **short}

    def rename(self, name: str) -> None:
        """Finish it under another name."""
        self.name = check_file_name(f"{name}{SUFFIX}")

    def discard(self) -> None:
        """Leave nothing behind."""
        self._file.discard()

    def _append(self, key: str, tensor: Tensor) -> None:
        """Write a tensor, and bytes up to the next boundary."""
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        begin = self._file.size
        if plain.numel():
            self._file.append(plain.reshape(-1).view(torch.uint8).numpy().data)
        self._enter(key, name_dtype(tensor.dtype), list(tensor.shape), begin)
        gap = -self._file.size % ALIGNMENT
        if gap:
            begin = self._file.size
            self._file.append(bytes(gap))
            self._enter(f"{key.split('/', 1)[0]}/{PAD}{len(self._entries)}", "U8", [gap], begin)

    def _enter(self, key: str, kind: str, shape: list[int], begin: int) -> None:
        offsets = [begin, self._file.size]
        self._entries[key] = {"dtype": kind, "shape": shape, "data_offsets": offsets}
        self._names += len(json.dumps({key: self._entries[key]}))


def _bound_head(columns: Mapping[str, Column]) -> int:
    """Give more bytes than the head needs for a group: each tensor may have one that pads."""
    own = sum(
        len(json.dumps(one.name)) + _ENTRY + 24 * len(one.shape) + (1 + one.is_ragged) * 2 * _ENTRY
        for one in columns.values()
    )
    ragged = sum(len(json.dumps(one.name)) for one in columns.values() if one.is_ragged)
    return own + ragged + 2 * _ENTRY
