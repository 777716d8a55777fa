"""headroom, underflow, lost-updates: where the element type is too narrow for the numbers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from hookline.rules.findings import Finding
from hookline.rules.rule import Rule
from hookline.rules.steps import Step, name_site
from hookline.rules.windows import grow
from hookline.rules.wording import say_number, say_others, say_share
from hookline.runs.step_sources import Floats, Integers

_WIDE = 3.3e38
"""The largest float32 and bfloat16, nearly: a fill of exactly that is a mask."""


class Headroom(Rule):
    """Find outputs that are close to the largest number of their element type."""

    name = "headroom"
    sees_broken = False

    def __init__(self, share: float = 1 / 8, wide: float = 1e30) -> None:
        self.share = share
        """How much of the range of a narrow type (float16, float8) may be used."""
        self.wide = wide
        """How large a number of any other type may be."""

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at the largest and the smallest output."""
        roster = step.roster
        limit = np.where(np.isfinite(roster.largest), roster.largest * self.share, self.wide)
        found = roster.is_value & (step.stat("absmax") > limit)
        if not found.any():
            return
        high, low = step.stat("max"), step.stat("min")
        # A large negative number beside small positive ones fills a mask: it is meant to be there.
        reach = np.maximum(high, np.where(64 * high >= -low, -low, 0.0))
        is_fill = np.isclose(reach, roster.largest, rtol=1e-6) | (reach >= _WIDE)
        at = np.flatnonzero(found & (reach > limit) & ~is_fill)
        if not len(at):
            return
        site = step.sites[at[0]]
        value, most = reach[at[0]], limit[at[0]]
        others = [name_site(step.sites[one]) for one in at[1:]]
        yield self.find(
            step,
            site,
            value=value,
            threshold=most,
            message=(
                f"{name_site(site)} reached {say_number(value)} at step {step.number}, more than "
                f"{say_number(most)}: {site.dtype} ends at "
                f"{say_number(min(roster.largest[at[0]], 3.4e38))}, and little is left before "
                f"infinity.{say_others(others, 'site')}"
            ),
            evidence=[f"step {step.number}: {say_number(low[at[0]])} to {say_number(high[at[0]])}"],
            hint=(
                "Run this module in bfloat16 or float32 (torch.autocast(enabled=False) around "
                "it), or keep its values small: normalise its input, scale its weights down."
            ),
            others=others,
        )


class Underflow(Rule):
    """Find gradients that are too small for float16: most elements are below its normal numbers."""

    name = "underflow"
    sees_broken = False

    def __init__(self, share: float = 0.5, times: int = 2) -> None:
        self.share = share
        """How many of the elements that are not zero may be below the normal numbers."""
        self.times = times
        """In so many counted steps in a row it has to show."""
        self._in_a_row = 0
        self._most = 0.0

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at the steps in which elements were counted."""
        roster = step.roster
        is_narrow = (roster.is_gradient | roster.is_parameter_gradient) & (roster.smallest > 0)
        if not is_narrow.any():
            return
        total = np.sqrt(np.nansum(step.stat("l2")[is_narrow] ** 2))
        self._most = max(self._most, total)
        if not step.has("counts"):
            return
        counts, is_counted = step.spread("counts")
        counted = is_narrow & is_counted & (roster.size >= 16)
        filled = step.stat("count") - counts[:, 0]
        scale = step.scalars.get("grad_scale", 1.0)
        # Of the elements that are not zero, since a ReLU makes zeros and loses nothing by it.
        rms = step.stat("l2") * scale / np.sqrt(np.maximum(filled, 1))
        judged = np.flatnonzero(counted & (filled > 0))
        # At convergence gradients become small, and nothing is lost any more.
        if not len(judged) or total < 0.01 * self._most:
            return
        share = counts[judged, 1] / filled[judged]
        is_lost = (share > self.share) & (rms[judged] < roster.smallest[judged])
        self._in_a_row = self._in_a_row + 1 if is_lost.mean() > 0.5 else 0
        if self._in_a_row < self.times:
            return
        at = judged[is_lost]
        worst = int(np.argmax(np.where(is_lost, share, 0)))
        site = step.sites[judged[worst]]
        others = [name_site(step.sites[one]) for one in at if one != judged[worst]]
        scaled = f"at the loss scale {say_number(scale)}" if scale != 1 else "without a loss scale"
        yield self.find(
            step,
            site,
            value=share[worst],
            threshold=self.share,
            message=(
                f"{say_share(share[worst])} of the elements of {name_site(site)} that are not zero "
                f"are below the normal numbers of {site.dtype} at step {step.number} (at most "
                f"{say_share(self.share)} is fine): gradients are rounded away {scaled}."
                f"{say_others(others, 'gradient')}"
            ),
            evidence=[
                f"rms of what is not zero: {say_number(rms[judged[worst]])}; "
                f"smallest normal number: {say_number(roster.smallest[judged[worst]])}"
            ],
            hint=(
                "Scale the loss: scaler = torch.amp.GradScaler(), scaler.scale(loss).backward(), "
                "scaler.step(optimizer), scaler.update(). Or train in bfloat16."
            ),
            others=others,
        )


class LostUpdates(Rule):
    """Find updates that are too small to change weights: coarse ones, or very large ones."""

    name = "lost-updates"
    sees_broken = False

    def __init__(self, share: float = 0.5, window: int = 20, *, large: float = 100.0) -> None:
        self.share = share
        """How many of the elements with a gradient may stay as they were."""
        self.window = window
        """Over so many steps."""
        self.large = large
        """Weights of this size (rms) are judged whatever their type, from the start on."""
        self._shares: deque[float] = deque(maxlen=window)
        self._still: Floats = np.zeros(0)
        """For how many steps a large weight has lost most updates; NaN for one that moved."""
        self._rate = 0.0
        self._is_done = False

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at all coarse weight matrices together, and at large ones one by one."""
        roster = step.roster
        updates = roster.update_of[roster.matrices]
        updates = updates[updates >= 0]
        if not len(updates) or self._is_done:
            return
        rate = step.scalars.get("lr", np.nan)
        self._rate = np.fmax(self._rate, rate)
        # Where a schedule ends, updates become small because they are meant to.
        if not step.has("updates") or step.is_skipped or rate < 0.1 * self._rate or rate == 0:
            return
        coarse = updates[roster.is_coarse[updates]]
        for finding in (*self._judge_coarse(step, coarse), *self._judge_large(step, updates)):
            self._is_done = True
            yield finding
            return

    def _judge_coarse(self, step: Step, updates: Integers) -> Iterator[Finding]:
        values, is_there = step.spread("updates")
        given, lost = values[updates, 0] * is_there[updates], values[updates, 1] * is_there[updates]
        if not given.sum():
            return
        self._shares.append(float(lost.sum() / given.sum()))
        share = float(np.median(self._shares))
        if len(self._shares) == self.window and share > self.share:
            yield self._explain(step, updates, lost / np.maximum(given, 1), share=share)

    def _judge_large(self, step: Step, updates: Integers) -> Iterator[Finding]:
        """Look at weights that are so large that they have too few digits in any type.

        Some of their elements move, the small ones: where none does, the rate is zero. Only from
        the start: what has moved before has converged.
        """
        self._still = grow(self._still, len(step.sites), 0.0)
        size = step.stat("weight_l2")[updates] / np.sqrt(step.roster.size[updates])
        at = updates[size > self.large]
        at = at[step.stat("l2")[at] > 0]
        if not len(at):
            return
        shares = step.stat("lost")[at]
        self._still[at] = np.where(shares > self.share, self._still[at] + 1, np.nan)
        is_due = self._still[at] == self.window
        if is_due.any():
            found = shares[is_due]
            yield self._explain(step, at[is_due], found, share=float(found.max()))

    def _explain(self, step: Step, updates: Integers, shares: Floats, *, share: float) -> Finding:
        order = np.argsort(-shares, kind="stable")
        site = step.sites[updates[order[0]]]
        others = [name_site(step.sites[updates[one]]) for one in order[1:] if shares[one] > 0.5]
        size = step.stat("weight_l2")[updates[order[0]]] / np.sqrt(math.prod(site.shape))
        return self.find(
            step,
            site,
            value=share,
            threshold=self.share,
            message=(
                f"{say_share(share)} of the weights that have a gradient do not change: "
                f"over {self.window} steps up to step {step.number} the optimizer's updates are "
                f"rounded away in {site.dtype} (more than {say_share(self.share)} is too much), "
                f"most of all in {name_site(site)}."
            ),
            evidence=[
                f"step {step.number}: {say_share(shares[one])} lost in "
                f"{name_site(step.sites[updates[one]])}"
                for one in order[:3]
            ]
            + [f"the weights of {site.module or 'the model'} have an rms of {say_number(size)}"],
            hint=(
                "Keep the weights in float32 and compute in bfloat16 with torch.autocast, use an "
                "optimizer with float32 copies of the weights, or raise the learning rate."
                if step.roster.is_coarse[updates[order[0]]]
                else "Initialise these weights smaller, about 1 and below, or raise the learning "
                "rate."
            ),
            others=others,
        )
