"""The listeners of a watch: they measure what flows by and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline._torch import find_values, graph_task_id, is_functorch_active, is_nested, is_tracing
from hookline._trees import Path
from hookline.addresses import Site, format_place
from hookline.addresses.pattern import escape
from hookline.hooks import checkpoints
from hookline.hooks.arguments import bind
from hookline.hooks.ears import VisitEar
from hookline.hooks.hearing import Place
from hookline.hooks.sessions import Session
from hookline.hooks.structures import PLAIN_KEYS
from hookline.hooks.traced import TracedEar
from hookline.hooks.visits import LightEar, Listener, Station, Visit
from hookline.runs import SiteFacts
from hookline.watchers.describing import source_of
from hookline.watchers.passing import GRAD, WatchEar
from hookline.watchers.swift_ears import make_swift_ear
from hookline.watchers.units import choose_probe

if TYPE_CHECKING:
    from hookline.watchers.recording import Recorder

_WHY_NOT = (
    "its gradient cannot be told without changing the model's: the value is a leaf, or a view that "
    "is changed in place and shares its memory"
)


_OUTPUT = ("output", (), False)
"""What an output is known by that is one tensor."""

_NOT_WHOLE = (
    "it is one of several outputs of a compiled graph, which may use it itself: what arrives "
    "outside is not all of its gradient"
)

_TRANSFORMED = (
    "calls inside of `torch.func` (vmap, grad, jvp) are not measured: their values stand for many, "
    "or for none yet"
)


def _is_transformed() -> bool:
    """Tell whether a call is no step of a training: torch.func differentiates it, or it is traced.

    Its values stand for many, or for none.
    """
    return is_functorch_active() or is_tracing()


class WatchListener(Listener):
    """Measure the values and gradients of one port, or of one leaf of it."""

    __slots__ = (
        "_ids",
        "_prefix",
        "_views",
        "every",
        "gradient_site",
        "is_due",
        "probe",
        "recorder",
        "value_site",
        "with_inference",
    )

    hears_missing = False
    is_careful = True
    may_be_light = True

    def __init__(
        self,
        session: Session,
        station: Station,
        site: Site,
        recorder: Recorder,
        *,
        prefix: str = "",
        with_inference: bool = False,
    ) -> None:
        super().__init__(
            session, station, site.port, site.leaf, values=False, gradients=False, stage=2
        )
        self.recorder = recorder
        self.probe = choose_probe(station.module) if site.port == "output" else None
        """What is looked at channel by channel."""
        self.every = 1
        """Which steps it measures: one in so many."""
        self.is_due = True
        """Whether it measures in the step under way."""
        self.with_inference = with_inference
        self.taps_arguments = False
        self.hooks_views = True
        self.is_light = site.port == "output" and not site.leaf  # until it is more than a tensor
        self._views: dict[Path, tuple[Tensor, int]] = {}
        """The latest views that were hooked: what shares their version, and the version then."""
        self._prefix = prefix
        self.value_site = -1
        """The number of its output, where that is one tensor; -1 before it was met."""
        self.gradient_site = -1
        """The number of that output's gradient."""
        self._ids: dict[tuple[str, Path, bool], int] = {}

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            if self._hears(visit):
                self._measure(self.port, bind(module, args, kwargs))
        except Exception as error:
            self.recorder.guard.take(error)
        return args, kwargs

    def on_output(
        self,
        visit: Visit,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        try:
            if self._hears(visit):
                if isinstance(output, Tensor) and self.value_site >= 0:
                    self._measure_output(output)
                else:
                    self._measure(self.port, output)
        except Exception as error:
            self.recorder.guard.take(error)
        return output

    def on_light(self, output: Tensor, *, has_grad: bool) -> None:
        recorder = self.recorder
        if _is_transformed():
            return
        try:
            if recorder.tell_begin is not None and has_grad:
                recorder.tell_begin()
            if self.is_due and recorder.is_on and (has_grad or self.with_inference):
                if self.value_site >= 0:
                    self._measure_output(output)
                else:
                    self._measure_one("output", (), output, is_grad=False)
        except Exception as error:
            recorder.guard.take(error)

    def on_light_gradient(self, grad: Tensor) -> None:
        if self.is_due and self.recorder.is_on and not _is_transformed():
            try:
                if self.gradient_site >= 0:
                    self.recorder.measure(self.gradient_site, grad)
                else:
                    self._measure_one("output", (), grad, is_grad=True)
            except Exception as error:
                self.recorder.guard.take(error)

    def make_light_ear(self) -> LightEar:
        return make_swift_ear(self)

    def on_value(self, visit: Visit, module: nn.Module, port: str, value: Any) -> Any:
        try:
            if self._hears(visit):
                self._measure(port, value)
        except Exception as error:
            self.recorder.guard.take(error)
        return value

    def on_gradient(
        self, visit: Visit, port: str, leaf: Path, grad: Tensor | None, task: int
    ) -> Tensor | None:
        if grad is None or _is_transformed():
            return grad
        if self.is_due and self.recorder.is_on:
            try:
                self._measure_one(port, leaf, grad, is_grad=True)
            except Exception as error:
                self.recorder.guard.take(error)
        return grad

    def make_ear(self, device: torch.device, visits: VisitEar | None) -> tuple[WatchEar, TracedEar]:
        ear = WatchEar(device, self)
        traced = TracedEar(
            ear.key,
            leaf=self.leaf,
            values=self.values,
            gradients=self.gradients,
            is_passing=True,
        )
        return ear, traced

    def on_passing(self, place: Place, tensor: Tensor) -> None:
        """Measure a value or a gradient in a compiled graph, whose memory is used again at once."""
        recorder = self.recorder
        try:
            number = self.meet_passing(place, tensor)
            if number is None:
                return
            recorder.measure_passing(number, tensor)
            is_output = self.probe is not None and place.port == "output" and not place.leaf
            if is_output and self.probe is not None and recorder.units.is_on:
                recorder.units.look(number, self.probe, tensor)
        except Exception as error:
            recorder.guard.take(error)

    def meet_passing(self, place: Place, tensor: Tensor) -> int | None:
        """Number a value or a gradient in a compiled graph; None where it is not measured now."""
        recorder, port = self.recorder, place.port
        is_grad = port.endswith(GRAD)
        if not is_grad:
            if graph_task_id() != -1 and checkpoints.is_recompute():
                return None
            has_grad = place.has_grad or self._is_in_training()
            if has_grad and recorder.tell_begin is not None:
                recorder.tell_begin()
            if not (has_grad or self.with_inference):
                return None
        if not (self.is_due and recorder.is_on and self.session.is_open):
            return None
        key = (port.removesuffix(GRAD), place.leaf, is_grad)
        number = self._ids.get(key)
        if number is None:
            number = self._meet(key, tensor)
            if key == _OUTPUT and self.probe is not None:
                recorder.units.meet(number, self.probe, tensor)
        return number

    def _is_in_training(self) -> bool:
        """Tell whether the call under way began with grad, so that a part without is its own."""
        call = self.session.active.get(get_ident())
        return call is not None and call.depth > 0 and call.grad_at_start

    @property
    def has_measured(self) -> bool:
        """Whether anything was ever measured here."""
        return bool(self._ids)

    def on_hooked_view(self, leaf: Path, witness: Tensor, version: int) -> None:
        self._views[leaf] = (witness, version)

    def end_step(self) -> None:
        """Hook no more views where one was changed in place: a hook hears nothing of it then."""
        if self._views:
            if any(witness._version != version for witness, version in self._views.values()):
                self.hooks_views = False
            self._views.clear()

    def no_gradient(self, visit: Visit, port: str, leaf: Path | None, reason: str) -> None:
        why = {"shared memory": _WHY_NOT, "beside a graph": _NOT_WHOLE}.get(reason)
        if why is not None:
            address = format_place(
                escape(self._name(self.station.path)), port, leaf or (), is_grad=True
            )
            self.recorder.unmeasured.setdefault(address, why)

    def no_key(self, key: str, place: Place) -> None:
        """Learn that a dict in a compiled graph has a key whose tensors cannot be told of."""
        if self.is_due and self.recorder.is_on and self.session.is_open:
            name = escape(self._name(self.station.path))
            address = format_place(name, place.port, place.leaf)
            why = f"what has the key {key} is not measured. {PLAIN_KEYS}"
            self.recorder.unmeasured.setdefault(address, why)

    def _hears(self, visit: Visit) -> bool:
        if visit.is_recompute or _is_transformed():
            return False
        has_grad = visit.call.grad_at_start
        if has_grad and self.recorder.tell_begin is not None:
            self.recorder.tell_begin()
        return self.is_due and self.recorder.is_on and (has_grad or self.with_inference)

    def _measure_output(self, output: Tensor) -> None:
        """Measure an output that is one tensor, met before."""
        recorder = self.recorder
        recorder.measure(self.value_site, output)
        if self.probe is not None and recorder.units.is_on:
            recorder.units.look(self.value_site, self.probe, output)

    def _measure(self, port: str, tree: Any) -> None:
        leaf = self.leaf
        if leaf:
            try:
                leaf = _trees.canonical(tree, leaf)
                tree = _trees.get(tree, leaf)
            except _trees.NoSuchLeaf:
                return
        for path, tensor in _trees.leaves(tree, leaf):
            self._measure_one(port, path, tensor, is_grad=False)

    def _measure_one(self, port: str, path: Path, tensor: Tensor, *, is_grad: bool) -> None:
        key = (port, path, is_grad)
        number = self._ids.get(key)
        if number is None:
            number = self._meet(key, tensor)
            if port == "output" and not path:
                if is_grad:
                    self.gradient_site = number
                else:
                    self.value_site = number
                    self.is_light = not self.leaf
                    if self.probe is not None:
                        self.recorder.units.meet(number, self.probe, tensor)
        if number == self.value_site:
            self._measure_output(tensor)
        else:
            self.recorder.measure(number, tensor)

    def _meet(self, key: tuple[str, Path, bool], tensor: Tensor) -> int:
        """Number a place that was met for the first time; another thread may do so as well."""
        with self.recorder.lock:
            number = self._ids.get(key)
            if number is None:
                number = self._ids[key] = self.recorder.new_site(self._describe(key), tensor)
            return number

    @property
    def address(self) -> str:
        return format_place(escape(self._name(self.station.path)), self.port, self.leaf)

    def _name(self, path: str) -> str:
        """Put the model's prefix before a path; the root is the prefix without its dot."""
        return self._prefix + path if path else self._prefix.rstrip(".")

    def _describe(self, key: tuple[str, Path, bool]) -> Callable[[int, Tensor], SiteFacts]:
        port, path, is_grad = key
        station = self.station

        def describe(number: int, value: Tensor) -> SiteFacts:
            more: dict[str, Any] = {}
            if len(station.names) > 1:
                more["names"] = [self._name(name) for name in station.names]
            return SiteFacts(
                id=number,
                address=format_place(escape(self._name(station.path)), port, path, is_grad=is_grad),
                kind="gradient" if is_grad else "value",
                module=self._name(station.path),
                type=type(station.module).__name__,
                dtype=str(value.dtype).removeprefix("torch."),
                shape=_shape_of(value),
                source=source_of(station.module, port),
                more=more,
            )

        return describe


def _shape_of(value: Tensor) -> tuple[int, ...]:
    """Give the shape of a value; of a nested one that of its rows together, as it has none."""
    if not is_nested(value):
        return tuple(value.shape)
    return tuple(find_values(value).shape) if value.layout is torch.jagged else (value.numel(),)


class CallListener(Listener):
    """Tell that a call of a model with grad begins, and what with."""

    __slots__ = ("prefix", "recorder", "tell", "tell_unseen")

    hears_begin = True

    def __init__(
        self,
        session: Session,
        station: Station,
        recorder: Recorder,
        *,
        prefix: str,
        tell: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], str], None],
        tell_unseen: Callable[[nn.Module], None],
    ) -> None:
        super().__init__(session, station, "input", values=True, gradients=False, stage=0)
        self.recorder = recorder
        self.prefix = prefix
        self.tell = tell
        self.tell_unseen = tell_unseen
        """What is told where the arguments of a call are not to be had."""

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if is_functorch_active():
            name = self.prefix.rstrip(".") or type(module).__name__
            self.recorder.unmeasured.setdefault(name, _TRANSFORMED)
        is_own = not visit.is_recompute and visit.call.grad_at_start and not _is_transformed()
        if is_own and not self.recorder.is_deaf:
            try:
                if visit.call.depth <= 1:
                    self.tell(module, args, kwargs, self.prefix)
            except Exception as error:
                self.recorder.guard.take(error)
        return args, kwargs

    def make_ear(self, device: torch.device, visits: VisitEar | None) -> tuple[None, None]:
        # The graph itself tells of its beginning, and what a call is made with stays inside.
        return None, None

    def on_begin(self, visit: Visit) -> None:
        if visit.is_recompute or not visit.call.grad_at_start or self.recorder.is_deaf:
            return
        try:
            if visit.call.depth <= 1:
                self.tell_unseen(self.station.module)
        except Exception as error:
            self.recorder.guard.take(error)


class ReturnListener(Listener):
    """Tell that a call of a model ends, and what it gave."""

    __slots__ = ("recorder", "tell")

    def __init__(
        self,
        session: Session,
        station: Station,
        recorder: Recorder,
        *,
        tell: Callable[[nn.Module, Any], None],
    ) -> None:
        super().__init__(session, station, "output", values=True, gradients=False, stage=2)
        self.recorder = recorder
        self.tell = tell

    def on_output(
        self,
        visit: Visit,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        try:
            self.recorder.queue.settle()
            if not (visit.is_recompute or self.recorder.is_deaf or _is_transformed()):
                self.tell(module, output)
        except Exception as error:
            self.recorder.guard.take(error)
        return output

    def make_ear(self, device: torch.device, visits: VisitEar | None) -> tuple[None, None]:
        return None, None
