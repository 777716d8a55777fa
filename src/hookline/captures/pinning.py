"""Page-locked memory of the host: how much of it captured values may hold, and what comes then.

A device writes to such memory on its own, at full speed. It cannot be swapped out, so captured
values stay in it only up to a share of the machine's memory; beyond that a thread copies them out
into ordinary memory, and what they came through is used again.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

_MOST_HELD = 8 * 2**30
_MOST_WAITING = 512 * 2**20


class PinnedShare:
    """Count the page-locked bytes that captured values hold, over all captures of this process."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = 0
        # A value may be freed in the middle of anything, so what is freed only lines up here.
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def held(self) -> int:
        """How many bytes are held now."""
        with self._lock:
            self._settle()
            return self._held

    def allocate_like(self, value: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Make page-locked memory for a value; None when that would be more than the share.

        torch keeps freed blocks for the next value, and not before a copy into them has ended.
        """
        size = block_size(value.numel() * dtype.itemsize)
        if not self.reserve(size):
            return None
        try:
            host = torch.empty_like(value, dtype=dtype, device="cpu", pin_memory=True)
        except BaseException:
            self._freed.append(size)
            raise
        self.follow(host, size)
        return host

    def reserve(self, size: int) -> bool:
        """Count more bytes as held, if the share allows."""
        with self._lock:
            self._settle()
            if self._held + size > self.limit:
                return False
            self._held += size
            return True

    def follow(self, tensor: Tensor, size: int) -> None:
        """Count bytes as given back when a tensor's memory is freed."""
        # The memory, not the tensor: a view of it may be all that somebody keeps.
        weakref.finalize(tensor.untyped_storage(), self._freed.append, size).atexit = False

    def _settle(self) -> None:
        while self._freed:
            self._held -= self._freed.popleft()


def block_size(size: int) -> int:
    """Give the bytes that torch takes for a page-locked tensor: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def default_limit() -> int:
    """Give the share: 8 GiB, or an eighth of a smaller machine's memory."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not every system tells
        return _MOST_HELD
    return min(_MOST_HELD, memory // 8)


class Emptying:
    """Copy what has arrived in page-locked memory out into ordinary memory, in a thread.

    Where the thread falls behind, `submit` waits for it: the host would fill up otherwise.
    """

    def __init__(self, most_waiting: int = _MOST_WAITING) -> None:
        self._most_waiting = most_waiting
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def submit(self, pinned: Tensor, ordinary: Tensor, arrived: torch.cuda.Event) -> Future[None]:
        """Copy `pinned` to `ordinary` once the event has come to pass."""
        with self._lock:
            self._make_room(pinned.nbytes)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "hookline-emptying")
            job = self._pool.submit(_copy_out, pinned, ordinary, arrived)
            self._waiting.append((job, pinned.nbytes))
        return job

    def _make_room(self, size: int) -> None:
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()
        while self._waiting and size + sum(held for _, held in self._waiting) > self._most_waiting:
            self._waiting.popleft()[0].exception()


def _copy_out(pinned: Tensor, ordinary: Tensor, arrived: torch.cuda.Event) -> None:
    arrived.synchronize()
    with torch.inference_mode(False), torch.no_grad():
        # `.data` counts its own versions: filling a value is no change to it.
        ordinary.data.copy_(pinned)
