"""Channels one by one: units that are dead, channels that stand out, activations at their bound.

In the training's thread each channel is brought down to its largest and smallest value; what that
means is found out by whoever takes it away. A unit is dead when it was exactly zero in all of the
latest measured steps: one batch says nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from hookline._torch import is_capturing_cuda_graph
from hookline.runs import Block
from hookline.stats.preparing import PLAIN, undisturbed
from hookline.stats.waiting import wait_for

WINDOW = 20
"""Over how many measured steps a unit must have been zero to count as dead."""

FIRST = 40
"""How many watched steps are all looked at, before one in ten."""

_EDGE = 1e-3
"""How near its bound an activation is saturated."""

_KINDS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})

_ZERO_BELOW = (nn.ReLU, nn.ReLU6, nn.Threshold, nn.Hardswish)
_NEVER_ZERO = (nn.LeakyReLU, nn.PReLU, nn.RReLU)
_BOUNDS: tuple[tuple[Any, tuple[float, float]], ...] = (
    ((nn.Sigmoid, nn.Hardsigmoid), (0.0, 1.0)),
    ((nn.Tanh, nn.Softsign), (-1.0, 1.0)),
)
_CHANNEL_SECOND = (_ConvNd, _NormBase, nn.GroupNorm)


@dataclass(frozen=True, slots=True)
class Probe:
    """What is looked at of the values of one module."""

    is_relu: bool = False
    """Whether units can die there."""

    is_signed: bool = True
    """Whether values below zero come out of it."""

    bounds: tuple[float, float] | None = None
    """Where it saturates."""

    has_weights: bool = False
    """Whether channels that stand out are looked for."""

    is_channel_second: bool = False
    """Whether the channels of a value are its second dimension, and not its last."""


def choose_probe(module: nn.Module) -> Probe | None:
    """Tell what is worth looking at of a module's output; None for nothing."""
    if isinstance(module, nn.Hardtanh) and not isinstance(module, nn.ReLU6):
        return Probe(bounds=(module.min_val, module.max_val))
    for kinds, bounds in _BOUNDS:
        if isinstance(module, kinds):
            return Probe(bounds=bounds)
    if _is_relu(module):
        return Probe(is_relu=True, is_signed=not isinstance(module, nn.ReLU))
    if next(module.children(), None) is not None or not any(
        one is not None for one in module._parameters.values()
    ):
        return None
    return Probe(has_weights=True, is_channel_second=isinstance(module, _CHANNEL_SECOND))


def _is_relu(module: nn.Module) -> bool:
    if isinstance(module, _NEVER_ZERO):
        return False
    # Model libraries have classes of their own for what a function would do as well.
    name = type(module).__name__.lower().removesuffix("activation")
    return isinstance(module, _ZERO_BELOW) or name in ("relu", "relusquared", "relu2", "relu6")


def find_rows(module: nn.Module, name: str) -> int | None:
    """Tell which dimension of a parameter goes over its output units; None where that is none."""
    if name != "weight":
        return None
    if isinstance(module, _ConvTransposeNd):
        return 1
    if isinstance(module, (nn.Linear, _ConvNd)):
        return 0
    return 1 if type(module).__name__ == "Conv1D" else None  # a linear layer, the other way round


_Event = tuple[int, str, int]
"""A site, what was looked at, and how many vectors there are of it: 1 or 2."""


class UnitLog:
    """Bring the channels of values down to a number or two, where the values are."""

    def __init__(self) -> None:
        self.is_on = False
        """Whether channels are looked at in the step under way."""
        self.with_outliers = False
        """Whether channels that stand out are looked for as well."""
        self.own_seconds = 0.0
        """Time spent on values since the last take; that on gradients is counted elsewhere."""
        self._events: list[_Event] = []
        self._vectors: list[Tensor] = []
        self._layer: tuple[int, bool] | None = None
        """Of the layer met last: how many dimensions its value has, whether channels come second.
        The activation that follows has channels where it has them."""
        self._dims: dict[int, int] = {}

    def meet(self, site: int, probe: Probe, value: Tensor) -> None:
        """Find out which dimension of a site's values has the channels."""
        count = value.dim()
        if probe.has_weights:
            self._layer = count, probe.is_channel_second
            is_second = probe.is_channel_second
        elif self._layer is not None and self._layer[0] == count:
            is_second = self._layer[1]
        else:
            is_second = count > 3
        self._dims[site] = 1 if is_second and count > 2 else count - 1

    def look(self, site: int, probe: Probe, value: Tensor) -> None:
        """Look at the channels of a value."""
        if not _is_plain(value) or (probe.has_weights and not self.with_outliers):
            return
        begun = time.perf_counter()
        with undisturbed():
            if probe.bounds is not None:
                low, high = probe.bounds
                edge = _EDGE * (high - low) / 2 if low < 0 else _EDGE * (high - low)
                at_bound = torch.count_nonzero((value > high - edge) | (value < low + edge))
                share = at_bound.reshape(1).to(torch.float32) / value.numel()
                self._add(site, "saturated", share)
            elif value.dim():
                dim = self._dims.get(site, value.dim() - 1)
                what = "dead" if probe.is_relu else "outlier"
                self._look_along(site, what, value, dim, is_signed=probe.is_signed)
        self.own_seconds += time.perf_counter() - begun

    def look_at_rows(self, grads: Sequence[tuple[int, Tensor, int]]) -> None:
        """Look at the rows of gradients of weights: the site, the gradient, its dimension."""
        with undisturbed():
            for site, grad, dim in grads:
                if _is_plain(grad) and grad.dim() > dim:
                    self._look_along(site, "dead", grad, dim)

    def _look_along(
        self, site: int, what: str, value: Tensor, dim: int, *, is_signed: bool = True
    ) -> None:
        others = [one for one in range(value.dim()) if one != dim]
        if not others:
            self._add(site, what, value.clone())
        elif value.is_cuda:  # one launch in place of two; on a CPU it takes ten times as long
            self._add(site, what, torch.linalg.vector_norm(value, math.inf, others))
        elif is_signed:
            self._add(site, what, value.amax(others), value.amin(others))
        else:
            self._add(site, what, value.amax(others))

    def _add(self, site: int, what: str, *vectors: Tensor) -> None:
        self._events.append((site, what, len(vectors)))
        self._vectors += vectors

    def take(self) -> UnitsTaken | None:
        """Hand over what was looked at in the step; None where that is nothing."""
        events, vectors = self._events, self._vectors
        self._events, self._vectors, self.own_seconds = [], [], 0.0
        return UnitsTaken(events, vectors) if events else None


def _is_plain(value: Tensor) -> bool:
    return (
        type(value) in PLAIN
        and value.dtype in _KINDS
        and value.layout is torch.strided
        and value.numel() > 0
        and not (value.is_meta or value.is_nested)
        and not is_capturing_cuda_graph(value)
    )


class UnitsTaken:
    """The channels of one step, on their way to the host."""

    def __init__(self, events: list[_Event], vectors: Sequence[Tensor]) -> None:
        self.events = events
        self._sizes = [one.numel() for one in vectors]
        self._groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, one in enumerate(vectors):
            self._groups.setdefault((one.device, one.dtype), []).append(number)
        self._hosts: list[Tensor] = []
        self._marks: list[Any] = []
        with undisturbed():
            for (device, _), numbers in self._groups.items():
                flat = torch.cat([vectors[number].reshape(-1) for number in numbers])
                if device.type == "cuda":
                    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
                    host.copy_(flat, non_blocking=True)
                    mark = torch.cuda.Event()
                    mark.record(torch.cuda.current_stream(device))
                    self._marks.append(mark)
                    flat = host
                self._hosts.append(flat)

    def wait(self) -> list[tuple[int, str, list[Any]]]:
        """Give the site, what was looked at and the numbers of each, once they are here."""
        for mark in self._marks:
            wait_for(mark)
        arrays: list[Any] = [None] * len(self._sizes)
        with undisturbed():
            for numbers, host in zip(self._groups.values(), self._hosts, strict=True):
                wide = host.to("cpu", torch.promote_types(host.dtype, torch.float32)).numpy()
                at = 0
                for number in numbers:
                    arrays[number] = wide[at : at + self._sizes[number]]
                    at += self._sizes[number]
        found, at = [], 0
        for site, what, count in self.events:
            found.append((site, what, arrays[at : at + count]))
            at += count
        return found


@dataclass(slots=True)
class _Life:
    """How long ago the units of one site were last alive."""

    since: Any
    """Measured steps since each unit was last not zero."""

    steps: int = 0
    """How many steps were measured."""


class UnitCounter:
    """Follow the units of all sites over the steps."""

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = {}

    def count(self, taken: UnitsTaken) -> Block:
        """Make the block of a step."""
        by_site: dict[int, dict[str, list[list[Any]]]] = {}
        for site, what, arrays in taken.wait():
            by_site.setdefault(site, {}).setdefault(what, []).append(arrays)
        sites = sorted(by_site)
        values = np.full((len(sites), 5), np.nan)
        for row, site in zip(values, sites, strict=True):
            row[:] = 0, 0, 0, np.nan, -1
            for what, visits in by_site[site].items():
                if what == "saturated":
                    row[4] = np.mean([one[0][0] for one in visits])
                elif what == "dead":
                    row[:3] = self._follow(site, visits)
                else:
                    row[0], row[3] = _find_outlier(visits)
        return Block("units", np.array(sites, np.int32), values)

    def _follow(self, site: int, visits: list[list[Any]]) -> tuple[int, int, int]:
        """Say how many units a site has, how many of them are dead, over how many steps."""
        width = len(visits[0][0])
        is_alive = np.zeros(width, bool)
        for arrays in visits:
            for one in arrays:
                if len(one) == width:
                    is_alive |= one != 0  # a NaN is not zero: whatever it is, it is not dead
        life = self._lives.get(site)
        if life is None or len(life.since) != width:
            life = self._lives[site] = _Life(np.zeros(width, np.int32))
        life.steps += 1
        life.since += 1
        life.since[is_alive] = 0
        window = min(WINDOW, life.steps)
        return width, int(np.count_nonzero(life.since >= window)), window


def _find_outlier(visits: list[list[Any]]) -> tuple[int, float]:
    """Say how many channels there are, and how far the largest is above the median one."""
    width = len(visits[0][0])
    largest = np.zeros(width)
    for arrays in visits:
        for one in arrays:
            if len(one) == width:
                largest = np.fmax(largest, np.abs(one))
    middle = float(np.median(largest))
    top = float(largest.max(initial=0.0))
    return width, top / middle if middle > 0 and np.isfinite(top) else np.nan
