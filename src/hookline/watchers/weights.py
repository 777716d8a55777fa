"""Parameters, their gradients, updates and moments, measured around an optimizer's step.

A gradient is what the optimizer is given: accumulated over micro-batches, clipped if it was, and
without the factor of a GradScaler. An update is the difference that the step made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hookline.addresses import ModuleTree, ParameterEntry
from hookline.addresses.pattern import compile_path, escape
from hookline.runs import SiteFacts
from hookline.stats import Log, Update
from hookline.watchers.local_gradients import PART as LOCAL
from hookline.watchers.local_gradients import LocalGradients
from hookline.watchers.recording import Recorder
from hookline.watchers.units import find_rows

COPY_LIMIT = 1 << 30
"""How many bytes of weights are copied for one step; more weights take turns."""

_KINDS = {
    "": "parameter",
    "grad": "parameter gradient",
    LOCAL: "local gradient",
    "update": "update",
}
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg")


@dataclass(slots=True)
class Weight:
    """One watched parameter, and the numbers of its sites."""

    name: str
    """Its path, with the model's prefix."""

    parameter: Tensor
    """The parameter."""

    type: str
    """The class of its module."""

    module: str
    """The path of its module."""

    ids: dict[str, int]
    """The numbers of its sites: the value, `grad`, `local_grad`, `update` and moments."""

    every: int = 1
    """Which steps it is measured in: one in so many."""

    rows: int | None = None
    """The dimension that goes over the output units; None where there is none."""


@dataclass(frozen=True, slots=True)
class _Own:
    """What one optimizer has of the watched models."""

    ids: int
    """What tells its parameters from others; when that changes, they are looked at again."""

    weights: list[Weight]
    """Those that are measured."""

    is_ours: bool
    """Whether it has any of a watched model."""


Named = tuple[str, nn.Module, Callable[[str], object]]
"""A model with its prefix, and which names of parameters are watched."""


class Weights:
    """Measure the watched parameters of an optimizer before and after it steps."""

    def __init__(
        self,
        recorder: Recorder,
        models: Sequence[Named],
        *,
        updates: bool,
        strides: Mapping[str, int],
        local_gradients: bool = False,
    ) -> None:
        self.local = LocalGradients(self) if local_gradients else None
        """What measures the gradients of this rank alone; None where they are not asked for."""
        self._strides = [(compile_path(one), stride) for one, stride in strides.items()]
        self._step = 0
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """The optimizers whose parameters were looked at in this step."""
        self._recorder = recorder
        self._models = list(models)
        self._with_updates = updates
        self._known: weakref.WeakKeyDictionary[Optimizer, _Own] = weakref.WeakKeyDictionary()
        self._all: dict[int, Weight] = {}
        self._ids: dict[str, dict[str, int]] = {}
        """The sites by name: a parameter that is put in another's place goes on with them."""
        self._measured: set[int] = set()
        """The weights whose step is measured in the step under way."""
        self._copied: dict[int, tuple[int, Optimizer]] = {}
        """Of each weight that is copied in this step: the row of its value, and who steps it."""
        self._kept: dict[int, Tensor] = {}
        self._turn = 0

    @property
    def named(self) -> Sequence[Named]:
        """The watched models with their prefixes."""
        return self._models

    @property
    def models(self) -> Iterator[nn.Module]:
        """The watched models."""
        for _, model, _ in self._models:
            yield model

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters of the watched models, measured or not."""
        for _, model, _ in self._models:
            yield from model.parameters()

    def add(self, named: Named) -> None:
        """Take a model that has come since."""
        self._models.append(named)
        if self.local is not None:
            self.local.forget()
        self._known.clear()  # an optimizer may have turned out to be ours

    def of(self, optimizer: Optimizer) -> list[Weight]:
        """List the watched parameters of an optimizer whose turn it is in this step."""
        return [one for one in self._own(optimizer).weights if self._step % one.every == 0]

    def owns_any(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer steps a parameter of a watched model, measured or not."""
        return self._own(optimizer).is_ours

    def _own(self, optimizer: Optimizer) -> _Own:
        known = self._known.get(optimizer)
        if known is not None and known.is_ours and optimizer in self._seen:
            return known
        self._seen.add(optimizer)
        params = [one for group in optimizer.param_groups for one in group["params"]]
        ids_now = hash(tuple(map(id, params)))
        if known is None or known.ids != ids_now:
            self._walk()
            weights = [self._all[id(one)] for one in params if id(one) in self._all]
            ids = {id(one) for _, model, _ in self._models for one in model.parameters()}
            is_ours = any(id(one) in ids for one in params)
            known = self._known[optimizer] = _Own(ids_now, weights, is_ours)
        return known

    def _walk(self) -> None:
        """Name the parameters as the models have them now; others are let go."""
        if self.local is not None:
            self.local.forget()
        there = {id(one) for _, model, _ in self._models for one in model.parameters()}
        for key in [key for key in self._all if key not in there]:
            del self._all[key]
            self._kept.pop(key, None)
        for prefix, model, wanted in self._models:
            for entry in ModuleTree(model).parameters:
                if is_lazy(entry.parameter) or id(entry.parameter) in self._all:
                    continue
                if any(map(wanted, entry.names)):
                    self._all[id(entry.parameter)] = self.make(prefix, entry)

    def make(self, prefix: str, entry: ParameterEntry) -> Weight:
        """Name a parameter of a model, with the sites that its name has had so far."""
        name = prefix + entry.names[0]
        owner, own_name = entry.places[0]
        ids = self._ids.setdefault(name, {})
        weight = Weight(name, entry.parameter, type(owner).__name__, _above(name), ids)
        weight.rows = find_rows(owner, own_name)
        for is_match, stride in self._strides:
            if any(is_match(one) or is_match(_above(one)) for one in entry.names):
                weight.every = stride
        return weight

    def begin_step(self, step: int) -> None:
        """Forget what was measured for the step before."""
        self._step = step
        self._seen.clear()
        self._measured.clear()
        self._copied.clear()

    def before(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Measure weights and gradients, and keep what the updates are told from."""
        weights = [one for one in self.of(optimizer) if id(one.parameter) not in self._measured]
        if not weights:
            return
        self._measured.update(id(one.parameter) for one in weights)
        rows = self._measure_all([(one, "", one.parameter.detach()) for one in weights])
        if not has_closure:
            self._measure_gradients(optimizer, weights)
        chosen = self._choose_copies(weights)
        self._keep(chosen)
        row_of = {id(one.parameter): row for one, row in zip(weights, rows, strict=True)}
        for one in chosen:
            row = row_of[id(one.parameter)]
            if row is not None:
                self._copied[id(one.parameter)] = (row[0], optimizer)

    def _keep(self, weights: list[Weight]) -> None:
        """Copy parameters, into memory that is held from step to step."""
        old, new = [], []
        for weight in weights:
            key, one = id(weight.parameter), weight.parameter.detach()
            kept = self._kept.get(key)
            is_fit = kept is not None and kept.shape == one.shape and kept.dtype == one.dtype
            if kept is None or not is_fit or kept.device != one.device or type(one) is not Tensor:
                self._kept[key] = one.clone()
            else:
                old.append(kept)
                new.append(one)
        if old:
            torch._foreach_copy_(old, new)

    def _choose_copies(self, weights: list[Weight]) -> list[Weight]:
        """Choose the weights whose update is measured: all, or as many as their turn allows."""
        moving = [one for one in weights if one.parameter.requires_grad]
        if not self._with_updates or not moving:
            return []
        room = COPY_LIMIT
        chosen: list[Weight] = []
        start = self._turn % len(moving)
        for one in (*moving[start:], *moving[:start]):
            size = one.parameter.numel() * one.parameter.element_size()
            if size > room and chosen:
                break
            room -= size
            chosen.append(one)
        self._turn = 0 if len(chosen) == len(moving) else start + len(chosen)
        if self._turn:  # others have their turn next: this memory is for them
            self._kept.clear()
        return chosen

    def _measure_gradients(self, optimizer: Optimizer, weights: Iterable[Weight]) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        scales: dict[Log, int] = {}
        if isinstance(scale, Tensor):
            self._recorder.add_scalar("grad_scale", scale)
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, Tensor):
            self._recorder.add_scalar("skipped", found)
        given = [
            (one, "grad", one.parameter.grad.detach())
            for one in weights
            if one.parameter.grad is not None
        ]
        measured = self._measure_all(given)
        units = self._recorder.units
        if units.is_on:
            units.look_at_rows(
                [
                    (one.ids["grad"], grad, one.rows)
                    for one, _, grad in given
                    if one.rows is not None
                ]
            )
        if not isinstance(scale, Tensor):
            return
        for found_row, (_, _, grad) in zip(measured, given, strict=True):
            if found_row is not None:
                row, log = found_row
                if log not in scales:
                    scales[log] = log.add(scale.to(grad.device, non_blocking=True))
                self._recorder.note_scale(row, log, scales[log])

    def skipped(self, optimizer: Optimizer) -> None:
        """Measure the gradients of a step that a scaler left out; they are unscaled by now."""
        weights = [one for one in self.of(optimizer) if id(one.parameter) not in self._measured]
        self._measured.update(id(one.parameter) for one in weights)
        self._measure_all([(one, "", one.parameter.detach()) for one in weights])
        self._measure_gradients(optimizer, weights)
        self._recorder.add_scalar("skipped", 1.0)

    def after(self, optimizer: Optimizer, *, has_closure: bool, moments: bool) -> None:
        """Measure what the step changed."""
        weights = self.of(optimizer)
        if has_closure:
            self._measure_gradients(optimizer, weights)
        updates: list[tuple[int, int, Update]] = []
        for one in weights:
            key = id(one.parameter)
            row, stepper = self._copied.get(key, (-1, None))
            if stepper is not optimizer:
                continue
            del self._copied[key]
            after = one.parameter.detach()
            grad = None if one.parameter.grad is None else one.parameter.grad.detach()
            updates.append((self._site(one, "update", after), row, (self._kept[key], after, grad)))
        self._measure_updates(updates)
        if moments:
            self._measure_all(
                [
                    (one, name, value)
                    for one in weights
                    for name, value in optimizer.state.get(one.parameter, {}).items()
                    if name in _MOMENTS and isinstance(value, Tensor)
                ]
            )
        rates = {float(group["lr"]) for group in optimizer.param_groups if _is_number(group)}
        if rates:
            self._recorder.add_scalar("lr", max(rates))

    def measure_local(self, weight: Weight, grad: Tensor) -> None:
        """Measure what one backward computed of a gradient on this rank."""
        recorder = self._recorder
        if recorder.is_on and self._step % weight.every == 0:
            try:
                recorder.measure_now(self._site(weight, LOCAL, grad), grad)
            except Exception as error:
                recorder.guard.take(error)

    def note_backward(self, *, is_last: bool) -> None:
        """Learn that a backward pass is over, and whether it is the step's last."""

    def end_step(self) -> None:
        """Learn that a step ends, whether or not an optimizer has stepped in it."""

    def _measure_updates(self, updates: Sequence[tuple[int, int, Update]]) -> None:
        self._recorder.measure_updates(updates)

    def _measure_all(
        self, values: Sequence[tuple[Weight, str, Tensor]]
    ) -> list[tuple[int, Log] | None]:
        """Measure values of weights: the weight, which part of it, the value."""
        return self._recorder.measure_all(
            [(self._site(one, part, value), value) for one, part, value in values]
        )

    def _site(self, one: Weight, part: str, value: Tensor) -> int:
        number = one.ids.get(part)
        if number is None:
            number = self._recorder.new_site(lambda n, v: self._describe(one, part, n, v), value)
            one.ids[part] = number
        return number

    def _describe(self, one: Weight, part: str, number: int, value: Tensor) -> SiteFacts:
        return SiteFacts(
            id=number,
            address=escape(one.name) + (f":{part}" if part else ""),
            kind=_KINDS.get(part, "moment"),
            module=one.module,
            type=one.type,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(value.shape),
            source="",
            more={"requires_grad": one.parameter.requires_grad},
        )


def _above(name: str) -> str:
    """Give the path of the module that has a parameter."""
    return name.rpartition(".")[0]


def _is_number(group: dict[str, Any]) -> bool:
    """Tell whether a learning rate can be read without waiting for a device."""
    rate = group.get("lr")
    return isinstance(rate, (int, float)) or (
        isinstance(rate, Tensor) and rate.device.type == "cpu"
    )
