"""The random states that a forward may draw from: torch's, Python's and numpy's.

They are taken at every call of a watched model, so numpy's, which takes 50 us to read, is read
again only where its memory has changed.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NUMPY_BYTES = 624 * 4 + 4
"""The words of a Mersenne twister and the place in them."""


class RandomStates(NamedTuple):
    """What random numbers follow from."""

    cpu: Tensor
    """Torch's generator of the CPU."""
    cuda: dict[int, Tensor]
    """Torch's generators of CUDA devices, by index."""
    python: Any
    """That of `random`."""
    numpy: Any
    """That of `numpy.random`; None where numpy was not imported."""


class _NumpyState:
    """The latest state of `numpy.random` that was read, and the memory it was in."""

    def __init__(self) -> None:
        self._address: int | None = None
        self._bytes = b""
        self._state: Any = None

    def take(self) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is None or not hasattr(numpy, "random"):
            return None
        if self._address is None:
            self._address = _find_address(numpy)
        if self._address == 0:
            return numpy.random.get_state()
        # A second normal number, which numpy keeps outside of this memory, may be missed; the
        # states that are put back after a replay are read in full.
        now = ctypes.string_at(self._address, _NUMPY_BYTES)
        if now != self._bytes:
            self._state, self._bytes = numpy.random.get_state(), now
        return self._state


def _find_address(numpy: Any) -> int:
    """Give where the state of `numpy.random` lies; 0 where that is not known."""
    try:
        generator = numpy.random.mtrand._rand._bit_generator
        if type(generator).__name__ != "MT19937":
            return 0
        return int(generator.ctypes.state_address)
    except Exception:  # private to numpy
        return 0


_numpy_state = _NumpyState()


def take_states(cuda_devices: Iterable[int] = (), *, in_full: bool = False) -> RandomStates:
    """Take the random states as they are now, without waiting for a device."""
    numpy = sys.modules.get("numpy") if in_full else None
    return RandomStates(
        torch.default_generator.get_state(),
        {index: torch.cuda.default_generators[index].get_state() for index in cuda_devices},
        random.getstate(),
        _numpy_state.take() if numpy is None else numpy.random.get_state(),
    )


def put_states(states: RandomStates) -> None:
    """Put random states in place."""
    torch.default_generator.set_state(states.cpu)
    for index, state in states.cuda.items():
        torch.cuda.default_generators[index].set_state(state)
    random.setstate(states.python)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)


def seed_everything(seed: int) -> None:
    """Seed torch, Python and, where it was imported, numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def seed_states(seed: int) -> RandomStates:
    """Give the random states that seeding leads to; those of now stay."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    before = take_states(devices, in_full=True)
    try:
        seed_everything(seed)
        return take_states(devices, in_full=True)
    finally:
        put_states(before)


def _put(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def keep_generator(generator: Any) -> Callable[[], None] | None:
    """Give what puts a generator of somebody's own back as it is now; None for what is none."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return partial(_put, generator, state)
    if isinstance(generator, random.Random):
        own = generator.getstate()
        return lambda: generator.setstate(own)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(generator, numpy.random.RandomState):
        legacy = generator.get_state()
        return lambda: generator.set_state(legacy)
    if numpy is not None and isinstance(generator, numpy.random.Generator):
        source = generator.bit_generator
        before = source.state
        return lambda: setattr(source, "state", before)
    return None
