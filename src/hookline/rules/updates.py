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
        decayed: float = 1e-6,
    ) -> None:
        self.most = most
        """How much of a weight a step may change, as the median over the window."""
        self.least = least
        """How much at least one weight has to change."""
        self.window = window
        """So many steps."""
        self.at_once = at_once
        """How much of most weights a single step may change that leaves a larger loss behind."""
        self.again = again
        """How much of them each of three steps among ten may change."""
        self.decayed = decayed
        """How far below its largest the learning rate may be for a quarter of the steps."""
        self._ratios = Window(window)
        self._typical: list[float] = []
        self._steps = 0
        self._trend = LossTrend()
        self._largest = 0.0
        self._shock: _Shock | None = None
        self._decay = _Decay(decayed, window)
        self._is_done = False

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at the updates of the weight matrices."""
        if step.is_skipped:
            return
        if self._decay.add(step) and not self._trend.is_below(0.05):
            yield self._explain_decay(step)
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
        shock = self._shock
        if shock is not None and shock.leaves_larger_loss(step):
            yield self._too_large(
                shock.step, shock.matrices, shock.ratios, limit=self.at_once, steps=1
            )
            return
        if typical[-1] > self.at_once and (shock is None or shock.is_over):
            # One step says little: a weight that begins small has to grow to what it should be.
            self._shock = _Shock(step, matrices, ratios, loss=self._trend.recent)
        if typical[-1] > self.again and (typical > self.again).sum() >= 3:
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

    def _explain_decay(self, step: Step) -> Finding:
        rate, largest = self._decay.rate, self._decay.largest
        return self.find(
            step,
            "",
            value=rate / largest,
            threshold=self.decayed,
            message=(
                f"The learning rate has decayed to {say_number(rate)} and has been next to "
                f"nothing since step {self._decay.since}: at step {step.number} it is "
                f"{say_number(rate / largest)} of its largest ({say_number(largest)}), and nothing "
                "is learned any more."
            ),
            evidence=[
                f"below {say_number(self.decayed)} of its largest in {self._decay.low} of "
                f"{self._decay.steps} steps so far"
            ],
            hint=(
                "Look at where the scheduler steps: one made for epochs that steps with every "
                "batch decays far too early. Or give it the number of steps that there are."
            ),
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


class _Shock:
    """A single step that changed most weights by far more than their size, and what came of it."""

    def __init__(self, step: Step, matrices: Integers, ratios: Floats, *, loss: float) -> None:
        self.step = step
        self.matrices = matrices
        self.ratios = ratios
        # Its own loss is of the weights before it, and may be that of a bad batch.
        self._before = float(np.fmin(loss, step.scalars.get("loss", np.nan)))
        self._after: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether it has been seen what came of it."""
        return len(self._after) >= 5

    def leaves_larger_loss(self, step: Step) -> bool:
        """Take a step after it; tell whether the loss of five of them is clearly above before."""
        if not self.is_over:
            self._after.append(step.scalars.get("loss", np.nan))
            return self.is_over and bool(np.median(self._after) > 1.5 * self._before > 0)
        return False


class _Decay:
    """For how long the learning rate has been next to nothing beside its largest."""

    def __init__(self, share: float, window: int) -> None:
        self.largest = 0.0
        self.rate = 0.0
        self.since = 0
        self.low = 0
        self.steps = 0
        self._share = share
        self._window = window
        self._is_done = False

    def add(self, step: Step) -> bool:
        """Take a step; tell, once, whether it has been so for too long."""
        self.steps += 1
        self.rate = step.scalars.get("lr", np.nan)
        self.largest = float(np.fmax(self.largest, self.rate))
        if not self.rate < self._share * self.largest:
            self.low = 0
            return False
        self.since = self.since if self.low else step.number
        self.low += 1
        # Where a schedule ends in nothing it is so for the last few steps.
        if self._is_done or self.low < self._window or self.low <= 0.25 * self.steps:
            return False
        self._is_done = True
        return True
