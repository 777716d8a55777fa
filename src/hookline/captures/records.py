"""What a capture holds of one visit: values, gradients, and why a gradient is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline._errors import NotCaptured, Overwritten
from hookline._torch import at_end_of_backward, graph_task_id
from hookline._trees import Path
from hookline.addresses import (
    Inside,
    format_leaf,
    format_parameter,
    format_place,
    is_inside,
    parse_port,
)
from hookline.addresses.pattern import escape
from hookline.captures.keeping import Kept, remember_overwritten

NO_GRADIENT = {
    "grad mode off": (
        "it ran under torch.no_grad() or inference_mode",
        "run the forward with grad enabled",
    ),
    "no-grad tensor": (
        "nothing it was computed from requires grad (frozen, data or integers)",
        "call requires_grad_() on the input or on a parameter before it",
    ),
    "not reached": (
        "the backward did not reach it: the loss does not depend on it, or it was detached",
        "include it in the loss, or drop it from the sites",
    ),
    "beside a graph": (
        "it is one of several outputs of a compiled graph, which may use it itself: what arrives "
        "outside of the graph is not all of its gradient",
        'ask for the gradient of the module inside that makes it, or compiled="eager"',
    ),
    "no tensor": ("it held no tensor", "name another variable or operation"),
    "an argument": (
        "it is an argument of forward, or another name of one, and a pattern named it: a tap on "
        "it may regroup sums",
        "name it by itself, or capture with grads='all'",
    ),
    "changed view": (
        "it is a view, and its memory was changed in place afterwards, so torch made its history "
        "anew",
        "ask for the gradient of what it is a view of, or of what it became",
    ),
    "not accumulated": (
        "no `.grad` was filled: the loss does not depend on it, or its gradient came from "
        "torch.autograd.grad, which fills none",
        "call loss.backward()",
    ),
    "not reduced": (
        "it was not reduced over the ranks: the model was called in no_sync()",
        "capture the call whose gradients are reduced, or this rank's own: `:local_grad`",
    ),
    "nested backward": (
        "it came from a backward inside of another, as use_reentrant=True makes, which ends before "
        "gradients are reduced over the ranks",
        "checkpoint with use_reentrant=False, or capture this rank's own: `:local_grad`",
    ),
    "spread": (
        "it is a DTensor, whose gradient may be reduced before any hook sees it",
        "ask for `:grad`",
    ),
    "no backward": (
        "no backward reached a captured site inside the `with` block",
        "call loss.backward() inside the block, with a loss that depends on it",
    ),
    # A record cannot tell whether one was asked for, or whether a backward ran.
    "none came": (
        "none came while the capture was open",
        "capture with grads=True, call loss.backward() inside the block, and let the loss depend "
        "on it",
    ),
}


class Place(NamedTuple):
    """The module a value came from, known by name so that results do not keep it alive."""

    names: tuple[str, ...]
    """All its paths."""

    type_name: str
    """Its class."""

    module: Callable[[], nn.Module | None]
    """A weak reference to it."""


class VisitRecord:
    """One visit of one module, as it was captured."""

    __slots__ = (
        "__weakref__",
        "aside",
        "call",
        "coming",
        "grads",
        "kept",
        "module",
        "names",
        "reasons",
        "spellings",
        "trees",
        "type_name",
        "visit",
    )

    def __init__(self, place: Place, call: int, visit: int) -> None:
        self.names = place.names
        self.type_name = place.type_name
        self.module = place.module
        self.call = call
        self.visit = visit
        self.aside: tuple[Any, dict[Path, Kept]] | None = None
        """The arguments, where they were not asked for but kept aside."""
        self.trees: dict[tuple[str, Path], Any] = {}
        """What was captured at (port, leaf): a tree of tensors and plain values."""
        self.kept: dict[tuple[str, Path], Kept] = {}
        """Each tensor in those trees, by its full path."""
        self.grads: dict[tuple[str, Path], dict[int, Kept]] = {}
        """The gradients of each tensor, by backward pass."""
        self.coming: list[tuple[str, Kept, Kept]] = []
        """Gradients on their way from a device: the port, the value, and the gradient."""
        self.spellings: dict[tuple[str, Path], Path] = {}
        """Leaves that were asked for by position, as the value itself spells them."""
        self.reasons: dict[tuple[str, Path | None], str] = {}
        """Why tensors of a port can have no gradient."""

    @property
    def path(self) -> str:
        return self.names[0]

    def address(self, port: str, leaf: Path = (), *, is_grad: bool = False) -> str:
        if is_inside(port) and self.is_alone(port):
            port = str(parse_port(port)._replace(number=None))
        return format_place(escape(self.path), port, leaf, is_grad=is_grad)

    def is_alone(self, port: str) -> bool:
        """Tell whether a variable or operation has the first value only in this visit."""
        inside = parse_port(port)
        spot = inside._replace(number=None)
        return inside.number == 0 and all(
            other == port or parse_port(other)._replace(number=None) != spot
            for other, _ in (*self.trees, *self.grads)
            if is_inside(other)
        )

    def holds(self, port: str) -> bool:
        """Tell whether a value of a port is there, whole or in part."""
        return any(where == port for where, _ in self.trees)

    def has_gradient(self, port: str) -> bool:
        """Tell whether a gradient of a port is there."""
        return any(where == port for where, _ in self.grads)

    def ports_at(self, inside: Inside) -> list[str]:
        """List the ports of a variable or operation that were captured, in order."""
        spot = inside._replace(number=None)
        found = {
            other: parse_port(other)
            for other, _ in (*self.trees, *self.grads)
            if is_inside(other) and parse_port(other)._replace(number=None) == spot
        }
        return sorted(found, key=lambda port: found[port].number or 0)

    def add_gradient(self, port: str, leaf: Path, task: int, kept: Kept) -> None:
        """Take in a gradient, and show it as `.grad` of the value it belongs to."""
        passes = self.grads.setdefault((port, leaf), {})
        passes[task] = kept
        value = self.kept.get((port, leaf))
        if value is None:
            return
        if kept.transfer is None:
            show_gradient(value, kept.tensor)
            return
        self.coming.append((port, value, kept))
        if value.is_read:  # somebody looks at the value's `.grad` without asking here again
            once_backward_ends(partial(self._await_gradients, port))

    def _await_gradients(self, port: str) -> None:
        """Show the gradients of a port that were on their way."""
        for _ in range(len(self.coming)):
            one = self.coming.pop(0)
            if one[0] == port:
                show_gradient(one[1], one[2].arrive())
            else:
                self.coming.append(one)

    def value(self, port: str, leaf: Path) -> Any:
        """Give a captured value; raise if it is not there or no longer what flowed."""
        if port == "input" and self.aside is not None:  # somebody asks what went in
            (tree, held), self.aside = self.aside, None
            self.trees.setdefault((port, ()), tree)
            self.kept.update({(port, path): kept for path, kept in held.items()})
        leaf = self.spellings.get((port, leaf), leaf)
        for depth in range(len(leaf) + 1):
            tree = self.trees.get((port, leaf[:depth]), self)
            if tree is self:
                continue
            try:
                found = _trees.get(tree, leaf[depth:])
                spelled = (*leaf[:depth], *_trees.canonical(tree, leaf[depth:]))
            except _trees.NoSuchLeaf:
                there = [f"`{format_leaf(p)}`" for p, _ in _trees.leaves(tree) if p]
                raise NotCaptured(
                    f"`{self.address(port, leaf)}`: this value has no such leaf. "
                    f"It has: {', '.join(there) or 'one tensor'}."
                ) from None
            self._check_whole(port, spelled)
            return found
        parts = [self.address(p, path) for p, path in self.trees]
        raise NotCaptured(
            f"`{self.address(port, leaf)}` was not captured; of this module there is: "
            f"{', '.join(f'`{part}`' for part in parts) or 'nothing'}. "
            f"Name it in hl.capture(model, '{self.address(port, leaf)}')"
            + (", or pass inputs=True." if port == "input" and not leaf else ".")
        )

    def _check_whole(self, port: str, leaf: Path) -> None:
        if self.coming:
            self._await_gradients(port)
        for (where, path), kept in self.kept.items():
            if where != port or path[: len(leaf)] != leaf:
                continue
            kept.arrive()
            kept.is_read = True
            if kept.is_overwritten:
                self.remember_overwritten()
                raise Overwritten(
                    f"`{self.address(port, path)}` (call {self.call}, visit {self.visit}) was "
                    "changed in place after it flowed, so the value is lost. Capture it again: "
                    "hookline copies it there from now on (or pass clone=True)."
                )

    def remember_overwritten(self) -> None:
        """Have all that is lost of this visit copied in later captures."""
        for (port, _), kept in self.kept.items():
            if kept.is_overwritten:
                remember_overwritten(self.module(), port)

    def gradient(self, port: str, leaf: Path, backward: int | None = None) -> Any:
        """Give the captured gradient of a value, in the value's structure."""
        leaf = self._first_place(port, self.spellings.get((port, leaf), leaf))
        if (port, leaf) in self.grads:
            return self._sum(port, leaf, backward)
        paths = [p for where, p in self.grads if where == port and p[: len(leaf)] == leaf]
        tree = self.trees.get((port, ()), self)
        if tree is not self:
            try:
                inner, leaf = _trees.get(tree, leaf), _trees.canonical(tree, leaf)
            except _trees.NoSuchLeaf:
                raise NotCaptured(
                    f"`{self.address(port, leaf)}`: this value has no such leaf."
                ) from None
            paths = [p for where, p in self.grads if where == port and p[: len(leaf)] == leaf]
            if paths:
                return _trees.map_tensors(
                    inner,
                    lambda path, _: self._sum_or_none(port, (*leaf, *path), backward),
                )
        if not paths:
            what, fix = NO_GRADIENT[self.why_no_gradient(port)]
            raise NotCaptured(
                f"`{self.address(port, leaf, is_grad=True)}` has no gradient: {what}. "
                f"To get one: {fix}."
            )
        nested: dict[Any, Any] = {}
        for path in paths:
            place = nested
            for key in path[len(leaf) : -1]:
                place = place.setdefault(key, {})
            place[path[-1]] = self._sum(port, path, backward)
        return nested

    def leaf_gradients(self, port: str) -> Iterator[tuple[Path, bool]]:
        """Yield each leaf of a nested value that may have a gradient, and whether it has."""
        for where, leaf in self.kept:
            if where == port and leaf and (port, leaf) not in self.reasons:
                yield leaf, (port, self._first_place(port, leaf)) in self.grads

    def why_no_gradient(self, port: str) -> str:
        """Give the key of the reason why this port has no gradient."""
        found = [reason for (where, _), reason in self.reasons.items() if where == port]
        return found[0] if found else "none came"

    def _first_place(self, port: str, leaf: Path) -> Path:
        """Give the place under which the gradient of a tensor that stands in several is known."""
        kept = self.kept.get((port, leaf))
        if kept is None or (port, leaf) in self.grads:
            return leaf
        same = (p for (where, p), other in self.kept.items() if where == port and other is kept)
        return next((path for path in same if (port, path) in self.grads), leaf)

    def _sum_or_none(self, port: str, path: Path, backward: int | None) -> Tensor | None:
        path = self._first_place(port, path)
        return self._sum(port, path, backward) if (port, path) in self.grads else None

    def _sum(self, port: str, path: Path, backward: int | None) -> Tensor:
        passes = list(self.grads[port, path].values())
        if backward is not None:
            passes = passes[backward : backward + 1] if backward >= 0 else passes[backward:][:1]
            if not passes:
                raise NotCaptured(
                    f"`{self.address(port, path, is_grad=True)}`: there is no backward {backward}; "
                    f"{len(self.grads[port, path])} came through."
                )
        for kept in passes:
            if kept.is_overwritten:
                raise Overwritten(
                    f"`{self.address(port, path, is_grad=True)}` was changed in place after it "
                    "flowed. Capture with clone=True."
                )
        total = passes[0].arrive()
        for kept in passes[1:]:
            total = total + kept.arrive()
        return total


def show_gradient(value: Kept, grad: Tensor) -> None:
    """Show a gradient as `.grad` of the captured tensor; several passes add up as on any tensor."""
    tensor = value.arrive()
    if value.is_in_graph and tensor.is_leaf:
        return  # autograd fills it itself
    if tensor.shape == grad.shape and tensor.dtype == grad.dtype:
        held = tensor.grad
        tensor.grad = grad if held is None else held + grad


def once_backward_ends(call: Callable[[], object]) -> None:
    """Call this when the backward pass that runs now has ended, or at once where none runs."""
    if graph_task_id() == -1:
        call()
    else:
        at_end_of_backward(call)


class ParameterRecord:
    """One parameter in one call: its value when the call began, its gradients afterwards."""

    __slots__ = ("__weakref__", "grad", "local_grad", "names", "reason", "value")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.value: Kept | None = None
        self.grad: Kept | None = None
        self.local_grad: Kept | None = None
        """What this rank alone computed of it."""
        self.reason = ""
        """Why there is no gradient though backward came by."""

    def add_local(self, kept: Kept) -> None:
        """Take what one backward computed on this rank; several of one call add up."""
        if self.local_grad is None:
            self.local_grad = kept
        else:
            with torch.no_grad():
                self.local_grad = Kept(self.local_grad.arrive() + kept.arrive())

    def read(self, *, is_grad: bool = False, is_local: bool = False) -> Tensor:
        """Give the value or a gradient; raise if it is not there."""
        kept = self.local_grad if is_local else self.grad if is_grad else self.value
        address = format_parameter(self.names[0], is_grad=is_grad, is_local=is_local)
        if kept is None:
            if is_grad and not is_local and self.reason:
                what, fix = NO_GRADIENT[self.reason]
                raise NotCaptured(f"`{address}` has no gradient: {what}. To get one: {fix}.")
            raise NotCaptured(
                f"`{address}` was not captured in this call."
                + (
                    " Parameter gradients come with backward(); torch.autograd.grad fills none."
                    if is_grad
                    else ""
                )
            )
        if kept.is_overwritten:
            raise Overwritten(
                f"`{address}` was changed in place after it was captured. Pass clone=True."
            )
        kept.is_read = True
        if self.grad is not None:  # it may be the value's `.grad`
            self.grad.arrive()
        return kept.arrive()
