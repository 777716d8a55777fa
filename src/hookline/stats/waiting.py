"""Wait for a device, out of the way of the threads that give it work."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

_FIRST, _LONGEST = 2e-4, 1.6e-2
"""Seconds between two looks: each is twice as long as the one before, up to a bound.

A look takes Python's lock and the driver's from the thread that trains: nine in 50 ms are better
than thirty. Who asks for what is not there yet gets it up to as much later.
"""

_RELAXED = 2
"""The driver's mode of a thread whose questions do not end a recording elsewhere."""


class Event(Protocol):
    """What a device passes when it comes to it."""

    def query(self) -> bool:
        """Tell whether it was passed."""


def wait_for(event: Event) -> None:
    """Look now and then whether an event was passed.

    A thread that waits inside the driver holds locks there that every launch of a kernel needs:
    other threads then take up to twice as long for each.
    """
    pause = _FIRST
    with _beside_recordings():
        while not event.query():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)


@contextlib.contextmanager
def _beside_recordings() -> Iterator[None]:
    """Let this thread ask, while another one records a CUDA graph."""
    exchange = _find_exchange()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # puts the mode that was there in its place
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _find_exchange() -> Callable[..., Any] | None:
    """Give the driver's function that changes the mode of the thread that calls it."""
    try:
        found: Callable[..., Any] = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no such driver: nothing records a CUDA graph
        return None
    return found
