"""spike: an output that is suddenly far larger than ever before."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hookline.rules.findings import Finding
from hookline.rules.rule import Rule
from hookline.rules.steps import Step, name_site
from hookline.rules.windows import grow
from hookline.rules.wording import say_number, say_others
from hookline.runs.step_sources import Floats


class Spike(Rule):
    """Find the first output that is far above its own running mean, and above all it ever was."""

    name = "spike"
    severity = "info"
    sees_broken = False

    def __init__(self, factor: float = 10.0, *, above: float = 5.0, after: int = 20) -> None:
        self.factor = factor
        """How many times its running mean an output may be."""
        self.above = above
        """How many times the largest that was seen before."""
        self.after = after
        """An output is judged once it was measured in so many steps."""
        self._mean: Floats = np.zeros(0)
        self._most: Floats = np.zeros(0)
        self._count: Floats = np.zeros(0)
        self._is_done = False

    def see(self, step: Step) -> Iterable[Finding]:
        """Compare the size of each output with what it was."""
        if self._is_done:
            return
        roster = step.roster
        rms = np.where(roster.is_value & (roster.size >= 16), step.stat("rms"), np.nan)
        self._mean, self._most = grow(self._mean, len(rms)), grow(self._most, len(rms), 0.0)
        self._count = grow(self._count, len(rms), 0.0)
        is_high = (rms > self.factor * self._mean) & (rms > self.above * self._most)
        is_high &= self._count >= self.after
        if is_high.any():
            # What was nearly nothing may become something without harm.
            is_high &= rms > 0.1 * np.nanmedian(self._mean)
            at = np.flatnonzero(is_high)
            if len(at):
                self._is_done = True
                yield self._explain(step, at.tolist(), rms)
        there = ~np.isnan(rms)
        mean = np.where(np.isnan(self._mean), rms, self._mean)
        self._mean = np.where(there, 0.9 * mean + 0.1 * rms, self._mean)
        self._most = np.fmax(self._most, rms)
        self._count += there

    def _explain(self, step: Step, at: list[int], rms: Floats) -> Finding:
        site = step.sites[at[0]]
        value = rms[at[0]] / self._mean[at[0]]
        others = [name_site(step.sites[one]) for one in at[1:]]
        return self.find(
            step,
            site,
            value=value,
            threshold=self.factor,
            message=(
                f"{name_site(site)} was {say_number(value)} times its usual size at step "
                f"{step.number} (rms {say_number(rms[at[0]])} after "
                f"{say_number(self._mean[at[0]])}; more than {say_number(self.factor)} times is a "
                f"spike). It is the first in the order of execution.{say_others(others, 'site')}"
            ),
            evidence=[
                f"{name_site(step.sites[one])}: rms {say_number(rms[one])}, usually "
                f"{say_number(self._mean[one])}, never above {say_number(self._most[one])}"
                for one in at[:4]
            ],
            hint="Look at the batch of this step: values out of range, a wrong label, a long text.",
            others=others,
        )
