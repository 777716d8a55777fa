"""Write a store: samples come in batches of any size, shards of about one size go to the disk.

A sample is in the store once its shard is finished. What was not, after a crash, is not there, and
`StoreWriter.find_done` says so.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline._errors import StoreError
from hookline.stores.indexing import (
    About,
    describe_ids,
    find_done,
    list_shards,
    read_about,
    read_index,
    write_about,
)
from hookline.stores.layout import INDEX, SHARDS, SUFFIX, Column, check_column_name, check_file_name
from hookline.stores.locking import Lock, sweep_parts, take
from hookline.stores.places import open_place, telling_of
from hookline.stores.shard_reading import Integers
from hookline.stores.shard_writing import Group, ShardWriter

Rows = Tensor | Sequence[Tensor]
"""A tensor with a row for each sample, or a tensor of rows for each sample."""


class StoreWriter:
    """Append samples to a store; one process or rank has one, under a name of its own.

    With `with` it is closed at the end, also after an error: what came until then is kept.

    Args:
        out: a folder, or an address that fsspec knows, such as `s3://bucket/name`.
        name: of this writer. Two that write at the same time need two names; on this machine the
            second is refused.
        facts: what the store says of itself, if it is new; JSON has to be able to hold it.
        check: raises where what the store says of itself, which another may have begun meanwhile,
            is not what is written here.
        shard_bytes: a shard is finished when it has so many bytes,
        shard_seconds: or when it was begun so long ago: a crash costs no more work than that.
        group_bytes: rows are gathered until they have so many bytes, and written together.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        name: str = "writer",
        facts: Mapping[str, Any] | None = None,
        check: Callable[[Mapping[str, Any]], None] | None = None,
        shard_bytes: int = 256 << 20,
        shard_seconds: float = 60.0,
        group_bytes: int = 16 << 20,
    ) -> None:
        self.place = open_place(out)
        self.name = check_file_name(name)
        self._facts = dict(facts or {})
        self._check = check
        self._shard_bytes, self._shard_seconds = shard_bytes, shard_seconds
        self._group_bytes = group_bytes
        about = read_about(self.place)
        self.columns: dict[str, Column] | None = None if about is None else about.columns
        """What is kept of each sample; None before the first came to a new store."""
        self.facts: dict[str, Any] = self._facts if about is None else about.facts
        """What the store says of itself."""
        if check is not None and about is not None:
            check(about.facts)
        self._is_checked = False
        self.written = 0
        """Bytes of the shards that this writer has finished."""
        self.samples = 0
        """Samples in them."""
        self._pending: list[tuple[Integers, dict[str, Rows]]] = []
        self._gathered = 0
        self._shard: ShardWriter | None = None
        self._begun = 0.0
        self._ids: list[Integers] = []
        self._number = 0
        self._task: str | None = None
        self._parts = 0
        self._lock: Lock | None = None
        self._is_claimed = False
        self._thread: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._sweep()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            # What was raised before says more.
            error.add_note(f"What came last is not in `{self.place.name}`: {failure}")

    def claim(self) -> None:
        """Have the name, until this is closed; refuse where another process has it.

        The first samples do that too. Where a place is not on this machine, nobody can tell.
        """
        if not self._is_claimed:
            self._run(self._claim)

    def find_done(self) -> Integers:
        """Give the numbers of the samples that the store holds already, in order."""
        return (
            np.empty(0, np.int64) if self.columns is None else find_done(self.place, self.columns)
        )

    def add(self, ids: Sequence[int] | Integers, values: Mapping[str, Rows]) -> None:
        """Add samples: their numbers, and for each column what is kept of them.

        The tensors are not copied before their group is written: leave them as they are.
        """
        numbers = np.array(ids, np.int64).reshape(-1)
        if self.columns is None:
            self._begin({name: _find_column(name, rows) for name, rows in values.items()})
        assert self.columns is not None
        if values.keys() != self.columns.keys():
            raise StoreError(
                f"the store `{self.place.name}` has the columns {', '.join(self.columns)}; "
                f"what came has {', '.join(values)}"
            )
        size = 0
        for name, rows in values.items():
            size += _check_rows(self.columns[name], rows, len(numbers))
        if self._process != os.getpid():
            raise StoreError(
                f"the writer `{self.name}` belongs to the process that this one was forked from: "
                "begin another here, under a name of its own"
            )
        self.claim()
        if not self._pending and self._shard is None:
            self._begun = time.monotonic()
        self._pending.append((numbers, dict(values)))
        self._gathered += size
        if self._gathered >= self._group_bytes:
            self._write_group()
        shard = self._shard
        is_full = shard is not None and (shard.size >= self._shard_bytes or shard.is_full)
        is_due = time.monotonic() - self._begun >= self._shard_seconds
        if is_full or is_due:
            self.finish_shard()
            self._parts += 1

    def begin_task(self, name: str | None) -> None:
        """Name shards after what is in them: written again, they are in the same places."""
        self._task, self._parts = name, 0

    def finish_shard(self) -> None:
        """Have all that came so far on the disk."""
        self._write_group()
        if self._shard is not None:
            self._run(self._finish, self._task)

    def close(self) -> None:
        """Finish what was begun."""
        if self._process != os.getpid():
            return  # of a process that was forked; its parent finishes what is there
        try:
            self._write_group()
        finally:
            try:
                # What was written before something that cannot be is kept all the same.
                if self._shard is not None:
                    self._run(self._finish, None)
            finally:
                if self._thread is not None:
                    self._thread.shutdown()
                    self._thread = None
                if self._lock is not None:
                    self._lock.release()
                self._lock, self._is_claimed = None, False

    def _run(self, work: Callable[..., None], *given: Any) -> None:
        """Do something in a thread of its own: Ctrl-C comes before it or after it, not between."""
        if self._thread is None:
            thread = ThreadPoolExecutor(1, "hookline-write")
            thread.submit(int).result()  # one that Ctrl-C finds starting is waited for by nobody
            self._thread = thread
        job = self._thread.submit(work, *given)
        try:
            job.result()
        except BaseException:
            wait([job])
            raise
        finally:
            del job  # it holds the error, which holds this frame

    def _claim(self) -> None:
        if self.place.local is not None:
            with telling_of(self.place.name):
                folder = self.place.local / SHARDS
                folder.mkdir(parents=True, exist_ok=True)
                self._lock = take(folder, self.name, self.place.name)
        # Not before: until now another one of the same name may have finished shards.
        self._number = self._find_number()
        self._is_claimed = True

    def _put(self, pending: list[tuple[Integers, dict[str, Rows]]], group: Group) -> None:
        """Add a group to the shard; without one, begin it."""
        if pending is not self._pending:
            return  # it was put already, and Ctrl-C came before anybody knew
        assert self.columns is not None
        try:
            if self._shard is None:
                name = f"{self.name}-{self._number:06d}"
                self._shard = ShardWriter(self.place, name, self.columns)
                self._number += 1
            self._shard.add(group)
        except BaseException:
            # Bytes of earlier groups may be missing as well: nothing of it is to be finished.
            self._drop()
            raise
        self._ids.append(group.ids)
        self._pending, self._gathered = [], 0

    def _finish(self, name: str | None) -> None:
        """Put the shard in its place, and a line for it in the index."""
        shard, ids = self._shard, self._ids
        if shard is None:
            return
        if name is not None:
            shard.rename(f"{name}-{self._parts}" if self._parts else name)
        try:
            self._check_again()
            line = shard.finish()
        except BaseException:
            self._drop()
            raise
        self._shard, self._ids = None, []
        self.written += line["bytes"]
        self.samples += line["samples"]
        line["ranges"] = describe_ids(ids)
        self.place.append_line(f"{INDEX}/{self.name}.jsonl", json.dumps(line))

    def _drop(self) -> None:
        """Forget all that is in no finished shard, and leave nothing of it behind."""
        shard, self._shard, self._ids = self._shard, None, []
        self._pending, self._gathered = [], 0
        if shard is not None:
            shard.discard()

    def _begin(self, columns: dict[str, Column]) -> None:
        """Say what the store holds, or learn it from who was first."""
        about = read_about(self.place)
        if about is None:
            about = About(columns, self._facts)
            write_about(self.place, about)
        elif self._check is not None:
            self._check(about.facts)
        self.columns, self.facts = about.columns, about.facts

    def _check_again(self) -> None:
        """Look once whether another, who began at the same moment, wrote the store's facts last."""
        if self._check is not None and not self._is_checked:
            about = read_about(self.place)
            if about is not None:
                self._check(about.facts)
            self._is_checked = True

    def _write_group(self) -> None:
        pending = self._pending
        if not pending:
            return
        assert self.columns is not None
        rows: dict[str, Tensor] = {}
        ends: dict[str, Integers] = {}
        for name, column in self.columns.items():
            parts = [values[name] for _, values in pending]
            if column.is_ragged:
                flat = [one for part in parts for one in part]
                rows[name] = _join(flat, column)
                ends[name] = np.cumsum([len(one) for one in flat], dtype=np.int64)
            else:
                whole = [part for part in parts if isinstance(part, Tensor)]
                rows[name] = _join(whole, column)
        ids = np.concatenate([one for one, _ in pending])
        self._run(self._put, pending, Group(ids, rows, ends))

    def _find_number(self) -> int:
        """Give the number of the next shard of this name."""
        mine = re.compile(rf"{re.escape(self.name)}-(\d+){re.escape(SUFFIX)}")
        # A name that is in the index is not used again, though its shard is gone: until the new
        # shard has a line, the old one would speak for it.
        files = {*list_shards(self.place), *read_index(self.place)}
        numbers = [int(found[1]) for file in files if (found := mine.fullmatch(file))]
        return max(numbers, default=-1) + 1

    def _sweep(self) -> None:
        """Remove what was begun by writers that are gone."""
        if self.place.local is not None:
            with telling_of(self.place.name):
                sweep_parts(self.place.local / SHARDS, self.name)


def _find_column(name: str, rows: Rows) -> Column:
    """Tell from the first values what a column holds."""
    if isinstance(rows, Tensor):
        return Column(check_column_name(name), rows.dtype, tuple(rows.shape[1:]))
    if not rows:
        raise StoreError(f"of no sample it cannot be told what `{name}` holds")
    first = rows[0]
    return Column(check_column_name(name), first.dtype, tuple(first.shape[1:]), is_ragged=True)


def _check_rows(column: Column, rows: Rows, samples: int) -> int:
    """Refuse values that are not what the column holds; give how many bytes they take."""
    is_ragged = not isinstance(rows, Tensor)
    parts: Sequence[Tensor] = rows if not isinstance(rows, Tensor) else [rows]
    if is_ragged != column.is_ragged or len(rows) != samples:
        kind = "a tensor of rows for each sample" if column.is_ragged else "a row for each sample"
        raise StoreError(
            f"the column `{column.name}` holds {kind}; for {samples} samples came "
            f"{len(rows)} {'tensors' if is_ragged else 'rows'}"
        )
    for one in parts:
        if one.dtype != column.dtype or tuple(one.shape[1:]) != column.shape:
            raise StoreError(
                f"the column `{column.name}` holds rows of {column.dtype} {list(column.shape)}; "
                f"there came {one.dtype} {list(one.shape[1:])}. Values of several shapes need "
                "`reduce=`, or a column for each"
            )
    return sum(one.nbytes for one in parts)


def _join(parts: Sequence[Tensor], column: Column) -> Tensor:
    # Here, since another thread does not know the stream that values of a GPU come on.
    if len(parts) == 1:
        return parts[0].cpu()
    if not parts:
        return torch.empty((0, *column.shape), dtype=column.dtype)
    return torch.cat([one.cpu() for one in parts])
