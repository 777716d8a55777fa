"""saturation: sigmoids and tanhs at their bounds, where hardly any gradient passes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from hookline.rules.findings import Finding
from hookline.rules.roster import Roster
from hookline.rules.rule import Rule
from hookline.rules.steps import Step, name_site
from hookline.rules.windows import LossTrend, Window, grow
from hookline.rules.wording import say_number, say_others, say_share
from hookline.runs.step_sources import Floats, Integers


class Saturation(Rule):
    """Find sigmoids and tanhs that are at their bounds for most inputs."""

    name = "saturation"
    severity = "info"
    sees_broken = False

    def __init__(self, share: float = 0.5, window: int = 20, *, passes: float = 0.01) -> None:
        self.share = share
        """How many elements may be within a thousandth of the bound."""
        self.window = window
        """In each of so many measured steps."""
        self.passes = passes
        """How much of a gradient has to pass where a model ends, while the loss stays high."""
        self._shares = Window(window)
        self._latest: Floats = np.zeros(0)
        self._passing = Window(window)
        self._began: Floats = np.zeros(0)
        self._trend = LossTrend()
        self._is_done = False

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at the activations that another layer follows, and at those a model ends with."""
        self._trend.add(step.scalars)
        if self._is_done or step.is_skipped:
            return
        if step.has("units"):
            yield from self._judge(step, step.stat("saturated"))
        if not self._is_done and len(self._latest):
            yield from self._judge_ends(step)

    def _judge(self, step: Step, shares: Floats) -> Iterator[Finding]:
        is_measured = step.roster.is_value & (shares >= 0)
        self._latest = grow(self._latest, len(shares))
        self._latest = np.where(is_measured, shares, self._latest)
        is_judged = is_measured & step.roster.is_before_last_layer
        self._shares.add(np.where(is_judged, shares, np.nan))
        lowest = self._shares.least()
        at = np.flatnonzero(lowest > self.share)
        if len(at):
            yield self._explain(step, at, shares=shares, lowest=lowest)

    def _judge_ends(self, step: Step) -> Iterator[Finding]:
        """Look at what a model ends with, which is at its bound also when the model is right.

        It is wrong when gradient passed at first and next to none of it does any more, while the
        loss is as high as it was and still asks for a change.
        """
        roster = step.roster
        self._latest, self._began = grow(self._latest, len(roster)), grow(self._began, len(roster))
        is_end = roster.is_value & ~roster.is_before_last_layer & ~np.isnan(self._latest)
        if not is_end.any():
            return
        passed = np.full(len(roster), np.nan)
        for one in np.flatnonzero(is_end).tolist():
            before = _find_layer_before(roster, one)
            if before >= 0:
                norms = step.stat("l2")[roster.gradient_of[[before, one]]]
                passed[one] = norms[0] / norms[1] if norms[1] > 0 else np.nan
        self._began = np.where(np.isnan(self._began), passed, self._began)
        self._passing.add(passed)
        if not (is_end & (self._latest > self.share)).any():
            return
        highest = self._passing.most()
        is_shut = (highest < self.passes) & (self._began > 10 * self.passes)
        at = np.flatnonzero(is_end & is_shut & (self._latest > self.share))
        if len(at) and self._trend.is_known and not self._trend.is_below(0.5):
            yield self._explain_end(step, int(at[0]), float(highest[at[0]]))

    def _explain(self, step: Step, at: Integers, *, shares: Floats, lowest: Floats) -> Finding:
        self._is_done = True
        site, value = step.sites[at[0]], float(lowest[at[0]])
        others = [name_site(step.sites[one]) for one in at[1:]]
        return self.find(
            step,
            site,
            value=value,
            threshold=self.share,
            message=(
                f"{name_site(site)} is saturated: in each of {self.window} measured steps up to "
                f"step {step.number}, {say_share(value)} or more of its elements are within 0.001 "
                f"of the bound (more than {say_share(self.share)} is too much), where hardly any "
                f"gradient passes.{say_others(others, 'activation')}"
            ),
            evidence=[
                f"{name_site(step.sites[one])}: {say_share(shares[one])} at step {step.number}"
                for one in at[:4]
            ],
            hint="Make the weights before it smaller, normalise its input, or use ReLU or GELU.",
            others=others,
        )

    def _explain_end(self, step: Step, number: int, passed: float) -> Finding:
        self._is_done = True
        site, share = step.sites[number], float(self._latest[number])
        return self.find(
            step,
            site,
            value=share,
            threshold=self.share,
            message=(
                f"{name_site(site)} is saturated: {say_share(share)} of its elements are within "
                f"0.001 of the bound at step {step.number} (more than {say_share(self.share)} is "
                f"too much), the loss is as high as at the beginning, and of the gradient at most "
                f"{say_number(passed)} has passed in {self.window} steps."
            ),
            evidence=[f"the loss is {say_number(self._trend.recent)} (median of 5 steps)"],
            hint=(
                "Bring the targets into the range of this activation, or leave it out; and make "
                "the weights before it smaller."
            ),
        )


def _find_layer_before(roster: Roster, number: int) -> int:
    """Find the layer whose output an activation is given: the latest of its shape; -1 for none.

    One with few channels is left out: a single chance is near its bound as soon as it is sure.
    """
    shape = roster.sites[number].shape
    earlier = roster.layers[roster.layers < number]
    if not len(earlier) or roster.sites[earlier[-1]].shape != shape or math.prod(shape[1:]) < 16:
        return -1
    before = int(earlier[-1])
    return before if (roster.gradient_of[[before, number]] >= 0).all() else -1
