"""update-ratio: weights that change too much in a step, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from hookline.rules.findings import Finding
from hookline.rules.rule import Rule
from hookline.rules.steps import Step, name_site
from hookline.rules.windows import LossTrend, Window
from hookline.rules.wording import say_number, say_others
from hookline.runs.step_sources import Floats, Integers


class UpdateRatio(Rule):
    """Find learning rates that are far too large, or too small to matter."""

    name = "update-ratio"
    sees_broken = False

    def __init__(
        self,
        most: float = 0.3,
        least: float = 1e-7,
        *,
        window: int = 20,
        at_once: float = 3.0,
        again: float = 1.0,
    ) -> None:
        self.most = most
        """How much of a weight a step may change, as the median over the window."""
        self.least = least
        """How much at least one weight has to change."""
        self.window = window
        """So many steps."""
        self.at_once = at_once
        """How much of most weights a single step may change."""
        self.again = again
        """The same of three steps among ten."""
        self._ratios = Window(window)
        self._typical: list[float] = []
        self._steps = 0
        self._trend = LossTrend()
        self._largest = 0.0
        self._is_done = False

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at the updates of the weight matrices."""
        if step.is_skipped:
            return
        matrices, ratios = step.update_ratios
        if not len(matrices) or self._is_done:
            return
        self._steps += 1
        self._trend.add(step.scalars)
        self._largest = max(self._largest, float(ratios.max()))
        self._typical = [*self._typical[-9:], float(np.median(ratios))]
        values = np.full(len(step.sites), np.nan)
        values[matrices] = ratios
        self._ratios.add(values)
        for finding in self._judge(step, matrices, ratios):
            self._is_done = True
            yield finding

    def _judge(self, step: Step, matrices: Integers, ratios: Floats) -> Iterator[Finding]:
        typical = np.array(self._typical)
        if typical[-1] > self.at_once:
            yield self._too_large(step, matrices, ratios, limit=self.at_once, steps=1)
        elif typical[-1] > self.again and (typical > self.again).sum() >= 3:
            yield self._too_large(step, matrices, ratios, limit=self.again, steps=3)
        elif self._steps == self.window and self._largest < self.least:
            yield from self._too_small(step, matrices)
        elif self._steps >= self.window and (self._steps - self.window) % 5 == 0:
            medians = self._ratios.medians()
            at = np.flatnonzero(medians > self.most)
            # A training that learns bears its updates, as small models at large rates do.
            if len(at) and not self._trend.is_below(0.95):
                yield self._too_large(step, at, medians[at], limit=self.most, steps=self.window)

    def _too_large(
        self, step: Step, matrices: Integers, ratios: Floats, *, limit: float, steps: int
    ) -> Finding:
        order = np.argsort(-ratios, kind="stable")
        order = order[ratios[order] > limit] if (ratios > limit).any() else order[:1]
        names = [name_site(step.sites[step.roster.update_of[matrices[one]]]) for one in order]
        value = float(ratios[order[0]])
        over = {1: f"in step {step.number}", 3: f"in each of several steps up to {step.number}"}
        when = over.get(steps, f"in each step, over {steps} steps up to step {step.number}")
        rate = step.scalars.get("lr")
        rate_text = "" if rate is None else f" The learning rate is {say_number(rate)}."
        return self.find(
            step,
            step.sites[step.roster.update_of[matrices[order[0]]]],
            value=value,
            threshold=limit,
            message=(
                f"The optimizer changed {names[0].removesuffix(':update')} by {say_number(value)} "
                f"times its own size {when}; more than {say_number(limit)} is too "
                f"much.{rate_text}{say_others(names[1:], 'weight')}"
            ),
            evidence=[
                f"{name}: {say_number(ratios[one])} of its size a step"
                for name, one in zip(names[:4], order, strict=False)
            ],
            hint="Lower the learning rate, ten times at first, or warm it up over the first steps.",
            others=names[1:],
        )

    def _too_small(self, step: Step, matrices: Integers) -> Iterator[Finding]:
        gradients = step.roster.gradient_of[matrices]
        has_gradient = step.stat("l2")[gradients[gradients >= 0]] > 0
        if not has_gradient.any():
            return
        site = step.sites[step.roster.update_of[matrices[0]]]
        rate = step.scalars.get("lr")
        why = "" if rate is None else f" The learning rate is {say_number(rate)}."
        yield self.find(
            step,
            site,
            value=self._largest,
            threshold=self.least,
            message=(
                f"No weight has changed in the first {self.window} steps up to step "
                f"{step.number}, though gradients arrive: the largest update is "
                f"{say_number(self._largest)} of its weight, less than "
                f"{say_number(self.least)}.{why}"
            ),
            evidence=[f"{len(matrices)} weight matrices, none moves"],
            hint="Raise the learning rate; look at what the schedule gives for the first steps.",
            others=[name_site(step.sites[step.roster.update_of[one]]) for one in matrices[1:]],
        )
