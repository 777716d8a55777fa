"""Edits as a part of compiled graphs: what the compiler traces, and who counts them when they run.

What is computed is the function that runs eagerly too. The operands are inputs of the graph, so
another session with other numbers is served by the same one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hookline import _trees
from hookline._errors import EditError
from hookline._torch import preserve_version
from hookline._tracing import is_value_product
from hookline.addresses import format_leaf
from hookline.edits.actions import Action
from hookline.edits.changes import change, why_unfit
from hookline.edits.places import limit
from hookline.hooks.ears import VisitEar
from hookline.hooks.fitting import misfit, show_shape
from hookline.hooks.hearing import (
    FAULT,
    MISSING,
    Ear,
    Gradient,
    Place,
    read_about,
    write_about,
    write_mode,
)
from hookline.hooks.nested import Silent, Walk, get, tensors
from hookline.hooks.operators import Way, announce, hook_gradient, note_change
from hookline.hooks.structures import imagine, refuse_unwritten
from hookline.hooks.visits import describe

if TYPE_CHECKING:
    from hookline.hooks.functions import FunctionListener

_SEVERAL = "several"
"""A fault: an action needs one tensor."""
_UNFIT = "unfit"
"""A fault: the shapes do not go together."""
_LIMITED = "limited"
"""A fault: rows and positions of another shape."""


class Counting(Protocol):
    """What knows how often an edit was applied."""

    def count_one(self) -> None:
        """Count one more."""


class EditEar(Ear):
    """Learn that an edit runs in a graph, and say what is wrong with it."""

    __slots__ = ("_action", "_counter", "_listener", "_visits")

    def __init__(
        self,
        device: torch.device,
        listener: FunctionListener,
        *,
        visits: VisitEar,
        action: Action,
        counter: Counting,
    ) -> None:
        super().__init__(device)
        self._listener = listener
        self._visits = visits
        self._action = action
        self._counter = counter

    def note(self, place: Place, shape: Sequence[int]) -> None:
        listener = self._listener
        if not listener.session.is_open:
            return
        problem = self._action.explain(shape, listener.address)
        if problem:
            raise EditError(problem)
        if not listener.gradients:
            visit = self._visits.visit_of(self, place)
            if visit is None or visit.is_recompute:
                return
            listener.session.note_edit(visit)
            if self._action.is_of_one_visit and visit.index:
                raise EditError(
                    f"{self._action.name} at {describe(visit, listener.address)}: which value it "
                    "is was fixed when the edit was attached, for one visit, and this is another. "
                    "Give the visit: hl.patch(got, visit=0)."
                )
        self._count()

    def _count(self) -> None:
        self._listener.met = True
        self._listener.fired += 1
        self._counter.count_one()

    def end(self) -> None:
        """Have gradients that are still to come be as they are."""
        with preserve_version(self.key), torch.no_grad():  # the graph has saved it
            self.key.fill_(-self.number)

    def take(self, tensor: Tensor, place: Place) -> Gradient | None:
        listener = self._listener
        visit = self._visits.visit_of(self, place)
        if visit is None or not listener.session.is_open or visit.is_recompute:
            return None
        if place.port == MISSING:
            text, _ = read_about(place)
            refuse_unwritten(text, describe(visit, listener.address))
            listener.no_leaf(visit, imagine(text))
        elif place.port == FAULT:
            text, about = read_about(place)
            self._refuse(text, describe(visit, listener.address), about)
        else:  # carried through a checkpointed region
            self._count()
        return None

    def _refuse(self, text: str, where: str, about: Place) -> None:
        fault, _, rest = text.partition(":")
        name = self._action.name
        if fault == _SEVERAL:
            found = [format_leaf(path) for path, _ in _trees.leaves(imagine(rest))]
            places = ", ".join(f"`{self._listener.address}{leaf}`" for leaf in found)
            raise EditError(
                f"{name} at `{self._listener.address}` needs one tensor, and there are "
                f"{len(found)}: {places or 'none'}. Name one of them."
            )
        if fault == _UNFIT:
            raise EditError(f"{name} does not fit `{self._listener.address}`: {rest}")
        if fault == _LIMITED:
            raise EditError(
                f"{name} at `{self._listener.address}` gave {rest}, so rows and positions cannot "
                "be told apart."
            )
        raise EditError(f"the edit at {where}{format_leaf(about.leaf)} {text}")


class TracedEdit:
    """One edit at one port, as far as the compiler has to know."""

    is_editing = True
    is_parting = False
    is_passing = False

    def __init__(
        self,
        key: Tensor,
        *,
        leaf: tuple[str | int, ...],
        gradients: bool,
        kind: str,
        operands: tuple[Tensor, ...],
        settings: tuple[Any, ...],
        choices: tuple[tuple[str, Tensor, int], ...],
    ) -> None:
        self.key = key
        """The key of the ear that counts."""
        self.leaf = leaf
        """The part of the value that is changed."""
        self.values = not gradients
        self.gradients = gradients
        """Whether it is the gradient that is changed."""
        self.kind = kind
        self.operands = operands
        self.settings = settings
        self.forms = tuple([form for form, _, _ in choices])
        self.chosen = tuple([chosen for _, chosen, _ in choices])
        self.dims = tuple([dim for _, _, dim in choices])

    def flow(self, port: str, value: Any, way: Way = "own", received: Any = ()) -> Any:
        """Change what is asked for in a value; give what flows on."""
        is_there, part = get(value, self.leaf)
        if not is_there:
            announce(self.key, write_about(MISSING, port, Walk(Silent(), way, []).describe(value)))
            return value
        if self.values and len(tensors(part)) != 1:
            text = Walk(Silent(), way, []).describe(part)
            announce(self.key, write_about(FAULT, port, f"{_SEVERAL}:{text}"))
            return value
        walk = Walk(self, way, list(received))
        new = walk.go(value, self.leaf, port)[0]
        return walk.hear_everywhere(new) if self.gradients else new

    def tell(self, value: Tensor, place: str, way: Way) -> Tensor:
        """Change one tensor, or its gradient; give what flows on in its place."""
        if self.gradients and not (value.requires_grad and torch.is_grad_enabled()):
            return value
        fault = self._find_fault(value)
        if fault:
            note_change(self.key, write_mode(place), list(value.shape), self.key)  # may know better
            announce(self.key, write_about(FAULT, place, fault))
            return value
        place = write_mode(place)
        if self.gradients:
            if way == "own" and is_value_product():
                way = "made"
            return edit_gradient(
                value,
                self.key,
                place,
                way,
                self.kind,
                list(self.operands),
                self.settings,
                self.forms,
                list(self.chosen),
                self.dims,
            )
        first = note_change(self.key, place, list(value.shape), self.operands[0])
        operands = [first, *self.operands[1:]]
        return _edited(
            value, self.kind, operands, self.settings, self.forms, self.chosen, self.dims
        )

    def _find_fault(self, value: Tensor) -> str:
        """Say why the edit gives nothing that can take the value's place; empty where it does."""
        for dim in self.dims:
            if not -value.dim() <= dim < value.dim():
                return f"{_LIMITED}:a tensor without dimension {dim}"
        problem = why_unfit(value, self.kind, self.operands)
        if problem:
            return f"{_UNFIT}:{problem}"
        # Nothing uses this, so that the compiler leaves it out again.
        new = change(value.detach(), self.kind, self.operands, self.settings)
        if self.forms and new.shape != value.shape:
            return f"{_LIMITED}:shape {show_shape(new.shape)} for {show_shape(value.shape)}"
        return misfit(value, new)


def _edited(
    value: Tensor,
    kind: str,
    operands: Sequence[Tensor],
    settings: Sequence[Any],
    forms: Sequence[str],
    chosen: Sequence[Tensor],
    dims: Sequence[int],
) -> Tensor:
    new = change(value, kind, operands, settings)
    return limit(value, new, list(zip(forms, chosen, dims, strict=True))) if forms else new


def edit_gradient(
    value: Tensor,
    key: Tensor,
    place: str,
    way: Way,
    kind: str,
    operands: list[Tensor],
    settings: tuple[Any, ...],
    forms: tuple[str, ...],
    chosen: list[Tensor],
    dims: tuple[int, ...],
) -> Tensor:
    """Have the gradient of a value changed when it comes; give what flows on in its place."""

    def edit(grad: Tensor) -> Tensor:
        note_change(key, place, grad.shape, key)
        new = _edited(grad, kind, operands, settings, forms, chosen, dims)
        return torch.where(key.view(()) > 0, new, grad)  # a backward may come after its end

    return hook_gradient(value, edit, way)


_is_allowed = False


def make_traced_edit(
    listener: FunctionListener,
    device: torch.device,
    *,
    visits: VisitEar,
    action: Action,
    operands: tuple[Tensor, ...],
    counter: Counting,
) -> tuple[Ear, TracedEdit]:
    """Make what the compiler traces for an edit, and who counts it; numbers go to the device."""
    global _is_allowed
    dynamo = sys.modules.get("torch._dynamo")
    if not _is_allowed and dynamo is not None:
        _is_allowed = True
        dynamo.allow_in_graph(edit_gradient)
    if action.kind in ("mask", "order"):
        operands = tuple([one.to(device) for one in operands])
    ear = EditEar(device, listener, visits=visits, action=action, counter=counter)
    if listener.gradients:
        listener.session.when_detached(ear.end)
    traced = TracedEdit(
        ear.key,
        leaf=listener.leaf,
        gradients=listener.gradients,
        kind=action.kind,
        operands=(*operands, *[one.to(device) for one in action.numbers]),
        settings=action.settings,
        choices=tuple([(form, one.to(device), dim) for form, one, dim in action.choices]),
    )
    return ear, traced
