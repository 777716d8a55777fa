"""The short way of the compiler through a module whose output is only looked at.

Dynamo follows torch's own code to the hooks of a module, line by line and for every module. In a
large model that takes longer than all that hookline's hook does. Where that hook is the only one it
is told at once what comes of them: the module's forward, and its output shown.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from hookline._tracing import is_in_region
from hookline.hooks.module_hooks import PostHook
from hookline.hooks.operators import show_output

_FIRST_UNKNOWN = "2.16"
"""From this version of torch on the long way is taken, until the short one was seen there."""

_CALL = nn.Module.__call__, nn.Module._call_impl
_OTHERS = ("_backward_hooks", "_backward_pre_hooks", "_forward_pre_hooks")
_GLOBAL = (
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)


def _has_one_hook(module: Any) -> bool:
    """Tell whether a call of a module is no more than its forward, and its output shown."""
    hooks = module._forward_hooks
    if len(hooks) != 1 or any(getattr(module, name) for name in _OTHERS):
        return False
    (hook,) = hooks.values()
    return (
        type(hook) is PostHook
        and hook.shown is not None
        and (type(module).__call__, type(module)._call_impl) == _CALL
        and module.__dict__.keys().isdisjoint(("__call__", "_call_impl"))
        and module._compiled_call_impl is None
        and not any(getattr(nn.modules.module, name) for name in _GLOBAL)
        and not is_in_region()
    )


def _tell(module: nn.Module, hook: Any, output: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Have the hook called, as torch does."""
    new = hook(module, args, kwargs, output)
    return output if new is None else new


def shorten_calls() -> None:
    """Have dynamo take the short way, where it is loaded and its parts are known."""
    if "torch._dynamo" in sys.modules:
        _shorten()


@functools.cache
def _shorten() -> None:
    parts: Any = importlib.import_module("torch._dynamo.variables.nn_module")
    variables: Any = importlib.import_module("torch._dynamo.variables")
    settings: Any = importlib.import_module("torch._dynamo.config")
    kind = parts.UnspecializedNNModuleVariable
    call = kind.call_function
    # Its name until torch 2.13, and since.
    getter = "var_getattr" if hasattr(kind, "var_getattr") else "tp_getattro_impl"

    def get(one: Any, tx: Any, name: str) -> Any:
        return getattr(one, getter)(tx, name)

    def show(self: Any, tx: Any, output: Any, args: Any, kwargs: Any) -> Any:
        hooks = get(self, tx, "_forward_hooks").realize()
        hooks.install_dict_keys_match_guard()
        (hook,) = hooks.items.values()
        output = output.realize()
        is_tensor = isinstance(output, variables.TensorVariable)
        if not is_tensor or not issubclass(output.python_type(), Tensor):
            told = variables.UserFunctionVariable(_tell)
            return told.call_function(tx, [self, hook, output, *args], kwargs)
        given = [get(hook.realize(), tx, name) for name in ("shown", "asked")]
        shown = variables.TorchInGraphFunctionVariable(show_output)
        return shown.call_function(tx, [output, *given], {})

    def is_resumed() -> bool:
        return getattr(settings, "nested_graph_breaks", False)

    @functools.wraps(call)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        module = self.value
        # Where a forward may be left in its middle, nobody would come back for the hook.
        if not self.source or is_resumed() or not _has_one_hook(module):
            return call(self, tx, args, kwargs)
        # Another graph where there are other hooks, or another forward, as torch sees to it.
        found = [
            get(one, tx, name).realize().len()
            for one, names in ((self, _OTHERS), (tx.nn_modules_globals_vt, _GLOBAL))
            for name in names
        ]
        if any(found) or get(self, tx, "_forward_hooks").realize().len() != 1:
            return call(self, tx, args, kwargs)  # what is traced has put others there
        parts.guard_to_detect_forward_monkeypatching(self.source, module)
        stack = self.get_nn_module_stack_source()
        with parts.record_nn_module_stack(str(id(module)), stack, tx, module):
            output = get(self, tx, "forward").call_function(tx, args, kwargs)
            return show(self, tx, output, args, kwargs)

    has_parts = (
        torch.__version__ < _FIRST_UNKNOWN
        and hasattr(kind, getter)
        and hasattr(parts, "guard_to_detect_forward_monkeypatching")
        and hasattr(parts, "record_nn_module_stack")
        and hasattr(kind, "get_nn_module_stack_source")
        and hasattr(variables.ConstDictVariable, "install_dict_keys_match_guard")
    )
    if has_parts:
        kind.call_function = call_function
