"""Make the next batches while the model works on one."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np

from hookline.extractions.collating import collate, split
from hookline.extractions.samples import Broken, SampleError, Source
from hookline.extractions.sizing import BatchSize
from hookline.extractions.wanted import Ids, Wanted

_AHEAD = 2
"""Batches that wait for the model."""

_PATIENCE = 2.0
"""Seconds that a source has to end after an error or Ctrl-C."""


_NONE: Ids = np.empty(0, np.int64)


class Batch(NamedTuple):
    """Samples that go through the model together."""

    ids: Ids
    content: Any
    broken: list[SampleError]
    """Samples that could not be read; none of them is in it."""


class Feed:
    """Give batches of the wanted samples, one after the other."""

    def __init__(
        self,
        source: Source,
        wanted: Wanted,
        size: BatchSize,
        *,
        prepare: Callable[[Any], Any] | None = None,
        join: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._source, self._wanted, self._size = source, wanted, size
        self._prepare = prepare
        self._join = join or collate
        self._made: queue.Queue[Batch | BaseException | None] = queue.Queue(_AHEAD)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hookline-feed", daemon=True)

    def __enter__(self) -> Iterator[Batch]:
        self._thread.start()
        return self._take()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        # A source that waits for something does not end: the process goes on without it.
        end = time.monotonic() + _PATIENCE
        while self._thread.is_alive() and time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                # So that a thread that waits for room goes on, and ends.
                self._made.get(timeout=0.05)

    def _take(self) -> Iterator[Batch]:
        while True:
            found = self._made.get()
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            yield found

    def _work(self) -> None:
        try:
            with contextlib.closing(self._batches()) as batches:
                for batch in batches:
                    self._put(batch)
                    if self._is_over.is_set():
                        return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, one: Batch | BaseException | None) -> None:
        while not self._is_over.is_set():
            try:
                self._made.put(one, timeout=0.1)
            except queue.Full:
                continue
            return

    def _batches(self) -> Generator[Batch]:
        with contextlib.closing(self._source.samples(self._wanted)) as found:
            yield from self._join_found(found)

    def _join_found(self, found: Iterator[tuple[Any, Any]]) -> Iterator[Batch]:
        if self._source.is_batched:
            for own, content in found:
                yield from self._prepare_batch(own, content)
            return
        ids: list[int] = []
        items: list[Any] = []
        broken: list[SampleError] = []
        for id, item in found:
            if self._is_over.is_set():
                return
            one = self._ready(id, item)
            if isinstance(one, SampleError):
                broken.append(one)
            else:
                ids.append(id)
                items.append(one)
            if len(items) >= self._size.now or len(broken) >= self._size.now:
                yield from self._join_all(ids, items, broken)
                ids, items, broken = [], [], []
        if items or broken:
            yield from self._join_all(ids, items, broken)

    def _prepare_batch(self, ids: Ids, content: Any) -> Iterator[Batch]:
        """Prepare a batch that is made already; in parts where that fails, to find who is to blame.

        Nobody is told of a sample that is not wanted.
        """
        if isinstance(content, Broken):
            yield Batch(_NONE, None, [content.error])
            return
        try:
            made = content if self._prepare is None else self._prepare(content)
        except Exception as error:
            if len(ids) == 1:
                number = int(ids[0])
                broken = [SampleError(number, error)] if number in self._wanted else []
                yield Batch(_NONE, None, broken)
                return
        else:
            yield Batch(ids, made, [])
            return
        half = len(ids) // 2
        for part, own in zip(split(content, len(ids), half), (ids[:half], ids[half:]), strict=True):
            yield from self._prepare_batch(own, part)

    def _ready(self, id: int, item: Any) -> Any:
        """Give a sample as the model takes it, or what kept it from that."""
        if isinstance(item, Broken):
            return item.error
        if self._prepare is None:
            return item
        try:
            return self._prepare(item)
        except Exception as error:
            return SampleError(id, error)

    def _join_all(
        self, ids: list[int], items: list[Any], broken: list[SampleError]
    ) -> Iterator[Batch]:
        """Make a batch; where that fails, without the samples that do not even make one alone."""
        if not items:
            yield Batch(_NONE, None, broken)
            return
        try:
            joined = self._join(items)
        except Exception:
            kept = [self._try_alone(id, item, broken) for id, item in zip(ids, items, strict=True)]
            if all(kept):
                raise  # each of them can be taken, but not together
        else:
            yield Batch(np.array(ids, np.int64), joined, broken)
            return
        left = [(id, item) for id, item, is_kept in zip(ids, items, kept, strict=True) if is_kept]
        yield from self._join_all([id for id, _ in left], [item for _, item in left], broken)

    def _try_alone(self, id: int, item: Any, broken: list[SampleError]) -> bool:
        """Tell whether a sample makes a batch by itself; if not, it is among the broken ones."""
        try:
            self._join([item])
        except Exception as error:
            broken.append(SampleError(id, error))
            return False
        return True
