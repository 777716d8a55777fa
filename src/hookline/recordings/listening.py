"""What listens at the border of each module and tells a course."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline._errors import UnsupportedModel
from hookline._torch import is_functorch_active, is_tracing
from hookline._trees import Path
from hookline.hooks.arguments import bind, unbind
from hookline.hooks.ears import VisitEar
from hookline.hooks.hearing import Place
from hookline.hooks.sessions import Session
from hookline.hooks.traced import TracedEar
from hookline.hooks.visits import Listener, Station, Visit
from hookline.recordings.course import Course, Passage, Post
from hookline.recordings.hearing import hear
from hookline.recordings.inside_graphs import TraceEar
from hookline.recordings.unusual import find_obstacle

Change = Callable[[Tensor, int], Tensor]
"""What gives another tensor for one that flows by, the same whenever the number is the same."""


class TraceListener(Listener):
    """Tell a course what comes into a module, or what goes out of it, and the gradients."""

    __slots__ = ("change", "course", "guard", "has_gradients", "post")

    hears_missing = False

    def __init__(
        self,
        session: Session,
        station: Station,
        port: str,
        post: Post,
        course: Course,
        *,
        gradients: bool = True,
        taps: bool = False,
        change: Change | None = None,
        guard: Callable[[Exception], None] | None = None,
    ) -> None:
        super().__init__(session, station, port, values=True, gradients=taps, stage=2)
        self.post = post
        self.course = course
        self.has_gradients = gradients
        """Whether the gradients of values are told."""
        self.change = change
        """What float values are exchanged for: those the model gets, those that modules make."""
        self.guard = guard
        """What takes an error in here; None: it is raised."""

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if is_functorch_active() or is_tracing():
            return args, kwargs
        try:
            if not self.hears(visit):
                return args, kwargs
            if self._is_plain(visit, args, kwargs):
                passage = self.course.enter(self.post, visit)
                self._take_one(passage, self.station.argument_path(args), args[0], None)
                return args, kwargs
            bound = bind(module, args, kwargs)
            if visit.is_recompute:
                self._repeat(visit, bound, None)
                return args, kwargs
            passage = self.course.enter(self.post, visit)
            if self.change is not None and self.station.is_root:
                bound = self._exchange(passage, bound)
                args, kwargs = unbind(module, bound, args, kwargs)
            self._take(passage, bound, None)
        except Exception as error:
            self._fail(error)
        return args, kwargs

    def _is_plain(self, visit: Visit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a call has one tensor and nothing else to be thought of: the short way."""
        return (
            len(args) == 1
            and not kwargs
            and isinstance(args[0], Tensor)
            and not visit.is_recompute
            and (self.change is None or not self.station.is_root)
        )

    def on_output(
        self,
        visit: Visit,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        if is_functorch_active() or is_tracing():
            return output
        try:
            if visit.is_recompute:
                if self.change is not None:
                    output = self._exchange_again(visit, output)
                self._repeat(visit, output, module)
                return output
            passage = self.course.leave(visit)
            if passage is not None:
                if self.change is not None:
                    output = self._exchange(passage, output)
                if type(output) is not Tensor and self.session.begins_graph(self.station):
                    # Of a gradient only what comes from outside arrives here, and not what the
                    # graph itself makes of one output for another.
                    self._take_values(passage, output)
                else:
                    self._take(passage, output, module)
                self.course.end(passage)
        except Exception as error:
            self._fail(error)
        return output

    def hears(self, visit: Visit) -> bool:
        """Tell whether what happens in a visit is told."""
        return True

    def on_raise(self, visit: Visit) -> None:
        if not visit.is_recompute:
            passage = self.course.leave(visit)
            if passage is not None:
                passage.given.clear()

    def on_gradient(
        self, visit: Visit, port: str, leaf: Path, grad: Tensor | None, task: int
    ) -> Tensor | None:
        """Take the part of a gradient that came through the tap on an input."""
        passage: Passage | None = visit.record
        number = None if passage is None else passage.sites.get((port, leaf))
        if grad is not None and number is not None and not is_functorch_active():
            try:
                self.course.gradient(number, grad, is_part=True)
            except Exception as error:
                self._fail(error)
        return grad

    def on_total(self, site: int, grad: Tensor) -> None:
        """Take the gradient of a value, all parts together."""
        if not is_functorch_active():
            try:
                self.course.gradient(site, grad)
            except Exception as error:
                self._fail(error)

    # Inside of compiled graphs.

    @property
    def hears_begin(self) -> bool:  # type: ignore[override]
        """Whether it is told that an execution begins: one of the two at a module is enough."""
        return self.port == "input"

    @property
    def asks_gradients(self) -> bool:
        """Whether it asks a graph for gradients: of outputs, and of its part in those of inputs."""
        return self.gradients if self.port == "input" else self.has_gradients

    def make_ear(self, device: torch.device, visits: VisitEar | None) -> tuple[TraceEar, TracedEar]:
        if self.change is not None:
            raise UnsupportedModel("values inside of compiled graphs cannot be moved by rounding")
        assert visits is not None
        ear = TraceEar(device, self, visits)
        return ear, TracedEar(ear.key, gradients=self.asks_gradients)

    def on_begin(self, visit: Visit) -> None:
        if visit.is_recompute or self.port != "input":
            return
        try:
            if self.hears(visit):
                self.course.begin_inside(self.post, visit)
        except Exception as error:
            self._fail(error)

    def on_delivery(self, visit: Visit, place: Place, value: Tensor) -> None:
        passage: Passage | None = visit.record
        if passage is None or not self.post.is_wanted:
            return
        try:
            # An alias: what lies in this memory next may come in the very same object.
            self.course.value_inside(passage, place.port, place.leaf, value.detach())
        except Exception as error:
            self._fail(error)

    def on_delivered_total(self, site: int, grad: Tensor) -> None:
        """Take a gradient from a compiled graph; what comes of an input is this module's part."""
        try:
            self.course.gradient(site, grad, is_part=self.port == "input")
        except Exception as error:
            self._fail(error)

    def _take(self, passage: Passage, tree: Any, module: nn.Module | None) -> None:
        if type(tree) is Tensor:
            self._take_one(passage, (), tree, module)
        else:
            for leaf, tensor in _trees.leaves(tree):
                self._take_one(passage, leaf, tensor, module)

    def _take_values(self, passage: Passage, tree: Any) -> None:
        for leaf, tensor in _trees.leaves(tree) if self.post.is_wanted else ():
            self.course.value_inside(passage, self.port, leaf, tensor)

    def _take_one(
        self, passage: Passage, leaf: Path, tensor: Tensor, module: nn.Module | None
    ) -> None:
        if not self.post.is_wanted:
            return
        number, is_heard = self.course.value(passage, self.port, leaf, tensor)
        if self.port == "input":
            self.course.note_given(passage, leaf, tensor)
        if self.has_gradients and not is_heard and tensor.requires_grad and torch.is_grad_enabled():
            self._hear(number, tensor, module)

    def _hear(self, number: int, tensor: Tensor, module: nn.Module | None) -> None:
        """Hear of the gradient of a value, which is that of the site where it was met first."""
        first = self.course.first_of(number)
        if first not in self.course.has_gradient and hear(self, first, tensor, module):
            self.course.has_gradient.add(first)

    def _repeat(self, visit: Visit, tree: Any, module: nn.Module | None) -> None:
        """Hear of gradients in a recompute, where the first pass ran without grad."""
        passage: Passage | None = None if visit.original is None else visit.original.record
        if passage is None or not self.has_gradients or not torch.is_grad_enabled():
            return
        for leaf, tensor in _trees.leaves(tree):
            number = passage.sites.get((self.port, leaf))
            if number is not None and tensor.requires_grad:
                self._hear(number, tensor, module)

    def _exchange(self, passage: Passage, tree: Any) -> Any:
        """Put changed tensors in the place of those that were not met before."""
        assert self.change is not None
        swaps: dict[int, Tensor] = {}
        for leaf, one in _trees.leaves(tree):
            if not one.is_floating_point() or find_obstacle(one) is not None:
                continue
            if not self.course.is_known(one):
                number = passage.changes[leaf] = self.course.count_change()
                swaps[id(one)] = self.change(one, number)
        return _trees.replace_tensors(tree, swaps) if swaps else tree

    def _exchange_again(self, visit: Visit, tree: Any) -> Any:
        """Change in a recompute what was changed before, and alike: it must lead to the same."""
        assert self.change is not None
        passage: Passage | None = None if visit.original is None else visit.original.record
        changes = {} if passage is None else passage.changes
        swaps = {
            id(one): self.change(one, changes[leaf])
            for leaf, one in _trees.leaves(tree)
            if leaf in changes
        }
        return _trees.replace_tensors(tree, swaps) if swaps else tree

    def _fail(self, error: Exception) -> None:
        if self.guard is None:
            raise error
        self.guard(error)
