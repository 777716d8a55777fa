"""init-scale: outputs that are far too large or too small before anything was learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from hookline.rules.depth import Slope, find_slope
from hookline.rules.findings import Finding
from hookline.rules.rule import Rule
from hookline.rules.steps import Step, name_site
from hookline.rules.wording import say_number, say_others
from hookline.runs.step_sources import Floats, Integers


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
        """How large the spread may be."""
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
        large = self._find_large(step, at, profile)
        if growth is not None and is_growing and growth.is_gradual(self.part):
            yield self._explain(step, at, profile, slope=growth, word="grow")
        elif fall is not None and fall.factor > self.factor and fall.is_gradual(self.part):
            yield self._explain(step, at[::-1], profile[::-1], slope=fall, word="shrink")
        elif large:
            yield self._explain_large(step, large)
        elif len(profile):
            yield from self._judge_gains(step, at, profile)

    def _find_large(self, step: Step, at: Integers, profile: Floats) -> list[int]:
        """List the outputs that are too large, in the order of execution.

        Of layers those with usual weights, which were given large numbers then: large weights may
        have learned to give them. And none whose output is normalised, or divided, which shows in
        what the next layer makes of it.
        """
        tables = step.roster.tables
        found = set(tables[step.stat("std")[tables] > self.most].tolist())
        gains = self._measure_gains(step)
        taken = profile if len(profile) == 1 else np.append(profile[1:], 0.0)
        for place in np.flatnonzero(profile > self.most).tolist():
            is_usual = gains.get(step.sites[at[place]].module, np.inf) <= self.gain
            if is_usual and taken[place] > self.most / 10:
                found.add(int(at[place]))
        return sorted(found)

    def _measure_gains(self, step: Step) -> dict[str, float]:
        """Tell of each layer how many times larger than its input its output is, by its weights."""
        matrices = step.roster.layer_matrices
        gains = step.stat("l2")[matrices] / step.roster.usual_norm[matrices]
        return {
            step.sites[one].module: float(gain)
            for one, gain in zip(matrices.tolist(), gains, strict=True)
            if gain > 0
        }

    def _explain_large(self, step: Step, large: list[int]) -> Finding:
        spread, site = step.stat("std"), step.sites[large[0]]
        others = [name_site(step.sites[one]) for one in large[1:]]
        is_table = bool(step.roster.is_table[large[0]])
        what = "weights of this table smaller" if is_table else "weights before it smaller"
        return self.find(
            step,
            site,
            value=float(spread[large[0]]),
            threshold=self.most,
            message=(
                f"The output of {name_site(site)} has a spread (std) of "
                f"{say_number(spread[large[0]])} at step {step.number}, before anything is "
                f"learned; up to {say_number(self.most)} is fine.{say_others(others, 'layer')}"
            ),
            evidence=[
                f"{name_site(step.sites[one])}: std {say_number(spread[one])}" for one in large[:5]
            ],
            hint=(
                "Normalise the input data (subtract the mean, divide by the standard deviation), "
                f"or make the initial {what}; about 1 is usual."
            ),
            others=others,
        )

    def _judge_gains(self, step: Step, at: Integers, profile: Floats) -> Iterator[Finding]:
        """Look at the weights themselves: normalisation may hide what they do to the values.

        Weights that are large by design have a factor beside them: then outputs are as usual.
        """
        matrices = step.roster.layer_matrices
        gains = step.stat("l2")[matrices] / step.roster.usual_norm[matrices]
        matrices, gains = matrices[~np.isnan(gains)], gains[~np.isnan(gains)]
        # Of a single layer nothing is usual: it may have been trained before.
        gain, spread = np.median(gains) if len(gains) > 1 else 0.0, np.median(profile)
        if not (gain > self.gain and spread > self.gain):
            return
        worst = int(np.argmax(gains))
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
