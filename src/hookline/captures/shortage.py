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
    place = str(tensor.device) if isinstance(error, torch.OutOfMemoryError) else "the host"
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return (
        f"`{where}` ({shape}, {tensor.nbytes:,} bytes) could not be captured: memory ran out on "
        f"{place}. This capture held {held:,} bytes, and has let go of them. "
        f"{_advise(error, to_host)}"
    )


def remark_on_shortage(error: BaseException, held: int, *, to_host: bool) -> None:
    """Add to an error of the model's own, that memory ran out, what a capture had of it."""
    is_elsewhere = to_host and isinstance(error, torch.OutOfMemoryError)
    if held and not is_elsewhere:
        advice = _advise(error, to_host)
        error.add_note(f"hl.capture held {held:,} bytes when memory ran out. {advice}")


def _advise(error: BaseException, to_host: bool) -> str:
    is_device = isinstance(error, torch.OutOfMemoryError)
    hints = [] if to_host or not is_device else ['keep values on the host with device="cpu"']
    hints += [
        "keep less of each with select= or reduce=",
        "name fewer sites",
        "set a bound with max_bytes=",
    ]
    text = ", or ".join(hints)
    return f"{text[:1].upper()}{text[1:]}."
