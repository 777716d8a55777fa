"""The functions of torch's that change a tensor in place, which the compiler shows to no mode.

It goes by torch's list of what a `TorchFunctionMode` sees, which leaves them out: modes see
`torch.relu_` and its like in eager runs alone. Here hookline's mode sees them, and no other does.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import BuiltinFunctionType
from typing import Any

from hookline.hooks.traced_operations import TracedMode


def show_unlisted() -> None:
    """Have dynamo show them, where it is loaded and its parts are known."""
    if "torch._dynamo" in sys.modules:
        _show()


@functools.cache
def _show() -> None:
    parts: Any = importlib.import_module("torch._dynamo.variables.torch")
    kind = parts.TorchInGraphFunctionVariable
    is_listed = getattr(kind, "torch_function_override_enabled", None)
    may_dispatch = getattr(parts, "can_dispatch_torch_function", None)
    if is_listed is None or may_dispatch is None:
        return

    @functools.wraps(is_listed)
    def is_shown(self: Any, tx: Any, args: Any, kwargs: Any) -> bool:
        if is_listed(self, tx, args, kwargs):
            return True
        is_asked = _is_in_place(self.value) and _has_own_mode(tx)
        return is_asked and bool(may_dispatch(tx, args, kwargs))

    kind.torch_function_override_enabled = is_shown


def _is_in_place(function: Any) -> bool:
    is_builtin = isinstance(function, BuiltinFunctionType)
    return is_builtin and function.__name__.endswith("_")


def _has_own_mode(tx: Any) -> bool:
    """Tell whether the mode that would see a function now is hookline's."""
    modes = list(getattr(tx.symbolic_torch_function_state, "mode_stack", ()))
    return bool(modes) and isinstance(getattr(modes[-1], "value", None), TracedMode)
