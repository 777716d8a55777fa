"""What happens when memory runs out while values are captured: what to say, and whether it was."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline._errors import HooklineError

# torch has a class of its own for devices only; what the host or the driver says is text.
_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that a device or the host has no memory left."""
    if isinstance(error, HooklineError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def explain_shortage(
    error: BaseException, tensor: Tensor, *, where: str, held: int, to_host: bool
) -> str:
    """Say which value did not fit, what was held, and what to do."""
    is_device = isinstance(error, torch.OutOfMemoryError)
    place = str(tensor.device) if is_device else "the host"
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    hints = [] if to_host or not is_device else ['keep values on the host with device="cpu"']
    hints += [
        "keep less of each with select= or reduce=",
        "name fewer sites",
        "set a bound with max_bytes=",
    ]
    return (
        f"`{where}` ({shape}, {tensor.nbytes:,} bytes) could not be captured: memory ran out on "
        f"{place}. This capture held {held:,} bytes, and has let go of them. "
        f"{_capitalise(', or '.join(hints))}."
    )


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]
