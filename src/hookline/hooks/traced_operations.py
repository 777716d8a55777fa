"""What the compiler traces for operations inside a forward: a mode that sees each one.

The counterpart of `hookline.hooks.operations`. Whose operation it is, the compiler itself tells: by
the functions that it is following at that moment. What that gives is fixed when a graph is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from hookline._compiler import resumed_code, run_uncompiled
from hookline._tracing import settle_when_traced, traced_calls
from hookline.addresses.variables import forward_of
from hookline.hooks.frames import CALL_CODE
from hookline.hooks.nested import tensors
from hookline.hooks.operations import names_of, parameters_of
from hookline.hooks.traced_inside import TracedFrame, TracedInside, TracedScope

_FOREIGN_CODES = (CALL_CODE, TracedScope.assign.__code__)


@settle_when_traced
def _write_names(function: Any) -> str:
    """Write the names of an operation: `add`, in place `add,add_`; nothing to pass over."""
    return ",".join(names_of(function))


@settle_when_traced
def _write_parameters(function: Any) -> str:
    """Write the names of an operation's positional arguments, as far as it has any."""
    return ",".join(parameters_of(function))


@settle_when_traced
def _find_owner() -> str:
    """Tell whose an operation is that is being traced: `own`, `other`, or `lost`.

    Lost is what follows a break of the graph in another function than the forward itself.
    """
    mode: TracedMode | None = None
    inner: list[nn.Module] = []
    for code, variable in traced_calls():
        if code is _MODE_CODE:
            if mode is not None:  # it is of a module inside, which has a mode of its own
                return "other"
            mode = variable("self")
        elif code is _SEE_CODE:
            module = variable("module")
            return "own" if all(one is module for one in inner) else "other"
        elif code is None or code in _FOREIGN_CODES:
            return "other"
        elif (forward := resumed_code(code)) is not code:
            return "own" if not inner and _is_alone(mode, forward) else "lost"
        elif code.co_name == "forward" and code.co_argcount:
            this = variable(code.co_varnames[0])
            if isinstance(this, nn.Module):
                inner.append(this)
    # Where the graph breaks, a forward is traced without the functions that called it.
    is_own = mode is not None and inner and all(one is mode.module for one in inner)
    return "own" if is_own else "lost"


def _is_alone(mode: TracedMode | None, code: CodeType) -> bool:
    """Tell whether code is the forward of a mode's module, and of no module inside of it."""
    if mode is None or getattr(forward_of(mode.module), "__code__", None) is not code:
        return False
    kind = type(mode.module).forward
    return not any(type(one).forward is kind for one in list(mode.module.modules())[1:])


class TracedMode(TorchFunctionMode):
    """Pass the operations of a module that is being traced to those who asked for them."""

    def __init__(self, module: nn.Module, inside: TracedInside, frame: TracedFrame) -> None:
        super().__init__()
        self.module = module
        self.inside = inside
        self.frame = frame

    @partial(run_uncompiled, is_deep=False)  # else a graph of its own serves other functions too
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {} if kwargs is None else kwargs
        if not is_dynamo_compiling():  # the compiler gave a part of the forward up, which runs now
            return func(*args, **given)
        written = _write_names(func)
        # What is lost is passed over: where this raises, the compiler drops the operation.
        if written and self._is_asked(written) and _find_owner() == "own":
            return self._pass(func, written, args, given)
        return func(*args, **given)

    def _is_asked(self, written: str) -> bool:
        for name in written.split(","):
            spot = "/" + name
            if self.inside.at(spot) is not None or self.inside.at(spot + ":input") is not None:
                return True
        return False

    def _pass(self, func: Any, written: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside, frame = self.inside, self.frame
        spots = []
        for name in written.split(","):
            spot = "/" + name
            spots.append((spot, frame.count(spot)))
        names = _write_parameters(func).split(",")
        bound: dict[Any, Any] = {}
        for position, value in enumerate(args):
            bound[_key(names, position)] = value
        bound.update(kwargs)
        key = _find_changed(written, bound)
        changed = None if key is None else bound[key]
        for spot, index in spots:
            spot += ":input"
            if key is None:
                bound = inside.flow_taken(frame, spot, index, bound)
            else:
                bound = inside.flow_spent(frame, spot, index, bound, key)
        new_args = [bound[_key(names, position)] for position in range(len(args))]
        result = func(*new_args, **{name: bound[name] for name in kwargs})
        for spot, index in spots:
            found = inside.at(spot)
            if found is None:
                continue
            if key is not None:
                inside.flow_changed(frame, spot, index, changed)
            elif found.is_exact or tensors(result):
                result = inside.flow(frame, spot, index, result)
        return result


def _find_changed(written: str, bound: dict[Any, Any]) -> str | int | None:
    """Give the name of the argument that an operation changes in place; None if it changes none."""
    if bound.get("out") is not None:
        return "out"
    is_in_place = "," in written or written == "setitem" or bound.get("inplace", False)
    return next(iter(bound)) if is_in_place and bound else None


def _key(names: list[str], position: int) -> str | int:
    """Give what an argument is called: by its position where it has no name."""
    return names[position] if position < len(names) and names[position] else position


def _see(
    module: nn.Module,
    inside: TracedInside,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Trace a forward and see the operations it calls."""
    with TracedMode(module, inside, inside.frames[-1]):
        return forward(*args, **kwargs)


_SEE_CODE = _see.__code__
_MODE_CODE = TracedMode.__torch_function__.__code__


def run_traced(
    traced: Any,
    module: nn.Module,
    forward: Callable[..., Any],
    *,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_operations: bool,
) -> Any:
    """Do what a stand-in does where the compiler looks on."""
    inside = traced.look_inside()
    is_alone = not inside.frames
    if is_alone:  # its hooks run beside the graph, or forward was called by itself
        traced.begin_beside()
        inside.take_in(args, kwargs)
    if has_operations:
        output = _see(module, inside, forward, args, kwargs)
    else:
        output = forward(*args, **kwargs)
    if is_alone:
        inside.leave()
    return output
