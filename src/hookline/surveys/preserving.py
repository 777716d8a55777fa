"""Run a model and leave it as it was: buffers, attributes and random states are put back.

Parameters are not copied, for want of memory: a forward that writes to its own parameters, to a
list it holds, or outside of the model leaves what it wrote.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hookline._torch import preserve_version


@contextmanager
def preserved(modules: list[nn.Module]) -> Iterator[None]:
    """Put the state of these modules and the random states back at the end, also on errors."""
    restore_random = _save_random()
    attributes = [_Attributes(module) for module in modules]
    buffers = [(module._buffers, dict(module._buffers)) for module in modules]
    held = {
        id(buffer): buffer
        for _, before in buffers
        for buffer in before.values()
        if buffer is not None and _is_writable(buffer)
    }
    copies = [(buffer, buffer.detach().clone()) for buffer in held.values()]
    # With the versions as they were, a graph that was built before can still run backward.
    versioned = tuple(buffer for buffer in held.values() if not buffer.is_inference())
    try:
        with preserve_version(versioned), torch.no_grad():
            try:
                yield
            finally:
                for buffer, copy in copies:
                    _restore(buffer, copy)
    finally:
        for current, before in buffers:
            current.clear()
            current.update(before)
        for own in attributes:
            own.restore()
        # A weight cast without grad would be found there by the next forward that needs grad.
        torch.clear_autocast_cache()
        restore_random()


def _is_writable(buffer: Tensor) -> bool:
    """Tell whether a forward can have written to a buffer at all."""
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        return False
    if buffer.is_nested:  # it has no shape
        return True
    return buffer.layout is not torch.strided or not any(
        size > 1 and stride == 0  # made by `expand`
        for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )


def _restore(buffer: Tensor, copy: Tensor) -> None:
    if buffer.is_nested or (buffer.shape == copy.shape and buffer.dtype == copy.dtype):
        buffer.copy_(copy)
    else:  # resized, or its `.data` exchanged
        buffer.data = copy


class _Attributes:
    """What a module's own attributes were; not its parameters, which FSDP exchanges and counts."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = set(module._parameters)
        self._values = dict(vars(module))

    def restore(self) -> None:
        # Together with the buffers: a cache and the length it was made for belong together.
        skipped = self._parameters | set(self._module._parameters)
        current = vars(self._module)
        for name in current.keys() - self._values.keys() - skipped:
            del current[name]
        for name, value in self._values.items():
            if name not in skipped:
                current[name] = value


def _save_random() -> Callable[[], None]:
    state = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()

    def restore() -> None:
        torch.set_rng_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)

    return restore
