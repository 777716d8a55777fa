"""vanishing, and how gradients and outputs change from layer to layer.

A profile is one number for each layer in the order they run in. What matters is a fall or a rise
that layers bring about together, each a part of it. A single step in the profile is something
else: a head that begins at zero, a branch with a small factor, data of another scale. So are steps
at both ends with nothing between them: small weights at the loss, side branches at the input.
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

_MIDDLE = 0.15
"""How much of a gradual rise the middle third of its way has at least."""


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

    middle_part: float
    """The share that the middle third of the way to the highest has."""

    def is_gradual(self, part: float) -> bool:
        """Tell whether it goes on from layer to layer: no step has more than this part of it."""
        return self.largest_part <= part and self.middle_part >= _MIDDLE


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
    way = rises[: int(np.argmax(highest))]
    middle = float(np.array_split(way, 3)[1].sum())
    return Slope(
        factor=float(highest[-1] / highest[0]),
        start=int(np.argmax(profile[:few])),
        peak=int(np.argmax(profile)),
        largest_part=float(rises.max() / total) if total > 0 else 1.0,
        middle_part=middle / total if total > 0 else 0.0,
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

    def __init__(
        self,
        ratio: float = 1e-4,
        window: int = 20,
        *,
        part: float = 0.35,
        cut: float = 1e-6,
        least: float = 1e-7,
    ) -> None:
        self.ratio = ratio
        """How much of the largest gradient has to reach the first layers."""
        self.window = window
        """Over so many steps, as the median."""
        self.part = part
        """The share of the fall that a single layer may have at most."""
        self.cut = cut
        """How much has to reach them where a single place takes the rest."""
        self.least = least
        """How much of their weights has to change in a step, where so little reaches them."""
        self._norms = Window(window)
        self._moves = Window(window)
        self._steps = 0
        self._is_done = False

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at the norms of the gradients that reach the layers."""
        layers = step.roster.gradients_of_layers
        if self._is_done or not len(layers) or step.is_skipped:
            return
        norms, moves = np.full((2, len(step.sites)), np.nan)
        norms[layers] = step.stat("l2")[layers]
        matrices, ratios = step.update_ratios
        moves[matrices] = ratios
        self._norms.add(norms)
        self._moves.add(moves)
        self._steps += 1
        if self._steps < self.window or (self._steps - self.window) % 5:
            return
        for finding in self._judge(step):
            self._is_done = True
            yield finding

    def _judge(self, step: Step) -> Iterator[Finding]:
        at, profile = gradient_profile(self._norms, step)
        slope = find_slope(profile)
        if slope is None or slope.factor * self.ratio < 1:
            return
        if slope.is_gradual(self.part):
            yield self._explain(step, at, profile, slope)
        elif self._is_cut(step, at, profile):
            yield self._explain_cut(step, at, profile, slope)

    def _is_cut(self, step: Step, at: Integers, profile: Floats) -> bool:
        """Tell whether the first layers get next to nothing, and stay as they are for it.

        A factor in one place does that. A head that begins at zero does so too, and not for long;
        and an optimizer that looks at the direction alone makes up for it: then weights move.
        """
        is_low = profile < self.cut * profile.max()
        count = int(np.argmin(is_low))
        if count < max(2, len(profile) // 10) or count > len(profile) - 2:
            return False
        moves = self._moves.medians()
        first = {step.sites[one].module for one in at[:count]}
        is_first = np.array([one.module in first for one in step.sites], bool)
        there = ~np.isnan(moves)
        if not (there & is_first).any() or not (there & ~is_first).any():
            return False
        is_still = moves[there & is_first].max() < self.least
        return bool(is_still and moves[there & ~is_first].max() > 100 * self.least)

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

    def _explain_cut(self, step: Step, at: Integers, profile: Floats, slope: Slope) -> Finding:
        count = int(np.argmin(profile < self.cut * profile.max()))
        last, after = step.sites[at[count - 1]], step.sites[at[count]]
        value = float(profile[:count].max() / profile[slope.peak])
        return self.find(
            step,
            last,
            value=value,
            threshold=self.cut,
            message=(
                f"The gradient is lost between {name_site(after)} and {name_site(last)}: of "
                f"{name_site(step.sites[at[slope.peak]])} only {say_number(value)} arrives there "
                f"(median over {self.window} steps up to step {step.number}; at least "
                f"{say_number(self.cut)} should), and the weights before it do not change."
            ),
            evidence=[
                f"{name_site(step.sites[at[n]])}: norm {say_number(profile[n])}"
                for n in range(max(0, count - 2), min(count + 2, len(at)))
            ],
            hint="Look for a very small factor between these two layers, and take it out.",
            others=[name_site(step.sites[one]) for one in at[: count - 1]],
        )
