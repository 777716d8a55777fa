"""dead-units, outlier-channels: what the units of a layer do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from hookline.rules.findings import Finding
from hookline.rules.rule import Rule
from hookline.rules.steps import Step, name_site
from hookline.rules.windows import LossTrend, grow
from hookline.rules.wording import say_number, say_others, say_share
from hookline.runs.step_sources import Floats, Integers


class DeadUnits(Rule):
    """Find layers in which most units have been exactly zero for all inputs of many steps."""

    name = "dead-units"
    sees_broken = False

    def __init__(
        self,
        share: float = 0.6,
        *,
        alone: float = 0.25,
        most: float = 0.75,
        error: float = 0.9,
        window: int = 20,
    ) -> None:
        self.share = share
        """How many units of a layer may be dead while hardly any are in the others."""
        self.alone = alone
        """How many may be dead in the usual layer for that."""
        self.most = most
        """How many may be dead in any layer: where inputs are alike, half of them always are."""
        self.error = error
        """From here on it is an error."""
        self.window = window
        """A unit is dead that was zero in so many measured steps."""
        self._flows: deque[bool] = deque(maxlen=window)
        self._trend = LossTrend()
        self._first: Floats = np.zeros(0)
        """The shares of the first full window."""
        self._worst = ""

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at the activations, and at the rows of weight gradients."""
        self._trend.add(step.scalars)
        if not step.has("units") or self._worst == "error":
            return
        roster = step.roster
        self._flows.append(bool((step.stat("l2")[roster.is_parameter_gradient] > 0).any()))
        shares = np.where(step.stat("window") >= self.window, step.stat("dead_share"), np.nan)
        shares[step.stat("units") < 8] = np.nan
        self._first = grow(self._first, len(shares))
        self._first = np.where(np.isnan(self._first), shares, self._first)
        limit = self._choose_limits(step, shares)
        is_judged = roster.is_value
        # Rows without a gradient mean nothing once no gradient flows at all, when all is learned;
        # nor those of the last layer, whose outputs may not all be used.
        if sum(self._flows) > self.window // 2:
            has_run = step.stat("count")[roster.value_beside] > 0
            is_row = roster.is_parameter_gradient & ~roster.is_of_last_layer & has_run
            # Where no row has a gradient and the output is alive, nothing comes back to it at all.
            is_row &= (shares < 1) | (step.stat("max")[roster.value_beside] <= 0)
            is_judged = is_judged | is_row
        at = np.flatnonzero(is_judged & (shares >= limit) & ~roster.is_table)
        severity = "error" if (shares[at] >= self.error).any() else "warning"
        if len(at) and severity != self._worst:
            self._worst = severity
            at = at[shares[at] >= self.error] if severity == "error" else at
            yield self._explain(step, at, shares=shares, limit=limit)

    def _choose_limits(self, step: Step, shares: Floats) -> Floats:
        """Choose how many may be dead: of few units, or for few inputs, many are by chance."""
        roster, units = step.roster, step.stat("units")
        inputs = step.stat("count")[roster.value_beside] / units
        usual = np.nanmedian(shares) if np.isfinite(shares).sum() > 2 else np.nan
        is_alone = (units >= 32) & (inputs >= 8) & (not usual > self.alone)
        limit = np.where(is_alone, self.share, self.most)
        if self._trend.is_below(0.8):
            # Units that go out while it learns are not missed.
            limit = np.where(self._first >= limit, limit, max(self.error, self.most))
        return np.where((units < 16) | (inputs < 8), max(self.error, self.most), limit)

    def _explain(self, step: Step, at: Integers, *, shares: Floats, limit: Floats) -> Finding:
        root = self._choose(step, at)
        site, share = step.sites[root], float(shares[root])
        others = [name_site(step.sites[one]) for one in at if one != root]
        units = step.stat("units")[root]
        return self.find(
            step,
            site,
            severity="error" if share >= self.error else "warning",
            value=share,
            threshold=limit[root],
            message=(
                f"{say_share(share)} of the {units:.0f} units of {_layer(step, root)} are dead: "
                f"exactly zero for every input of the last {self.window} measured steps up to "
                f"step {step.number} (fewer than {say_share(limit[root])} is fine)."
                f"{say_others(others, 'site')}"
            ),
            evidence=[
                f"{name_site(step.sites[one])}: {step.stat('dead')[one]:.0f} of "
                f"{step.stat('units')[one]:.0f} dead"
                for one in (root, *[n for n in at if n != root][:3])
            ],
            hint=(
                "Lower the learning rate, begin with biases of zero, or use an activation that is "
                "never flat, such as LeakyReLU or GELU."
            ),
            others=others,
        )

    def _choose(self, step: Step, at: Integers) -> int:
        """Choose the layer that it comes from: the first that gives nothing above zero."""
        roster = step.roster
        values = [one for one in at if roster.is_value[one]]
        if values:
            return int(values[0])
        highest = step.stat("max")
        for one in at:
            output = roster.first_value.get(roster.sites[one].module, -1)
            if output >= 0 and highest[output] <= 0:
                return int(one)
        order = [roster.first_value.get(roster.sites[one].module, len(roster)) for one in at]
        return int(at[int(np.argmin(order))])


def _layer(step: Step, number: int) -> str:
    site = step.sites[number]
    return name_site(site) if step.roster.is_value[number] else (site.module or name_site(site))


class OutlierChannels(Rule):
    """Find layers with a channel that is far larger than the others."""

    name = "outlier-channels"
    severity = "info"
    sees_broken = False

    def __init__(
        self,
        factor: float = 20.0,
        *,
        table: float = 50.0,
        far: float = 100.0,
        channels: int = 16,
        times: int = 3,
    ) -> None:
        self.factor = factor
        """How many times the largest channel may be above the middle one."""
        self.table = table
        """The same in a table to look up in, whose channels differ more by nature."""
        self.far = far
        """What is so many times above it is told one measured step sooner."""
        self.channels = channels
        """In layers of so many channels at least."""
        self.times = times
        """In so many measured steps in a row it has to show."""
        self._in_a_row: Floats = np.zeros(0)
        self._is_done = False

    def see(self, step: Step) -> Iterable[Finding]:
        """Look at the layers that another layer follows."""
        if step.has("units") and not self._is_done and len(step.roster.layers):
            yield from self._judge(step, step.stat("outlier"))

    def _judge(self, step: Step, outliers: Floats) -> Iterator[Finding]:
        roster = step.roster
        is_own = ~roster.is_table
        is_own[roster.tables] = True
        is_judged = roster.is_value & is_own & roster.is_before_last_layer
        is_judged &= (step.stat("units") >= self.channels) & np.isfinite(outliers)
        # A layer that begins at zero has channels that have not begun yet.
        largest = step.stat("absmax")[roster.layers]
        largest = largest[~np.isnan(largest)]
        is_judged &= step.stat("absmax") >= (np.median(largest) if len(largest) else np.inf)
        self._in_a_row = grow(self._in_a_row, len(outliers), 0.0)
        limit = np.where(roster.is_table, self.table, self.factor)
        is_high = is_judged & (outliers > limit)
        self._in_a_row = np.where(is_high, self._in_a_row + 1, self._in_a_row * ~is_judged)
        times = np.where(outliers > self.far, max(1, self.times - 1), self.times)
        at = np.flatnonzero(self._in_a_row >= times)
        if not len(at):
            return
        self._is_done = True
        site, value = step.sites[at[0]], float(outliers[at[0]])
        others = [name_site(step.sites[one]) for one in at[1:]]
        yield self.find(
            step,
            site,
            value=value,
            threshold=limit[at[0]],
            message=(
                f"One channel of {name_site(site)} is {say_number(value)} times as large as the "
                f"middle one at step {step.number} (more than {say_number(limit[at[0]])} stands "
                f"out); it takes the range from the others in low precision."
                f"{say_others(others, 'layer')}"
            ),
            evidence=[
                f"{name_site(step.sites[one])}: {say_number(outliers[one])} times" for one in at[:4]
            ],
            hint=(
                "Before you quantise, treat this channel by itself; in training, weight decay or "
                "a normalisation of what comes before keeps it small."
            ),
            others=others,
        )
