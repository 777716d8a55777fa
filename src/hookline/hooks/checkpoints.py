"""Which checkpointed region runs now, and which one a recompute repeats.

Activation checkpointing runs part of the forward again inside backward. A region is the object
torch keeps for one such part: the frame of the non-reentrant kind, the context of the reentrant
kind. Both live exactly as long as a backward through them is possible.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from hookline._torch import graph_task_id, top_saved_tensor_hooks

_PACK = "_checkpoint_hook.__init__.<locals>.pack_hook"
_UNPACK = "_checkpoint_hook.__init__.<locals>.unpack_hook"
_REENTRANT_FORWARD = torch_checkpoint.CheckpointFunction.forward.__code__
_REENTRANT_BACKWARD = torch_checkpoint.CheckpointFunction.backward.__code__
_CHECKPOINT = inspect.unwrap(
    getattr(torch_checkpoint, "_checkpoint_impl", torch_checkpoint.checkpoint)  # since torch 2.14
).__code__


class _Unknown:
    """A region that torch knows nothing of."""


_UNKNOWN = _Unknown()


def in_checkpoint() -> Any | None:
    """Give the innermost non-reentrant region being recorded, or None; costs next to nothing."""
    top: Any = top_saved_tensor_hooks(False)
    if top is None or top[0].__qualname__ != _PACK:
        return None
    return top[0].__closure__[0].cell_contents


def recorded_regions() -> list[Any]:
    """List the regions being recorded around this point, innermost first."""
    innermost = in_checkpoint()
    regions = [] if innermost is None else [innermost]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _REENTRANT_FORWARD:
            regions.append(frame.f_locals["ctx"])
        elif code is _CHECKPOINT:
            generator = frame.f_locals.get("gen")
            if generator is not None and generator.gi_frame is not None:
                region = generator.gi_frame.f_locals.get("new_frame")
                if region is not None and region is not innermost:
                    regions.append(region)
        elif code is _REENTRANT_BACKWARD or code.co_qualname == _UNPACK:
            break
        frame = frame.f_back
    return regions


def recomputed_region() -> Any | None:
    """Give the region whose forward is being repeated around this point."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _REENTRANT_BACKWARD:
            return frame.f_locals["ctx"]
        if code.co_qualname == _UNPACK:
            return frame.f_locals["frame"]
        if code.co_name == "backward" and "heckpoint" in code.co_qualname:
            return _UNKNOWN  # another library's checkpoint
        frame = frame.f_back
    return None


def is_recompute() -> bool:
    """Tell whether a module that runs inside a backward pass is being recomputed.

    A hook or an autograd function may also call a model of its own there.
    """
    return graph_task_id() != -1 and recomputed_region() is not None
