"""exploding: gradients that grow towards the input, and trainings that diverge."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from hookline.rules.depth import Slope, find_slope, gradient_profile
from hookline.rules.findings import Finding
from hookline.rules.rule import Rule
from hookline.rules.steps import Step, name_site
from hookline.rules.windows import Window, grow
from hookline.rules.wording import say_number
from hookline.runs.step_sources import Floats, Integers

_LOWER_RATE = "Lower the learning rate, warm it up, or clip gradients (clip_grad_norm_)."


class Exploding(Rule):
    """Find gradients that grow from layer to layer, and losses that grow instead of falling."""

    name = "exploding"
    sees_broken = False

    def __init__(
        self,
        factor: float = 1e4,
        *,
        times: float = 10.0,
        growth: float = 100.0,
        window: int = 20,
        part: float = 0.35,
    ) -> None:
        self.factor = factor
        """How many times the gradient of a layer may be above that at the loss."""
        self.times = times
        """How many times the loss and the gradients may be above those of the beginning."""
        self.growth = growth
        """How many times an output may grow while the loss rises."""
        self.window = window
        """Profiles are medians over so many steps."""
        self.part = part
        """The share of a growth over depth that a single layer may have at most."""
        self._norms = Window(window)
        self._start = _Start()
        self._steps = 0
        self._is_done = False

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at the loss, the total gradient, the outputs, and the profile of gradients."""
        if self._is_done or step.is_skipped:
            return
        self._steps += 1
        self._start.add(step)
        for finding in self._judge(step):
            self._is_done = True
            yield finding
            return

    def _judge(self, step: Step) -> Iterator[Finding]:
        yield from self._judge_course(step)
        layers = step.roster.gradients_of_layers
        if len(layers):
            norms = np.full(len(step.sites), np.nan)
            norms[layers] = step.stat("l2")[layers]
            self._norms.add(norms)
            if self._steps >= self.window and (self._steps - self.window) % 5 == 0:
                yield from self._judge_profile(step)

    def _judge_course(self, step: Step) -> Iterator[Finding]:
        """Compare with how the training began."""
        start = self._start
        loss = start.recent_loss
        if not (loss > 1.2 * start.loss or start.recent_norm > self.times * start.norm):
            return
        site, growth = start.find_growth(step)
        where = "" if site < 0 else name_site(step.sites[site])
        if loss > self.times * start.loss:
            yield self.find(
                step,
                where if growth > 3 else "",
                value=loss / start.loss,
                threshold=self.times,
                message=(
                    f"The training diverges: at step {step.number} the loss is {say_number(loss)} "
                    f"(median of 5 steps), {say_number(loss / start.loss)} times what it was at "
                    f"the beginning ({say_number(start.loss)}; up to {say_number(self.times)} "
                    "times is fine)."
                ),
                evidence=[*start.show(), *_show_growth(where, growth)],
                hint=_LOWER_RATE,
            )
        elif start.recent_norm > self.times * start.norm and loss > 2 * start.trailing_loss:
            yield self.find(
                step,
                where if growth > 3 else "",
                value=start.recent_norm / start.norm,
                threshold=self.times,
                message=(
                    f"The gradient explodes: at step {step.number} its total norm is "
                    f"{say_number(start.recent_norm)}, {say_number(start.recent_norm / start.norm)}"
                    f" times what it was at the beginning (up to {say_number(self.times)} times "
                    "is fine), and the loss grows."
                ),
                evidence=[*start.show(), *_show_growth(where, growth)],
                hint=_LOWER_RATE,
            )
        elif growth > self.growth and loss > 1.2 * start.loss:
            yield self.find(
                step,
                step.sites[site],
                value=growth,
                threshold=self.growth,
                message=(
                    f"The output of {where} grows without end: at step {step.number} it is "
                    f"{say_number(growth)} times what it was at the beginning (up to "
                    f"{say_number(self.growth)} times is fine), and the loss rises."
                ),
                evidence=[*start.show(), *_show_growth(where, growth)],
                hint=f"{_LOWER_RATE} Weight decay or a normalisation layer keeps outputs small.",
            )

    def _judge_profile(self, step: Step) -> Iterator[Finding]:
        at, profile = gradient_profile(self._norms, step)
        slope = find_slope(profile[::-1])
        if slope is not None and slope.factor > self.factor and slope.is_gradual(self.part):
            yield self._explain(step, at[::-1], profile[::-1], slope=slope)

    def _explain(self, step: Step, at: Integers, profile: Floats, *, slope: Slope) -> Finding:
        peak, loss_side = step.sites[at[slope.peak]], step.sites[at[slope.start]]
        shown = np.unique(np.linspace(0, len(at) - 1, 6).astype(int))[::-1]
        return self.find(
            step,
            peak,
            value=slope.factor,
            threshold=self.factor,
            message=(
                f"The gradient explodes on its way to the first layers: at {name_site(peak)} it is "
                f"{say_number(slope.factor)} times that of {name_site(loss_side)} (median over "
                f"{self.window} steps up to step {step.number}; up to {say_number(self.factor)} "
                "times is fine)."
            ),
            evidence=[
                f"{name_site(step.sites[at[n]])}: norm {say_number(profile[n])}" for n in shown
            ],
            hint=(
                "Make the initial weights smaller (torch.nn.init.kaiming_normal_), add "
                "normalisation layers, or clip gradients (clip_grad_norm_)."
            ),
        )


def _show_growth(where: str, growth: float) -> list[str]:
    if not where or not growth > 3:
        return []
    return [f"{where}: rms {say_number(growth)} times that of the beginning"]


class _Start:
    """How a training began, and where it is now: loss, gradients, outputs.

    The beginning are the first ten steps, or fewer where they change the weights by a third: what
    comes after that is no beginning any more.
    """

    def __init__(self) -> None:
        self.loss = np.nan
        self.norm = np.nan
        self._first = np.nan
        self._rms: Floats = np.zeros(0)
        self._now: deque[Floats] = deque(maxlen=3)
        self._moved = 0.0
        self._steps = 0
        self._losses: deque[float] = deque(maxlen=100)
        self._norms: deque[float] = deque(maxlen=5)
        self._is_signed = False

    def add(self, step: Step) -> None:
        """Take a step."""
        roster = step.roster
        loss = step.scalars.get("loss", np.nan)
        self._is_signed |= loss < 0
        gradients = step.stat("l2")[roster.is_parameter_gradient | roster.is_gradient]
        norm = float(np.sqrt(np.nansum(gradients**2)))
        rms = np.where(roster.size[roster.layers] >= 4, step.stat("rms")[roster.layers], np.nan)
        now = np.full(len(roster), np.nan)
        now[roster.layers] = rms
        self._rms = grow(self._rms, len(roster))
        is_beginning = self._steps < 10 and self._moved < 0.3
        if is_beginning:
            self.loss, self.norm = np.fmax(self.loss, loss), np.fmax(self.norm, norm)
        # A layer that begins at zero gives nothing before its first steps.
        if is_beginning or self._steps < 3:
            self._rms = np.fmax(self._rms, now)
        else:
            self._rms = np.where(np.isnan(self._rms), now, self._rms)
        _, ratios = step.update_ratios
        if len(ratios):
            self._moved += float(np.median(ratios))
        self._steps += 1
        self._first = loss if np.isnan(self._first) else self._first
        self._losses.append(loss)
        self._norms.append(norm)
        self._now.append(now)

    @property
    def recent_loss(self) -> float:
        """The loss now: the median of five steps; NaN where it is not known, or has a sign."""
        if self._is_signed or len(self._losses) < 6:
            return np.nan
        return float(np.median(list(self._losses)[-5:]))

    @property
    def trailing_loss(self) -> float:
        """The loss of the steps before."""
        earlier = list(self._losses)[:-5]
        return float(np.median(earlier)) if earlier else np.nan

    @property
    def recent_norm(self) -> float:
        """The total norm of gradients now: the median of five steps."""
        return float(np.median(self._norms)) if len(self._norms) == 5 else np.nan

    def find_growth(self, step: Step) -> tuple[int, float]:
        """Find the layer whose output has grown the most since the beginning."""
        now = self._now[0]
        for other in list(self._now)[1:]:
            now = np.fmin(grow(now, len(other)), other)
        # What began at nothing is held against what is usual here.
        usual = np.nanmedian(self._rms) if np.isfinite(self._rms).any() else np.nan
        growth = grow(now, len(self._rms)) / np.fmax(self._rms, 0.1 * usual)
        if not np.isfinite(growth).any():
            return -1, np.nan
        return int(np.nanargmax(growth)), float(np.nanmax(growth))

    def show(self) -> list[str]:
        """Write how it went."""
        return [f"first loss {say_number(self._first)}, latest loss {say_number(self._losses[-1])}"]
