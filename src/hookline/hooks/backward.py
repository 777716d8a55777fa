"""Module-level backward hooks with torch's signatures and right gradients.

`grad_input` has one entry for each argument of the call, positional ones first, whatever happens
inside the module; a nested argument has a nested entry. `grad_output` has one entry for each item
the module returned. Where no gradient was made the entry is None.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from hookline import _trees
from hookline._errors import EditError
from hookline._torch import at_end_of_backward
from hookline._trees import Path
from hookline.hooks import observing
from hookline.hooks.arguments import paths
from hookline.hooks.fitting import check_fit, is_met_again, refuse_second_order
from hookline.hooks.sessions import Session
from hookline.hooks.visits import Listener, Station, Visit, describe

BackwardHook = Callable[..., Any]
_Layout = list[Any]
"""One entry an item: a path, a tree of paths, or None for what is no tensor."""


def _layout(tree: Any) -> _Layout:
    if isinstance(tree, Tensor):
        return [()]
    return [_paths(item, (key,)) for key, item in _trees.children(tree) or ()]


def _paths(tree: Any, path: Path) -> Any:
    if isinstance(tree, Tensor):
        return path
    items = _trees.children(tree)
    if items is None:
        return None
    return [_paths(item, (*path, key)) for key, item in items]


def _fill(entry: Any, grads: dict[Path, Any]) -> Any:
    if isinstance(entry, tuple):
        return grads.get(entry)
    return None if entry is None else tuple([_fill(item, grads) for item in entry])


class _Waiting:
    """The visits whose input gradients have not come in one backward pass."""

    __slots__ = ("__weakref__", "visits")

    def __init__(self) -> None:
        self.visits: list[tuple[BackwardListener, Visit]] = []


_starts = itertools.count()
# The backward pass holds its entry through the callback at its end, so that a pass that fails
# leaves nothing behind.
_waiting: weakref.WeakValueDictionary[int, _Waiting] = weakref.WeakValueDictionary()


class _State:
    """What one visit keeps between its forward and its backward passes."""

    __slots__ = ("inputs", "outputs", "start", "waiting")

    def __init__(self, inputs: _Layout) -> None:
        self.start = next(_starts)
        """Orders visits by when they began, over all sessions."""
        self.inputs = inputs
        self.outputs: _Layout = []
        self.waiting: dict[int, tuple[Any, ...]] = {}
        """The output gradients of backward passes whose input gradients are still to come."""


class BackwardListener(Listener):
    """Call a backward hook: this side listens at the output; its twin at the input."""

    __slots__ = ("function", "is_pre")

    is_collective = True

    def __init__(
        self, session: Session, station: Station, port: str, function: BackwardHook, *, is_pre: bool
    ) -> None:
        super().__init__(session, station, port, values=True, gradients=True, stage=1)
        self.function = function
        self.is_pre = is_pre

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            if not visit.is_recompute:
                visit.record = _State([visit.station.argument_path(args)])
        elif not visit.is_recompute:
            where = paths(module, args, kwargs)
            visit.record = _State(
                [
                    path if isinstance(value, Tensor) else _paths(value, path)
                    for path, value in zip(where, (*args, *kwargs.values()), strict=True)
                ]
            )
        return args, kwargs

    def on_output(
        self,
        visit: Visit,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        if not visit.is_recompute:
            if visit.record is None:
                visit.record = _State([])
            visit.record.outputs = _layout(output)
        return output

    def on_gradients(
        self, visit: Visit, port: str, grads: dict[Path, Any], task: int
    ) -> dict[Path, Any]:
        state: _State = visit.record
        if port == "output":
            given = tuple([_fill(entry, grads) for entry in state.outputs])
            if self.is_pre:
                return self._call(visit, "output", task, state.outputs, grads, given)
            state.waiting[task] = given
            self._close_later(visit, task)
            return grads
        given = tuple([_fill(entry, grads) for entry in state.inputs])
        outputs = state.waiting.pop(task, None)
        if outputs is None:  # the loss came through something the module did not return
            outputs = tuple([_fill(entry, {}) for entry in state.outputs])
        return self._call(visit, "input", task, state.inputs, grads, given, outputs)

    def on_only_gradient(self, visit: Visit, port: str, leaf: Path, grad: Any, task: int) -> Any:
        state: _State = visit.record
        layout = state.outputs if port == "output" else state.inputs
        if layout != [leaf]:
            return self.on_gradients(visit, port, {leaf: grad}, task)[leaf]
        if port == "output" and not self.is_pre:
            state.waiting[task] = (grad,)
            self._close_later(visit, task)
            return grad
        given: tuple[Any, ...] = ((grad,),)
        if port == "input":
            outputs = state.waiting.pop(task, None)
            if outputs is None:
                outputs = tuple([_fill(entry, {}) for entry in state.outputs])
            given = ((grad,), outputs)
        return self._call(visit, port, task, layout, {leaf: grad}, *given)[leaf]

    def _call(
        self,
        visit: Visit,
        port: str,
        task: int,
        layout: _Layout,
        grads: dict[Path, Any],
        *given: Any,
    ) -> dict[Path, Any]:
        module = visit.station.module
        try:
            result = self.function(module, *given)
        except Exception as error:
            observing.explain(error, self.session, visit, f"{visit.station.path}:{port}.grad")
            raise
        if result is None:
            return grads
        new = dict(grads)
        address = f"{visit.station.path}:{port}.grad"
        where = describe(visit, address)
        _read_result(result, layout, given[0], new, where)
        is_edited = any(new[path] is not grad for path, grad in grads.items())
        if is_edited and is_met_again(visit, task):
            refuse_second_order(
                where, "Return None there, or use hl.edit(..., second_order=True) if it is meant."
            )
        return new

    def _close_later(self, visit: Visit, task: int) -> None:
        """Call the hook at the end of this backward if no input gradient comes before."""
        waiting = _waiting.get(task)
        if waiting is None:
            waiting = _waiting[task] = _Waiting()
            at_end_of_backward(partial(_end_of_backward, task, waiting))
        waiting.visits.append((self, visit))

    def close(self, visit: Visit, task: int) -> None:
        """Call the hook without input gradients, unless they came or the hook was removed."""
        state: _State = visit.record
        outputs = state.waiting.pop(task, None)
        if outputs is None or not self.session.is_open:
            return
        inputs = tuple([_fill(entry, {}) for entry in state.inputs])
        path, module = visit.station.path, visit.station.module
        result = observing.run(
            self.session, visit, f"{path}:input.grad", self.function, module, inputs, outputs
        )
        if result is not None and any(one is not None for one in _as_tuple(result)):
            raise EditError(
                f"the backward hook at `{path}` returned gradients, but none of the module's "
                "inputs requires one. Return None."
            )


def _end_of_backward(task: int, waiting: _Waiting) -> None:
    """Call what still waits in the order input gradients come in: what began last comes first."""
    _waiting.pop(task, None)
    executions: list[list[tuple[BackwardListener, Visit]]] = []
    left = [one for one in waiting.visits if task in one[1].record.waiting]
    for listener, visit in sorted(left, key=lambda entry: entry[1].record.start):
        last = executions[-1][-1] if executions else None
        # Hooks of one execution of a module begin one after the other, and stay in that order.
        if (
            last is not None
            and last[1].station.module is visit.station.module
            and last[0].sequence < listener.sequence
        ):
            executions[-1].append((listener, visit))
        else:
            executions.append([(listener, visit)])
    for execution in reversed(executions):
        for listener, visit in execution:
            listener.close(visit, task)


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _read_result(
    result: Any, layout: _Layout, given: tuple[Any, ...], new: dict[Path, Any], where: str
) -> None:
    entries = _as_tuple(result)
    if len(entries) != len(layout):
        raise EditError(
            f"the backward hook at {where} returned {len(entries)} gradients for {len(layout)}. "
            "Return a tuple with one entry for each, or None to keep them."
        )
    for entry, old, path in zip(entries, given, layout, strict=True):
        if entry is old:
            continue
        if old is None:
            raise EditError(
                f"the backward hook at {where} returned a gradient where there is none. "
                "Return None in that place."
            )
        if isinstance(path, list):
            check_fit(old, entry, where)
            _read_result(entry, path, old, new, where)
        elif entry is None:
            new[path] = None
        else:
            check_fit(old, entry, where)
            new[path] = entry
