"""Operations inside a module's forward: what torch is called with there, and what it gives.

While a module with such a site runs, a `TorchFunctionMode` sees every torch function, method and
operator, above autograd. Only those that the module's own forward calls count: not those of other
modules it calls, and not those inside an `autograd.Function`, where an edit would be lost to the
gradient. The mode is pushed by the stand-in for that one forward and gone when it returns.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from hookline import _trees
from hookline._compiler import run_uncompiled
from hookline._functions import name_function
from hookline._torch import is_function_mode_on
from hookline.addresses.inside import canonical_operation
from hookline.hooks import gradients
from hookline.hooks.aliases import InputTaps
from hookline.hooks.frames import CALL_CODE, Frame
from hookline.hooks.inside import Asked, InsidePlan, flow, hear_changed, select_wired
from hookline.hooks.variables import Scope
from hookline.sources.taps import TAPS

if TYPE_CHECKING:
    from hookline.hooks.junctions import Junction

# By identity: to hash a code object is to read all of it.
_FOREIGN_CODES = frozenset(
    map(id, [CALL_CODE, Scope.assign.__code__])  # the last is called by hooks of a variable
)
_MOST_LOOKS = 8

Names = tuple[str, ...]
_names: dict[Any, Names] = {}
_signatures: dict[Any, list[str]] = {}


def _read_names(function: Any) -> Names:
    """Give the names of an operation: `("add",)`, in place `("add", "add_")`; none to pass over."""
    name = getattr(function, "__name__", None) or type(function).__name__
    if name in ("__get__", "__set__", "__delete__"):
        return ()
    full = canonical_operation(name.partition(".")[0])
    if full == "setitem":
        return ("setitem",)
    bare = full.removesuffix("_")
    return (full,) if bare == full else (bare, full)


def names_of(function: Any) -> Names:
    """Give the names of a torch function; remembered."""
    found = _names.get(function)
    if found is None:
        found = _read_names(function)
        if not _is_copy(function):
            _names[function] = found
    return found


def _is_copy(function: Any) -> bool:
    """Tell whether a function is a rewritten copy, which must not outlive its model."""
    return TAPS in getattr(getattr(function, "__code__", None), "co_freevars", ())


class _Running:
    """One module's forward under way."""

    __slots__ = ("frame", "junction", "passed", "plan")

    def __init__(self, junction: Junction, frame: Frame) -> None:
        self.junction = junction
        self.frame = frame
        self.plan: InsidePlan = junction.plan.inside
        self.passed = self.plan.passed


class _OperationMode(TorchFunctionMode):
    """Pass the operations of the innermost module under way to those who asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[_Running] = []

    @run_uncompiled
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_dynamo_compiling():  # what is called is compiled, and its graph knows no modes
            return func(*args, **kwargs) if kwargs else func(*args)
        running = self.running[-1]
        if func in running.passed:  # nearly always
            return func(*args, **kwargs) if kwargs else func(*args)
        names = names_of(func)
        wanted = running.plan.wanted_operations
        if names and (wanted is None or names[-1] in wanted or names[0] in wanted):
            if self._is_own():
                return _pass(running, func, names, args, kwargs or {})
        elif not names or self._is_noted(running.junction, names[0]):
            running.passed.add(func)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _is_own(self) -> bool:
        """Tell whether the module's own forward called, not a module it calls."""
        frame: FrameType | None = sys._getframe(2)
        own = self.running[-1].junction.own_code
        while frame is not None:
            code = frame.f_code
            if code is _SEE_CODE:
                return True
            if id(code) in _FOREIGN_CODES:
                return False
            if code is not own and (name_function(frame) or self._is_of_another(frame)):
                return False
            frame = frame.f_back
        return False

    def _is_of_another(self, frame: FrameType) -> bool:
        """Tell whether a frame is the forward of another module, called by itself."""
        code = frame.f_code
        if code.co_name != "forward" or not code.co_argcount:
            return False
        this = frame.f_locals.get(code.co_varnames[0])
        return isinstance(this, nn.Module) and this is not self.running[-1].frame.module

    def _is_noted(self, junction: Junction, name: str) -> bool:
        """Remember which operations run here, for the message about one that does not.

        True when no more need be seen of it.
        """
        looks = junction.looks
        looks[name] = looks.get(name, 0) + 1
        if self._is_own():
            junction.ran.add(name)
            return True
        return looks[name] >= _MOST_LOOKS


_local = threading.local()


@partial(run_uncompiled, is_deep=False)  # the forward may call what is compiled
def see(
    junction: Junction, frame: Frame, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a forward and see the operations it calls, in this thread."""
    mode: _OperationMode | None = getattr(_local, "mode", None)
    if mode is None:
        mode = _local.mode = _OperationMode()
    mode.running.append(_Running(junction, frame))
    try:
        # On already where a module inside another one has sites; but not if the outer one calls
        # `backward`, a function of torch as others are: the mode is off while one runs.
        if len(mode.running) > 1 and is_function_mode_on(mode):
            return forward(*args, **kwargs)
        with mode:
            return forward(*args, **kwargs)
    finally:
        mode.running.pop()


_SEE_CODE = see.__code__


def _pass(
    running: _Running, func: Any, names: Names, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    frame = running.frame
    plan = running.junction.plan.inside
    counts = frame.counts
    spots = []
    for name in names:
        spot = f"/{name}"
        index = counts.get(spot, 0)
        counts[spot] = index + 1
        spots.append((spot, index))
    changed = _changed_in_place(func, names, args, kwargs)
    args, kwargs, taps = _pass_inputs(plan, frame, spots, func, args, kwargs, changed)
    if changed is not None and changed is not kwargs.get("out"):
        changed = next(iter((*args, *kwargs.values())), None)  # an alias, if it is tapped
    result = func(*args, **kwargs)
    for one in reversed(taps):
        one.rebase()
        one.audit(result)
    for spot, index in spots:
        asked = plan.at(spot)
        if asked is None:
            continue
        if changed is not None:
            _pass_changed(asked, frame, index, changed)
        elif asked.values or asked.gradients:
            if not _is_worth(asked, result):
                continue
            result = flow(asked, frame, index, result)
    return result


def _changed_in_place(
    func: Any, names: Names, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give what an operation changes in place; None for one that only gives a result."""
    out = kwargs.get("out")
    if out is not None:
        return out
    is_in_place = len(names) > 1 or names[0] == "setitem"
    if not is_in_place and "inplace" in parameters_of(func):
        is_in_place = bool(bind_operation(func, args, kwargs).get("inplace"))
    return next(iter((*args, *kwargs.values())), None) if is_in_place else None


def _is_worth(asked: Asked, result: Any) -> bool:
    """Tell whether a result is to be shown: patterns mean tensors, not sizes and flags."""
    listeners = [*asked.values, *asked.gradients]
    if any(one.inside is not None and one.inside.is_exact for one in listeners):
        return True
    return any(True for _ in _trees.leaves(result))


def _pass_changed(asked: Asked, frame: Frame, index: int, value: Any) -> None:
    """Show a tensor that was changed in place; what edits it writes to it."""
    new = flow(asked.pick(asked.values), frame, index, value)
    _write_over(value, new)
    if asked.gradients:
        hear_changed(asked, frame, index, value)


def _write_over(old: Any, new: Any) -> None:
    """Change tensors in place into those that an edit gave for them."""
    if new is not old:
        for (_, before), (_, after) in zip(_trees.leaves(old), _trees.leaves(new), strict=True):
            if after is not before:
                before.copy_(after)


def _pass_inputs(
    plan: InsidePlan,
    frame: Frame,
    spots: list[tuple[str, int]],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    changed: Any,
) -> tuple[tuple[Any, ...], dict[str, Any], list[InputTaps]]:
    taps = []
    for name, index in spots:
        spot = f"{name}:input"
        asked = plan.at(spot)
        if asked is None:
            continue
        bound = bind_operation(func, args, kwargs)
        new = flow(asked.pick(asked.values), frame, index, bound)
        first = next(iter(bound), 0)
        is_changed = changed is not None and bound[first] is changed
        if is_changed and new is not bound:
            # The forward goes on with the tensor itself: the edit has to be in it.
            _write_over(changed, new[first])
            new = {**new, first: changed}
        wired = select_wired(asked, frame, index)
        if wired:
            ears = gradients.ears_for(new, wired)
            port = f"{name}[{index}]:input"
            swaps, made = gradients.tap_inputs(new, ears, port=port)
            if made is not None:
                taps.append(made)
                new = _trees.replace_tensors(new, swaps)
        if new is not bound:
            args, kwargs = _unbind(new, args, kwargs, parameters_of(func))
            changed = new[first] if is_changed else changed
    return args, kwargs, taps


def parameters_of(func: Callable[..., Any]) -> list[str]:
    """List the names of the positional arguments; none for what is written in C."""
    found = _signatures.get(func)
    if found is None:
        found = []
        # An operator has its arguments by position, also where torch wrote it in Python.
        if inspect.isfunction(func) and not func.__name__.startswith("__"):
            kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            with suppress(ValueError):  # it wraps one written in C
                parameters = inspect.signature(func).parameters.values()
                found = [one.name for one in parameters if one.kind in kinds]
        if not _is_copy(func):
            _signatures[func] = found
    return found


def bind_operation(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str | int, Any]:
    """Name the arguments as the signature does; by position where there is none."""
    names = parameters_of(func)
    bound: dict[str | int, Any] = {
        names[position] if position < len(names) else position: value
        for position, value in enumerate(args)
    }
    bound.update(kwargs)
    return bound


def _unbind(
    bound: dict[str | int, Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    new_args = tuple(
        bound[names[position] if position < len(names) else position]
        for position in range(len(args))
    )
    return new_args, {name: bound[name] for name in kwargs}
