"""One column of a store: what is kept of samples, by their positions or their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from hookline.stores.shard_reading import Integers, read_integers

if TYPE_CHECKING:
    from hookline.stores.store import Store

_AT_ONCE = 4096
"""Samples that are given together where somebody goes through all of them."""


class StoredColumn:
    """What is kept of each sample under one name: a tensor, or of a ragged column a list."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.column = store.columns[name]
        self.name = name

    def __repr__(self) -> str:
        kind = "any number of rows" if self.column.is_ragged else "a row"
        dtype = str(self.column.dtype).removeprefix("torch.")
        return f"<{self.name}: {len(self):,} samples, {kind} of {dtype} {list(self.column.shape)}>"

    def __len__(self) -> int:
        return len(self._store)

    @property
    def lengths(self) -> Integers:
        """How many rows each sample has."""
        return self._spans[1]

    @property
    def _spans(self) -> tuple[Integers, Integers]:
        """Give where the rows of each sample begin in its group, and how many there are."""
        known = self._store._spans
        if self.name not in known:
            known[self.name] = self._find_spans()
        return known[self.name]

    def _find_spans(self) -> tuple[Integers, Integers]:
        _, groups, places = self._store._samples
        if not self.column.is_ragged:
            return places, np.ones(len(places), np.int64)
        own, store = self._store._groups, self._store
        parts = [shard.ends_part(group, self.name) for shard, group in own]
        found = read_integers(store.place, parts)
        for (shard, group), ends in zip(own, found, strict=True):
            shard.check_ends(group, self.name, ends)
        none = np.empty(0, np.int64)
        begins = np.concatenate([none, *(np.concatenate([[0], ends])[:-1] for ends in found)])
        lengths = np.concatenate([none, *found]) - begins
        firsts = np.cumsum([0, *map(len, found)])
        at = firsts[groups] + places
        return begins[at], lengths[at]

    def _begins(self) -> Integers:
        """Give where in its file each group has its rows."""
        known = self._store._begins
        if self.name not in known:
            found = [one.extent(group, self.name).begin for one, group in self._store._groups]
            known[self.name] = np.array(found, np.int64)
        return known[self.name]

    @overload
    def __getitem__(self, which: int) -> Tensor: ...
    @overload
    def __getitem__(self, which: slice | Sequence[int] | Integers | Tensor) -> Any: ...

    def __getitem__(self, which: Any) -> Any:
        """Give samples by position: one, a slice, or any; rows of a slice stay where they lie."""
        count = len(self)
        if isinstance(which, (int, np.integer)):
            at = int(which) + (count if which < 0 else 0)
            if not 0 <= at < count:
                raise IndexError(f"{which} of {count} samples")
            found = self[at : at + 1]
            return found[0]
        if isinstance(which, slice):
            positions = np.arange(*which.indices(count))
        else:
            given = np.asarray(which)
            positions = np.flatnonzero(given) if given.dtype == np.bool_ else given.astype(np.int64)
            positions = np.where(positions < 0, positions + count, positions)
            if len(positions) and not 0 <= positions.min() <= positions.max() < count:
                raise IndexError(f"positions up to {positions.max()} of {count} samples")
        return self._divide(positions, self.rows(positions))

    def of(self, ids: Sequence[int] | Integers) -> Any:
        """Give samples by their numbers."""
        return self[self._store.positions(ids)]

    def rows(self, positions: Integers) -> Tensor:
        """Give the rows of samples, one after the other."""
        _, groups, _ = self._store._samples
        begins, lengths = self._spans
        groups, begins, lengths = groups[positions], begins[positions], lengths[positions]
        # What lies side by side is read at once.
        is_next = (groups[1:] == groups[:-1]) & (begins[1:] == begins[:-1] + lengths[:-1])
        starts = np.concatenate(
            [np.zeros(min(len(groups), 1), np.int64), np.flatnonzero(~is_next) + 1]
        )
        if len(starts) == 1:
            shard, group = self._store._groups[int(groups[0])]
            total = int(lengths.sum())
            return shard.rows(group, self.name, int(begins[0]), int(begins[0]) + total)
        return self._gather(groups, begins, lengths, starts)

    def _gather(
        self, groups: Integers, begins: Integers, lengths: Integers, starts: Integers
    ) -> Tensor:
        """Read runs of rows into memory."""
        column, store = self.column, self._store
        out = torch.empty((int(lengths.sum()), *column.shape), dtype=column.dtype)
        if not out.numel():
            return out
        counts = np.add.reduceat(lengths, starts)
        first = groups[starts]
        at = self._begins()[first] + begins[starts] * column.row_bytes
        into = out.view(-1).view(torch.uint8).numpy().data
        which = store._shards_of_groups[first]
        store.reader.read(store._files, which, at, counts * column.row_bytes, into)
        return out

    def _divide(self, positions: Integers, rows: Tensor) -> Any:
        if not self.column.is_ragged:
            return rows
        return list(rows.split(self._spans[1][positions].tolist()))

    def batches(self, size: int = _AT_ONCE) -> Iterator[Any]:
        """Go through all samples in order."""
        for begin in range(0, len(self), size):
            yield self[begin : begin + size]

    def numpy(self) -> Any:
        """Give all rows as one array; 16 and 8 bit floats that NumPy has not as float32."""
        rows = self.rows(np.arange(len(self)))
        if rows.dtype == torch.bfloat16 or (rows.dtype.itemsize == 1 and rows.is_floating_point()):
            rows = rows.float()
        return rows.numpy()
