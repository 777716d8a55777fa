"""Graft: both modules on the same input, to tell the one that differs from one that inherits.

Where both take the same arguments, B's module is called as A's was. Else the call of B's module is
taken as B makes it, and the values of A's call are put in its place: by the name of the argument,
or in order by their shape.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookline import _trees
from hookline._trees import Path
from hookline.comparisons.calling import StepCall
from hookline.comparisons.catching import CaughtCall, NotCaught, catch_call
from hookline.comparisons.rerunning import Rerun, rerun
from hookline.diffs.measuring import relative_error
from hookline.hooks.arguments import known_names, unbind

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class NotMeasured(NotCaught):
    """Say that both modules ran, but what they gave cannot be compared."""


@dataclass(frozen=True, slots=True, eq=False)
class Graft:
    """What two modules gave on the same input."""

    call: CaughtCall
    """A's call."""

    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    """What B's module was called with."""

    module_b: nn.Module
    """B's module."""

    path_b: str
    """Its path."""

    line_b: str
    """The line that calls it in B."""

    outputs: Mapping[str, float]
    """The relative error of each output, by its place."""

    gradients: Mapping[str, float]
    """The relative error of the gradient of each input."""

    parameters: Mapping[str, float]
    """The relative error of the gradient of each parameter."""

    given: float = math.inf
    """How far apart what the two were given in their own steps is; infinite where it is not alike
    in all: other arguments, random states or modes, or objects that nobody looks into."""

    notes: tuple[str, ...] = ()
    """What could not be compared."""

    def error(self, direction: str | None, *, without: Container[str] = ()) -> float:
        """Give the largest error of what counts in a direction, but for some parameters."""
        if direction not in ("backward", "parameter gradient"):
            return max(self.outputs.values(), default=0.0)
        own = [error for name, error in self.parameters.items() if name not in without]
        return max([*self.gradients.values(), *own], default=0.0)


def make_graft(
    models: tuple[nn.Module, nn.Module],
    paths: tuple[str, str],
    calls: tuple[StepCall, StepCall],
    *,
    visit: int = 0,
    backward: bool = False,
) -> Graft:
    """Run A's module and B's on A's input; raise `NotCaught` where that cannot be done.

    `NotMeasured`: they ran, but nobody can say how far apart what they gave is.
    """
    caught = catch_call(models[0], paths[0], calls[0], visit=visit, backward=backward)
    other = catch_call(models[1], paths[1], calls[1], visit=visit)
    if _can_take(other, caught):
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = (caught.args, caught.kwargs)
        notes: list[str] = []
    else:
        arguments, notes = transplant(dict(_trees.leaves(caught.bound)), other)
    gradients = caught.gradients if backward else None
    done_a = rerun(caught.module, caught, (caught.args, caught.kwargs), gradients=gradients)
    done_b = rerun(other.module, caught, arguments, gradients=gradients)
    try:
        outputs = compare_leaves(done_a.outputs, done_b.outputs, notes)
        compared = _compare_gradients(done_a, done_b, notes)
        parameters = _compare_parameters(done_a, done_b)
    except Exception as error:  # tensors of a kind that has no distance
        raise NotMeasured(f"{type(error).__name__}: {error}") from error
    if not (compared or parameters if backward else outputs):
        raise NotMeasured("they give nothing that could be compared")
    return Graft(
        call=caught,
        arguments=arguments,
        module_b=other.module,
        path_b=paths[1],
        line_b=other.line.place,
        outputs=outputs,
        gradients=compared,
        parameters=parameters,
        given=_compare_calls(caught, other),
        notes=tuple(notes),
    )


@contextmanager
def copying_inputs(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules copies of their arguments for a while, so that writing there does nothing."""

    def copy(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        both = _trees.map_tensors({"args": args, "kwargs": kwargs}, lambda _, one: one.clone())
        return both["args"], both["kwargs"]

    handles = [one.register_forward_pre_hook(copy, with_kwargs=True) for one in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _can_take(other: CaughtCall, caught: CaughtCall) -> bool:
    """Tell whether B's module can be called just as A's is: with plain arguments, too.

    Not with objects that nobody looks into: a cache of A's holds what A has put there.
    """
    names = [known_names(one.module) for one in (caught, other)]
    is_alike = names[0] == names[1] and names[0] is not None
    device = {one.device for call in (caught, other) for _, one in _trees.leaves(call.bound)}
    return is_alike and len(device) <= 1 and _is_plain(caught.args) and _is_plain(caught.kwargs)


def _compare_calls(a: CaughtCall, b: CaughtCall) -> float:
    """Give how far apart two calls are: the largest error of a tensor, infinite for the rest."""
    if a.is_grad != b.is_grad or a.autocast != b.autocast or not _are_equal(a.random, b.random):
        return math.inf
    return _compare_given(a.bound, b.bound)


def _compare_given(one: Any, other: Any) -> float:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return relative_error(one, other) if one.shape == other.shape else math.inf
    if isinstance(one, _PLAIN):
        return 0.0 if type(one) is type(other) and one == other else math.inf
    ours, theirs = _trees.children(one), _trees.children(other)
    if ours is None or theirs is None or [key for key, _ in ours] != [key for key, _ in theirs]:
        return math.inf
    return max((_compare_given(x, dict(theirs)[key]) for key, x in ours), default=0.0)


def _are_equal(one: Any, other: Any) -> bool:
    """Tell whether two random states are the same, as far as both have them."""
    if isinstance(one, (Tensor, np.ndarray)):
        return bool((one == other).all())
    if isinstance(one, dict):
        return all(_are_equal(one[key], other[key]) for key in one.keys() & other.keys())
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (Tensor, *_PLAIN)):
        return True
    items = _trees.children(value)
    return items is not None and all(_is_plain(item) for _, item in items)


def transplant(
    values: Mapping[Path, Tensor], other: CaughtCall
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], list[str]]:
    """Put the values of another call into one, by the name of the argument or by shape."""
    given = dict(values)
    wanted = dict(_trees.leaves(other.bound))
    swaps: dict[Path, Tensor] = {}
    for path, tensor in wanted.items():
        twin = given.get(path)
        if twin is not None and (_fits(twin, tensor) or _is_alike(twin, tensor)):
            swaps[path] = given.pop(path).to(tensor.device)
    for path, tensor in wanted.items():
        fitting = [key for key, one in given.items() if _fits(one, tensor)]
        if path not in swaps and fitting:
            swaps[path] = given.pop(fitting[0]).to(tensor.device)
    if wanted and not swaps:
        raise NotCaught("the two modules take no argument of the same shape")
    left = [_spell(path) for path in wanted if path not in swaps]
    notes = [f"the argument `{name}` has no partner and stayed B's own" for name in left]
    made = _trees.map_tensors(other.bound, lambda path, tensor: swaps.get(path, tensor))
    return unbind(other.module, made, other.args, other.kwargs), notes


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Tell whether an argument may have been meant, of another length but the same width."""
    return one.ndim == other.ndim > 1 and one.shape[-1] == other.shape[-1]


def _fits(one: Tensor, other: Tensor) -> bool:
    is_float = one.dtype.is_floating_point == other.dtype.is_floating_point
    return one.shape == other.shape and is_float


def compare_leaves(
    a: Mapping[Any, Tensor], b: Mapping[Any, Tensor], notes: list[str]
) -> dict[str, float]:
    """Compare what both gave: by name, else in order by the number of elements."""
    found: dict[str, float] = {}
    waiting = dict(b)
    for name, one in a.items():
        other = waiting.pop(name, None) if _same_size(one, waiting.get(name)) else None
        if other is None:
            key = next((key for key, it in waiting.items() if _same_size(one, it)), None)
            other = None if key is None else waiting.pop(key)
        place = name if isinstance(name, str) else ".".join(map(str, name))
        if other is None and name in b:
            found[place] = math.inf  # of another size: it has no elements to compare
        elif other is None:
            notes.append(f"{place or 'the output'} has no partner in B")
        else:
            found[place] = relative_error(one, other)
    return found


def _compare_gradients(a: Rerun, b: Rerun, notes: list[str]) -> dict[str, float]:
    """Compare the gradients of the inputs; one that is missing on one side differs."""
    found = compare_leaves(a.gradients, b.gradients, [])
    for path in a.gradients:
        found.setdefault(_spell(path), math.inf)
    if len(b.gradients) > len(a.gradients):
        notes.append("B's module sends a gradient to an input that gets none in A")
        found["another input"] = math.inf
    return found


def _compare_parameters(a: Rerun, b: Rerun) -> dict[str, float]:
    """Compare the gradients of parameters of the same name, or else of the same size."""
    found = {}
    for name in a.parameters.keys() & b.parameters.keys():
        one, other = a.parameters[name], b.parameters[name]
        if one is not None and other is not None and one.numel() == other.numel():
            found[name] = relative_error(one, other)
        elif (one is None) != (other is None):
            found[name] = math.inf
    rest_a = {k: v for k, v in a.parameters.items() if k not in b.parameters and v is not None}
    rest_b = {k: v for k, v in b.parameters.items() if k not in a.parameters and v is not None}
    return found | compare_leaves(rest_a, rest_b, [])


def _spell(path: Path) -> str:
    return ".".join(map(str, path))


def _same_size(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.numel() == other.numel()
