"""Rows from all over a store: many small reads, several on their way at once.

A page fault of a memory map reads far more than a row where nothing is cached, and makes one
thread wait for it. Reads at an offset take what is asked for, and other threads ask meanwhile.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from hookline._errors import CorruptShard
from hookline.stores.places import Place
from hookline.stores.shard_reading import Integers, advise

_THREADS = 8
_FEW = 32
"""So many reads are made by the one who asks: threads would take longer."""
_MOST_OPEN = 256
"""So many files stay open; a store may have more shards than a process may have files."""

_Job = tuple[int, int, int, int]
"""The file, where the piece begins in it, where it goes, how many bytes it has."""


class RowReader:
    """Read pieces of one length from the files of a place."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._open: dict[str, int] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; they are opened again when they are needed."""
        if self._process == os.getpid():
            if self._threads is not None:
                self._threads.shutdown(wait=False)
            for one in self._open.values():
                os.close(one)
        self._open, self._threads = {}, None

    def read(
        self, files: Sequence[str], which: Integers, begins: Integers, sizes: Integers, into: Any
    ) -> None:
        """Read pieces one after the other into memory: of file `which`, from `begins` on."""
        if self._process != os.getpid():  # threads do not come along when a process forks
            self._open, self._threads, self._process = {}, None, os.getpid()
            self._lock = threading.Lock()
        targets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        view = memoryview(into)
        if self._place.local is None:
            names = [files[one] for one in which.tolist()]
            parts = zip(names, begins.tolist(), (begins + sizes).tolist(), strict=True)
            for at, end, data in zip(
                targets[:-1].tolist(),
                targets[1:].tolist(),
                self._place.read_many(list(parts)),
                strict=True,
            ):
                if len(data) != end - at:
                    raise CorruptShard(f"a shard has {len(data)} bytes where {end - at} should be")
                view[at:end] = data
            return
        # In the order in which they lie on the disk, and no more files open than a process may.
        order = np.lexsort((begins, which))
        jobs = list(
            zip(
                which[order].tolist(),
                begins[order].tolist(),
                targets[:-1][order].tolist(),
                sizes[order].tolist(),
                strict=True,
            )
        )
        firsts = np.flatnonzero(np.diff(which[order], prepend=-1))[::_MOST_OPEN].tolist()
        with self._lock:
            for begin, end in itertools.pairwise([*firsts, len(jobs)]):
                self._read_jobs(files, jobs[begin:end], view)

    def _read_jobs(self, files: Sequence[str], jobs: Sequence[_Job], view: memoryview) -> None:
        """Read pieces of a few files."""
        handles = self._handles([files[one] for one in dict.fromkeys(job[0] for job in jobs)])
        ready = [(handles[files[file]], begin, at, size) for file, begin, at, size in jobs]
        if len(ready) <= _FEW:
            _read_pieces(ready, view)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "hookline-rows")
        each = -(-len(ready) // (4 * _THREADS))
        shares = [ready[at : at + each] for at in range(0, len(ready), each)]
        # All of them end before somebody closes a file, also after an error.
        wait(done := [self._threads.submit(_read_pieces, share, view) for share in shares])
        for one in done:
            one.result()

    def _handles(self, files: Sequence[str]) -> dict[str, int]:
        """Open files, and close others that were opened before where these are too many."""
        found = {}
        for file in files:
            handle = self._open.pop(file, None)
            if handle is None:
                assert self._place.local is not None
                handle = os.open(self._place.local / file, os.O_RDONLY)
                # Nothing is read ahead that nobody has asked for.
                advise(handle, 0, 0, "RANDOM")
            self._open[file] = found[file] = handle
        for file in list(self._open)[: max(len(self._open) - _MOST_OPEN, 0)]:
            os.close(self._open.pop(file))
        return found


def _read_pieces(jobs: Sequence[tuple[int, int, int, int]], view: memoryview) -> None:
    preadv = os.preadv
    for handle, begin, target, size in jobs:
        done = preadv(handle, [view[target : target + size]], begin)
        # Linux reads no more than 2 GiB at once.
        while 0 < done < size:
            more = preadv(handle, [view[target + done : target + size]], begin + done)
            if not more:
                break
            done += more
        if done != size:
            raise CorruptShard(f"a shard ends before byte {begin + size}, where rows should be")
