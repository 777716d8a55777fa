"""The listeners of a capture: they keep what flows by and change nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline._errors import NoSuchSite, OutOfMemory, UnsupportedModel
from hookline._torch import is_functorch_active
from hookline._trees import Path
from hookline.addresses import Site, format_leaf
from hookline.captures.delivered import put_structure, put_tensor
from hookline.captures.foreseeing import may_change
from hookline.captures.keeping import Keeper, Kept, has_overwritten, was_overwritten
from hookline.captures.records import Place, VisitRecord, once_backward_ends
from hookline.captures.shortage import explain_shortage, is_out_of_memory
from hookline.hooks.arguments import bind
from hookline.hooks.compiler_notes import CompilerNotes
from hookline.hooks.ears import ListenerEar, VisitEar
from hookline.hooks.functions import Which, is_among
from hookline.hooks.hearing import FAULT, MISSING, REASON, SHAPE, Ear
from hookline.hooks.hearing import Place as Delivered
from hookline.hooks.parameters import ParameterListener
from hookline.hooks.sessions import Session
from hookline.hooks.structures import imagine, refuse_unwritten, unwritten_key
from hookline.hooks.traced import TracedEar
from hookline.hooks.variables import log_value
from hookline.hooks.visits import At, Call, Listener, LogEntry, Station, Visit, describe

if TYPE_CHECKING:
    from hookline.captures.captured import Captured


class CaptureSession(Session):
    """A session that knows where its listeners keep things, and when it has seen enough."""

    keeper: Keeper
    captured: weakref.ref[Captured]
    visits: Which = None
    which_calls: Which = None
    copies: bool = False
    """Whether values are copied, as asked or because the model has in-place modules."""
    copies_overwritten: bool = False
    """Whether values are copied where one was found overwritten before."""
    log: list[LogEntry] | None = None
    """Where plain outputs are noted; None when something is asked that takes more."""
    left_out: Sequence[Site] = ()
    """What a pattern met and cannot be captured."""
    grads: bool | str = False
    """Whether gradients are kept; `all` also those that take a tap on what comes in."""
    awaited: dict[CaptureListener, set[int]] | None = None
    """What has to flow by before the forward may stop; None when it runs to its end."""
    compiler: CompilerNotes
    """What the compiler does meanwhile."""
    saw_backward: bool = False
    is_plain: bool = False
    """Whether tensors are kept whole, detached, from all visits and calls."""

    def reset(self, captured: Captured) -> None:
        """Begin anew: results go to `captured`, and nothing was seen yet."""
        self.captured = weakref.ref(captured)
        self.log = captured.log if self.is_plain else None
        self.copies_overwritten = (
            self.keeper.clone == "auto" and not self.keeper.keep_graph and has_overwritten()
        )
        self.compiler = CompilerNotes([] if self.tree is None else [self.tree.model])
        self.saw_backward = False
        self.other_thread_calls = 0
        for listener in self.listeners:
            if isinstance(listener, CaptureListener):  # others wait for a lazy parameter
                listener.reset(self)
        for parameter in self.parameters:
            parameter.fired = 0
            parameter.reason = ""

    def close(self) -> None:
        super().close()
        self.keeper.rest()
        self.log = None
        for listener in self.listeners:
            if isinstance(listener, CaptureListener):
                listener.log = None  # a graph that lives on must not keep the results

    def record(self, visit: Visit, place: Place) -> VisitRecord | None:
        """Give the record of a visit; None when nobody holds the results any more."""
        captured = self.captured()
        if captured is None:
            return None
        if captured.log:
            captured.calls  # noqa: B018  puts the log in order first
        assert visit.index is not None
        return captured.record(place, visit.call.index, visit.index)

    def keep(
        self, tensor: Tensor, where: Callable[[], str], *, copy: bool, alias: bool = True
    ) -> Kept:
        """Keep one tensor as the options say; let go of all where memory runs out."""
        try:
            return self.keeper.keep(tensor, where, copy=copy, alias=alias)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            captured = self.captured()
            held = 0 if captured is None else captured.nbytes
            to_host = self.keeper.is_for_host
            text = explain_shortage(error, tensor, where=where(), held=held, to_host=to_host)
            if captured is not None:
                captured.clear()
                captured.index.lost = text
            # No name for the error: it would hold this frame, and with it the tensor, in a cycle.
            raise OutOfMemory(text) from error

    def wants(self, visit: Visit) -> bool:
        """Tell whether a visit is one of those asked for."""
        if self.visits is None and self.which_calls is None:
            return True
        return is_among(visit.index, self.visits) and is_among(visit.call.index, self.which_calls)


class StopForward(BaseException):
    """Leave a forward whose rest is not needed; the capture that raised it catches it."""

    def __init__(self, owner: Session) -> None:
        super().__init__("hookline has captured what it was asked for and stopped the forward")
        self.owner = owner


class CaptureListener(Listener):
    """Keep values and gradients of one port, or of one leaf of it."""

    __slots__ = (
        "copy",
        "grad_reasons",
        "heard",
        "is_exact",
        "is_fleeting",
        "missed_leaf",
        "received",
    )

    hears_missing = False

    session: CaptureSession

    def __init__(
        self, session: CaptureSession, station: Station, site: Site, *, stage: int
    ) -> None:
        super().__init__(
            session, station, site.port, site.leaf, values=False, gradients=False, stage=stage
        )
        self.is_exact = site.is_exact
        module = station.module
        self.is_fleeting = self.inside is not None and may_change(module, self.inside)
        """Whether the forward it is in changes something in place."""
        self.place = Place(site.names, type(module).__name__, weakref.ref(module))
        self.grad_reasons: dict[str, int] = {}

    def reset(self, session: CaptureSession) -> None:
        """Begin anew, for another `with`; the session calls it before it opens."""
        self.fired = 0
        self.received = 0
        """How many gradients were kept."""
        if self.grad_reasons:
            self.grad_reasons = {}
        self.missed_leaf = 0
        self.most_seen = -1
        self.heard = False
        """Whether a value came by, so that a gradient could have come."""
        foresees = session.keeper.clone == "auto" and not session.keeper.keep_graph
        self.copy = (
            session.copies
            or (self.is_fleeting and foresees)
            or (session.copies_overwritten and was_overwritten(self.station.module, self.port))
        )
        is_plain = not self.copy and not self.leaf and self.port != "input"
        self.taps_arguments = self.is_exact or session.grads == "all"
        self.log = session.log if is_plain else None

    def may_hear(self) -> None:
        self.heard = True

    def where(self) -> str:
        """Give the address, for an error."""
        return self.address

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not visit.is_recompute and self.session.wants(visit):
            self._keep(visit, bind(module, args, kwargs))
        return args, kwargs

    def on_output(
        self,
        visit: Visit,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        if visit.is_recompute:
            return output
        if visit.index is not None and self.note(visit.call, visit.index, output):
            return output
        if self.session.wants(visit):
            self._keep(visit, output)
        return output

    def on_value(self, visit: Visit, module: nn.Module, port: str, value: Any) -> Any:
        if visit.is_recompute:
            return value
        if visit.index is not None and log_value(self, visit.call.index, visit.index, port, value):
            return value
        if self.session.wants(visit):
            self._keep(visit, value, port)
        return value

    def note(self, call: Call, index: int, output: Any) -> bool:
        log = self.log
        if log is None or type(output) is not Tensor or is_special(output):
            return False
        value = output.detach()
        log.append((self.place, call.index, index, value, value._version, None, "output"))
        self.fired += 1
        return True

    def _keep(self, visit: Visit, tree: Any, port: str | None = None) -> None:
        port = port or self.port
        record = self.session.record(visit, self.place)
        if record is None:
            return
        leaf = self.leaf
        if leaf:
            try:
                leaf = _trees.canonical(tree, leaf)
                tree = _trees.get(tree, leaf)
                if leaf != self.leaf:
                    record.spellings[port, self.leaf] = leaf
            except _trees.NoSuchLeaf:
                self.no_leaf(visit, tree)
                return
        if isinstance(tree, Tensor):
            kept = self.session.keep(tree, self.where, copy=self.copy)
            record.kept[port, leaf] = kept
            record.trees[port, leaf] = kept.tensor
        else:
            if self.inside is None and hasattr(tree, "send") and hasattr(tree, "throw"):
                _refuse_lazy(tree, describe(visit, self.address))
            seen: dict[int, Kept] = {}

            def keep(path: Path, tensor: Tensor) -> Tensor:
                kept = seen.get(id(tensor))
                if kept is None:
                    where = partial(record.address, port, path)
                    kept = self.session.keep(tensor, where, copy=self.copy)
                    seen[id(tensor)] = kept
                record.kept[port, path] = kept
                return kept.tensor

            record.trees[port, leaf] = _trees.freeze(tree, keep, leaf)
        self.fired += 1
        is_one_of_many = self.inside is not None and self.inside.number is None
        if self.session.awaited is not None and not is_one_of_many:
            self._stop_when_enough(visit)

    def on_leave(self, visit: Visit) -> None:
        if self.fired and self.session.awaited is not None:
            self._stop_when_enough(visit)

    def _stop_when_enough(self, visit: Visit) -> None:
        awaited = self.session.awaited
        assert awaited is not None
        left = awaited.get(self)
        if left is not None:
            left.discard(visit.index or 0)
            if not left or self.session.visits is None:
                del awaited[self]
        if not awaited:
            raise StopForward(self.session)

    def on_gradient(
        self, visit: Visit, port: str, leaf: Path, grad: Tensor | None, task: int
    ) -> Tensor | None:
        session = self.session
        if grad is None or not session.wants(visit):
            return grad
        captured = session.captured()
        if captured is None:
            return grad
        self.received += 1
        session.saw_backward = True
        # The gradient itself, no alias: autograd makes one with a single owner the .grad of a leaf,
        # and adds later ones to it in place.
        flowed = grad.detach() if grad.requires_grad else grad
        log = self.log
        if log is not None and not leaf and not captured.is_read and not is_special(grad):
            assert visit.index is not None
            call = visit.call.index
            log.append((self.place, call, visit.index, flowed, flowed._version, task, port))
            return grad
        record = session.record(visit, self.place)
        if record is not None:
            where = partial(record.address, port, leaf, is_grad=True)
            copy = session.keeper.clone is True
            kept = session.keep(flowed, where, copy=copy, alias=False)
            record.add_gradient(port, leaf, task, kept)
        return grad

    def make_ear(
        self, device: torch.device, visits: VisitEar | None
    ) -> tuple[Ear | None, TracedEar]:
        assert visits is not None
        if self.session.keeper.keep_graph:
            raise UnsupportedModel(
                f"hl.capture: keep_graph=True at `{self.address}`: a value inside a graph that "
                "torch.compile made has no autograd history of its own. "
                'Ask for the model to be run eagerly: compiled="eager"'
            )
        ear = ListenerEar(device, self, visits)
        traced = TracedEar(ear.key, leaf=self.leaf, values=self.values, gradients=self.gradients)
        return ear, traced

    def on_delivery(self, visit: Visit, place: Delivered, value: Tensor) -> None:
        self.heard = True
        record = self.session.record(visit, self.place) if self.session.wants(visit) else None
        if record is None:
            return
        port, leaf = place.port, place.leaf
        kept = self.session.keep(value, partial(record.address, port, leaf), copy=True)
        put_tensor(record, port, leaf, kept, asked=self.leaf)
        self.fired += 1
        if len(leaf) == len(self.leaf):
            self._settle_delivery(visit)

    def on_remark(self, visit: Visit, what: str, text: str, place: Delivered) -> None:
        if what == FAULT:
            raise unwritten_key(text, describe(visit, self.address))
        if what == MISSING:
            if self.is_exact:
                refuse_unwritten(text, describe(visit, self.address))
            self.no_leaf(visit, imagine(text))
        elif what == REASON:
            self.no_gradient(visit, place.port, place.leaf, text)
        elif what == SHAPE:
            self.heard = True
            record = self.session.record(visit, self.place) if self.session.wants(visit) else None
            if record is not None:
                put_structure(record, place.port, place.leaf, text, asked=self.leaf)
                self.fired += 1
                self._settle_delivery(visit)

    def _settle_delivery(self, visit: Visit) -> None:
        """Stop the forward if all that was asked for is there."""
        is_one_of_many = self.inside is not None and self.inside.number is None
        if self.session.awaited is not None and not is_one_of_many:
            self._stop_when_enough(visit)

    def on_delivered_gradient(
        self, visit: Visit, place: Delivered, grad: Tensor, task: int
    ) -> None:
        if not self.session.wants(visit):
            return
        record = self.session.record(visit, self.place)
        if record is not None:
            self.received += 1
            self.session.saw_backward = True
            port, leaf = place.port, place.leaf
            where = partial(record.address, port, leaf, is_grad=True)
            kept = self.session.keep(grad, where, copy=True)
            record.add_gradient(port, leaf, task, kept)

    def no_gradient(self, visit: Visit, port: str, leaf: Path | None, reason: str) -> None:
        self.grad_reasons[reason] = self.grad_reasons.get(reason, 0) + 1
        if self.values and visit.index is not None and self.session.wants(visit):
            record = self.session.record(visit, self.place)
            if record is not None:
                record.reasons[port, leaf] = reason

    def no_leaf(self, visit: Visit, tree: Any) -> None:
        self.missed_leaf += 1
        if self.is_exact and (self.port == "output" or self.inside is not None):
            there = [format_leaf(path) or "the value itself" for path, _ in _trees.leaves(tree)]
            raise NoSuchSite(
                f"{describe(visit, self.address)}: there is no `{format_leaf(self.leaf)}` in it. "
                f"Tensors there: {', '.join(there) or 'none'}."
            )


class AsideListener(Listener):
    """Keep the arguments of a module aside, for somebody who asks what went in."""

    __slots__ = ("output",)

    session: CaptureSession

    def __init__(self, session: CaptureSession, output: CaptureListener) -> None:
        super().__init__(
            session, output.station, "input", values=True, gradients=False, stage=output.stage
        )
        self.output = output

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        captured = self.session.captured()
        if captured is None or visit.is_recompute or visit.index is None:
            return args, kwargs
        held: dict[Path, Kept] = {}
        output = self.output

        def keep(path: Path, tensor: Tensor) -> Tensor:
            kept = self.session.keep(tensor, output.where, copy=output.copy)
            held[path] = kept
            return kept.tensor

        tree = _trees.freeze(bind(module, args, kwargs), keep)
        captured.aside[output.place.names[0], visit.call.index, visit.index] = (tree, held)
        return args, kwargs

    def make_ear(self, device: torch.device, visits: VisitEar | None) -> tuple[None, None]:
        # In a graph nothing can be kept aside for nothing: what comes in is asked for or not.
        return None, None


def is_special(tensor: Tensor) -> bool:
    """Tell whether a tensor needs care before it can be kept."""
    return tensor.is_inference() or is_functorch_active() or tensor.is_cuda


def _refuse_lazy(tree: Any, where: str) -> None:
    raise UnsupportedModel(
        f"{where} returned a {type(tree).__name__}, whose body has not run yet: there is no "
        "value to capture. Attach to the modules it calls."
    )


class ParameterCapture(ParameterListener):
    """Keep a parameter's value when a call begins, or its gradient when it is there."""

    session: CaptureSession

    def __init__(self, session: CaptureSession, site: Site, *, stage: int) -> None:
        super().__init__(session, site, lambda value, at: None, stage=stage)

    def on_value(self, visit: Visit, parameter: Tensor, at: At) -> None:
        # An optimizer writes to parameters in place; without grad nothing does.
        written = parameter.requires_grad and torch.is_grad_enabled()
        self._keep(visit, parameter.detach(), copy=written)

    def on_grad(self, visit: Visit, grad: Tensor, at: At) -> None:
        self._keep(visit, grad.detach(), copy=True)

    def no_grad(self, visit: Visit, reason: str) -> None:
        super().no_grad(visit, reason)
        captured = self.session.captured()
        if captured is not None and is_among(visit.call.index, self.session.which_calls):
            captured.parameter(visit.call.index, self.site.names).reason = reason

    def _keep(self, visit: Visit, value: Tensor, *, copy: bool) -> None:
        captured = self.session.captured()
        if captured is None or not is_among(visit.call.index, self.session.which_calls):
            return
        clone = self.session.keeper.clone
        copy = copy if clone == "auto" else clone
        with torch.no_grad():
            kept = self.session.keep(value, lambda: self.address, copy=copy)
        record = captured.parameter(visit.call.index, self.site.names)
        if self.site.is_local:
            self.session.saw_backward = True
            record.add_local(kept)
        elif self.site.is_grad:
            self.session.saw_backward = True
            record.grad = kept
            if record.value is not None and record.value.tensor.shape == kept.tensor.shape:
                record.value.tensor.grad = kept.tensor
                if record.value.is_read:
                    once_backward_ends(kept.arrive)
        else:
            record.value = kept
