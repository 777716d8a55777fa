"""vanishing, init-scale, and how gradients and outputs change from layer to layer.

A profile is one number for each layer in the order they run in. What matters is a fall or a rise
that layers bring about together, each a part of it. A single step in the profile is something
else: a head that begins at zero, a branch with a small factor, data of another scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from hookline.rules.findings import Finding
from hookline.rules.rule import Rule
from hookline.rules.steps import Step, name_site
from hookline.rules.windows import Window
from hookline.rules.wording import say_number
from hookline.runs.step_sources import Floats, Integers


@dataclass(frozen=True, slots=True)
class Slope:
    """How far a profile rises from its first layers to its highest."""

    factor: float
    """How many times the highest is above the first."""

    start: int
    """The place of the highest of the first layers."""

    peak: int
    """The place of the highest of all."""

    largest_part: float
    """The share of the rise (in powers of ten) that the largest single step has."""


def find_slope(profile: Floats) -> Slope | None:
    """Measure how a profile rises from its beginning; None where there is too little of it.

    The beginning is the first tenth, two layers at least, and what counts is the highest so far: a
    side branch with small values changes nothing.
    """
    few = max(2, len(profile) // 10)
    if len(profile) < few + 2:
        return None
    highest = np.maximum.accumulate(profile)[few - 1 :]
    rises = np.diff(np.log10(highest))
    total = float(rises.sum())
    return Slope(
        factor=float(highest[-1] / highest[0]),
        start=int(np.argmax(profile[:few])),
        peak=int(np.argmax(profile)),
        largest_part=float(rises.max() / total) if total > 0 else 1.0,
    )


def gradient_profile(window: Window, step: Step) -> tuple[Integers, Floats]:
    """Give the layers that have a gradient, and its norm as the median over the window.

    The norm over all elements, since the size of one element depends on how many there are.
    """
    at = step.roster.gradients_of_layers
    norms = window.medians()[at]
    there = norms > 0
    return at[there], norms[there]


class Vanishing(Rule):
    """Find gradients that become smaller from layer to layer until nothing is left."""

    name = "vanishing"
    sees_broken = False

    def __init__(self, ratio: float = 1e-4, window: int = 20, *, part: float = 0.35) -> None:
        self.ratio = ratio
        """How much of the largest gradient has to reach the first layers."""
        self.window = window
        """Over so many steps, as the median."""
        self.part = part
        """The share of the fall that a single layer may have at most."""
        self._norms = Window(window)
        self._steps = 0
        self._is_done = False

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at the norms of the gradients that reach the layers."""
        layers = step.roster.gradients_of_layers
        if self._is_done or not len(layers) or step.is_skipped:
            return
        norms = np.full(len(step.sites), np.nan)
        norms[layers] = step.stat("l2")[layers]
        self._norms.add(norms)
        self._steps += 1
        if self._steps < self.window or (self._steps - self.window) % 5:
            return
        at, profile = gradient_profile(self._norms, step)
        slope = find_slope(profile)
        if slope is None or slope.factor * self.ratio < 1 or slope.largest_part > self.part:
            return
        self._is_done = True
        yield self._explain(step, at, profile, slope)

    def _explain(self, step: Step, at: Integers, profile: Floats, slope: Slope) -> Finding:
        first, best = step.sites[at[slope.start]], step.sites[at[slope.peak]]
        value = 1 / slope.factor
        shown = np.unique(np.linspace(0, len(at) - 1, 6).astype(int))
        return self.find(
            step,
            first,
            value=value,
            threshold=self.ratio,
            message=(
                f"The gradient vanishes on its way to the first layers: of {name_site(best)} only "
                f"{say_number(value)} arrives at {name_site(first)} (median over {self.window} "
                f"steps up to step {step.number}; at least {say_number(self.ratio)} should)."
            ),
            evidence=[
                f"{name_site(step.sites[at[n]])}: norm {say_number(profile[n])}" for n in shown
            ],
            hint=(
                "Use ReLU or GELU instead of sigmoid and tanh, normalisation layers, residual "
                "connections, or a larger initialisation (torch.nn.init.kaiming_normal_)."
            ),
            others=[name_site(step.sites[n]) for n in at[profile < profile.max() * self.ratio]],
        )


class InitScale(Rule):
    """Find initialisations with which outputs grow or shrink from layer to layer."""

    name = "init-scale"
    sees_broken = False

    def __init__(
        self, factor: float = 1e4, *, most: float = 1e3, gain: float = 5.0, part: float = 0.35
    ) -> None:
        self.factor = factor
        """How many times larger the spread of one layer may be than that of another."""
        self.most = most
        """How large the spread may be where it is a hundred times that of the first layers."""
        self.gain = gain
        """How many times larger than its input the output of a usual layer may be."""
        self.part = part
        """The share of the growth that a single layer may have at most."""
        self._is_done = False

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at the first step, in which all weights are as they were made."""
        layers = step.roster.layers
        if self._is_done or not len(layers):
            return
        self._is_done = True
        spread = step.stat("std")[layers]
        there = (spread > 0) & (step.stat("count")[layers] > 1)
        at, profile = layers[there], spread[there]
        growth, fall = find_slope(profile), find_slope(profile[::-1])
        is_growing = growth is not None and (
            growth.factor > self.factor
            or (profile.max() > self.most and growth.factor > self.most / 10)
        )
        if growth is not None and is_growing and growth.largest_part <= self.part:
            yield self._explain(step, at, profile, slope=growth, word="grow")
        elif fall is not None and fall.factor > self.factor and fall.largest_part <= self.part:
            yield self._explain(step, at[::-1], profile[::-1], slope=fall, word="shrink")
        elif len(profile):
            yield from self._judge_gains(step, at, profile)

    def _judge_gains(self, step: Step, at: Integers, profile: Floats) -> Iterator[Finding]:
        """Look at the weights themselves: normalisation may hide what they do to the values.

        Weights that are large by design have a factor beside them: then outputs are as usual.
        """
        matrices = step.roster.layer_matrices
        gains = step.stat("l2")[matrices] / step.roster.usual_norm[matrices]
        gain, spread = np.nanmedian(gains) if len(gains) else 0.0, np.median(profile)
        if not (gain > self.gain and spread > self.gain):
            return
        worst = int(np.nanargmax(gains))
        site = step.sites[matrices[worst]]
        yield self.find(
            step,
            site,
            value=gain,
            threshold=self.gain,
            message=(
                f"The initial weights are too large: a usual layer makes its input "
                f"{say_number(gain)} times larger at step {step.number} (up to "
                f"{say_number(self.gain)} times is fine), most of all {name_site(site)} with "
                f"{say_number(gains[worst])} times."
            ),
            evidence=[f"outputs of a usual layer have a std of {say_number(spread)}"]
            + [
                f"{name_site(step.sites[one])}: rms {say_number(step.stat('rms')[one])}"
                for one in matrices[np.argsort(-gains)[:3]]
            ],
            hint=(
                "Initialise so that a layer keeps the scale of its input: "
                "torch.nn.init.kaiming_normal_ or xavier_normal_."
            ),
            others=[
                name_site(step.sites[one])
                for one in matrices[gains > self.gain]
                if one != matrices[worst]
            ],
        )

    def _explain(
        self, step: Step, at: Integers, profile: Floats, *, slope: Slope, word: str
    ) -> Finding:
        high, low = step.sites[at[slope.peak]], step.sites[at[slope.start]]
        first, last = (low, high) if word == "grow" else (high, low)
        value = slope.factor
        return self.find(
            step,
            last,
            value=value,
            threshold=self.factor if value > self.factor else self.most / 10,
            message=(
                f"At step {step.number} outputs {word} from layer to layer: the spread of "
                f"{name_site(high)} is {say_number(value)} times that of {name_site(low)} "
                f"({say_number(profile[slope.peak])} against {say_number(profile[slope.start])})."
            ),
            evidence=[f"{name_site(first)} runs first, {name_site(last)} later"]
            + [
                f"{name_site(step.sites[at[n]])}: std {say_number(profile[n])}"
                for n in np.unique(np.linspace(0, len(at) - 1, 5).astype(int))
            ],
            hint=(
                "Initialise so that a layer keeps the scale of its input "
                "(torch.nn.init.kaiming_normal_, xavier_normal_), or add normalisation layers."
            ),
        )
