"""Values that are spread over ranks, or still on their way from others. Imports no such package."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def gather(value: Tensor, *, is_full: bool, keep_graph: bool) -> Tensor:
    """Give a value as it is to be kept: arrived, and where that is asked for, whole."""
    if type(value) is Tensor:
        return value
    awaited = _find("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if awaited is not None and isinstance(value, awaited) and not keep_graph:
        return _wait(value)
    spread = _find("torch.distributed.tensor", "DTensor")
    if is_full and spread is not None and isinstance(value, spread):
        whole: Any = value
        return _wait(whole.full_tensor())
    return value


def _wait(value: Any) -> Tensor:
    """Give the tensor that a collective operation made, once it has."""
    wait = getattr(value, "wait", None)
    arrived: Tensor = value if wait is None else wait()
    return arrived


def _find(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)
