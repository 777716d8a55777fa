"""The verdict on one step: which pair differs first, and what it comes from.

Pairs are walked in the order of execution: everything before the first one past its limit agrees,
so the code that made it is to blame. Where it was given something that is off already, the
difference is followed back to where it became eight times larger than what it was made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from hookline.diffs.blaming import Blaming
from hookline.diffs.causes import Settings
from hookline.diffs.gaps import Gaps
from hookline.diffs.noise import Allowance
from hookline.diffs.overwriting import Overwrite
from hookline.diffs.phases import BACKWARD, DIRECTIONS, FORWARD, Pair
from hookline.diffs.tolerances import (
    EXACT,
    SLOW_LIMITS,
    SUDDEN_LEAF_UNITS,
    SUDDEN_UNITS,
    TABLE,
    TELLING_FLOORS,
    TELLING_GAIN,
    TELLING_UNITS,
    USUAL_UNITS,
    Limits,
)
from hookline.diffs.traces import Trace
from hookline.diffs.tracing_back import Ancestry, Blame

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_CHANGED = "it agreed after the step before: something else than the optimizer changed it"

_GRADUAL_GAIN = 3.0
"""A difference that never grows by more than this at one place has no place."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Say where a difference comes from."""

    pair: Pair
    """The pair that shows it first."""

    blame: Blame
    """Whose code made it."""

    r_in: float = 0.0
    """The largest relative error of what it was made of."""

    gain: float = math.inf
    """How much larger it is than that, or than rounding."""

    is_gradual: bool = False
    """Whether it grew little by little."""

    word: str = ""
    """What else there is to say of it."""

    direction: str = ""
    """In which part of the step it shows."""


@dataclass(slots=True)
class Judgement:
    """Judge one step."""

    traces: tuple[Trace, Trace]
    """What is compared."""

    pairs: Sequence[Pair]
    """The pairs in the order of judging."""

    gaps: Gaps
    """How far apart they are in this step."""

    limits: Limits
    """What they may be."""

    ancestry: Ancestry
    """What each was made of."""

    settings: Settings
    """What is set otherwise."""

    wide: Floats
    """The limits of this step: wider where the weights differ from earlier steps on."""

    overwrites: Sequence[Overwrite] = ()
    """The modules that write into what they are given."""

    is_first: bool = True
    """Whether it is the first step: its parameters and buffers are judged, too."""

    changed: frozenset[int] = frozenset()
    """The places of parameters that something else than training has changed before this step."""

    allowance: Allowance = field(init=False)
    """What is noise."""

    blaming: Blaming = field(init=False)
    """Whose code made what."""

    def __post_init__(self) -> None:
        self.allowance = Allowance(self.pairs, self.ancestry, gaps=self.gaps, limits=self.limits)
        self.blaming = Blaming(self.traces, self.ancestry, self.settings, self.overwrites)

    def limit(self, pair: Pair) -> float:
        """Give what a pair may differ by in this step."""
        return self.allowance.widen(pair, float(self.wide[pair.place]))

    def is_past(self, pair: Pair) -> bool:
        """Tell whether a pair is past its limit, noise or not."""
        return float(self.gaps.r[pair.place]) > self.limit(pair)

    def differs(self, pair: Pair) -> bool:
        """Tell whether a pair differs."""
        is_told = pair.is_early_state and not self.is_first and pair.place not in self.changed
        if is_told or self.is_cut_otherwise(pair):
            return False
        is_off = self.is_past(pair) and not self.allowance.is_noise(pair)
        return is_off and not self.is_allowed(pair)

    def is_allowed(self, pair: Pair) -> bool:
        """Tell whether the error of a pair is what the user allowed at a site that it is made of.

        It is where it became nowhere on the way much larger than what it was made of.
        """
        if not self.limits.is_allowed.any():
            return False
        seen: set[int] = set()
        here: Pair | None = pair
        while here is not None and here.place not in seen:
            seen.add(here.place)
            _, gain, source = self.measure_gain(here)
            if source is None or gain >= TELLING_GAIN:
                return False
            if self.limits.is_allowed[source.place]:
                return not self.is_past(source)
            here = source
        return False

    def is_cut_otherwise(self, pair: Pair) -> bool:
        """Tell whether something of other sizes on each side lies within one that gives the same.

        Two that route their rows to others in other ways come to the same in the end.
        """
        is_value = pair.phase == FORWARD
        at = pair if is_value else self.ancestry.of_site.get(pair.value)
        if pair.phase > BACKWARD or at is None or pair.missing or pair.match.is_group:
            return False
        if math.prod(pair.a.shape) == math.prod(pair.b.shape):
            return False
        return any(not self.is_past(one) for one in self.ancestry.results_around(at))

    def find_origin(self) -> Origin | None:
        """Find where the first difference comes from; None: nothing differs."""
        for place in sorted(self.changed):
            if self.differs(self.pairs[place]):
                # It was there before anything of the step ran.
                origin = self._make_origin(self.pairs[place])
                return replace(origin, blame=replace(origin.blame, word=_CHANGED))
        shown = (pair for pair in self._find_suspects() if self._shows(pair))
        origins = ((pair, self._follow(pair)) for pair in shown)
        found = next((one for one in origins if not self._is_rounding(*one)), None)
        if self.is_first and (found is None or found[0].phase > FORWARD):
            broken = self._find_ungraded()
            if broken is not None:
                return broken
        return None if found is None else found[1]

    def _is_rounding(self, pair: Pair, origin: Origin) -> bool:
        """Tell whether a difference may be rounding that grew little by little.

        How much that does is not known without a floor: the table holds for a model of some depth.
        """
        at = pair.place
        is_known = not math.isnan(self.limits.floors[at]) or bool(self.limits.is_given[at])
        r = float(self.gaps.r[at])
        return origin.is_gradual and not is_known and r <= SLOW_LIMITS * self.limit(pair)

    def _find_suspects(self) -> list[Pair]:
        """List the pairs that may differ: a look at all at once, since most never do."""
        least = self.wide
        if self.is_first:
            least = np.minimum(least, TELLING_UNITS * self.limits.units)
        with np.errstate(invalid="ignore"):
            return [self.pairs[int(place)] for place in np.flatnonzero(self.gaps.r > least)]

    def measure_gain(self, pair: Pair) -> tuple[float, float, Pair | None]:
        """Give the largest error of what a pair was made of, its gain, and what has that error."""
        largest, source = 0.0, None
        for one in self.ancestry.predecessors(pair):
            r = float(self.gaps.r[one.place])
            if r > largest and not self._is_harmless(one):
                largest, source = r, one
        r = float(self.gaps.r[pair.place])
        usual = float(self.limits.usual[pair.place])
        against = max(largest, usual)
        if math.isinf(r):
            return largest, (1.0 if math.isinf(largest) else math.inf), source
        return largest, (r / against if against else math.inf), source

    def _is_harmless(self, pair: Pair) -> bool:
        return self.is_past(pair) and self.allowance.is_noise(pair)

    def _shows(self, pair: Pair) -> bool:
        """Tell whether a pair differs, or shows what a setting makes likely."""
        if self.is_cut_otherwise(pair):
            return False
        if self.differs(pair) or self._is_sudden(pair):
            return True
        r = float(self.gaps.r[pair.place])
        unit = float(self.limits.units[pair.place])
        # Coarse precisions round by more than any setting shows.
        least = min(TELLING_UNITS * unit, TABLE[self.limits.precisions[pair.place]])
        if (
            pair.phase > BACKWARD
            or not self.is_first
            or self.limits.is_given[pair.place]
            or self.limits.precisions[pair.place] == EXACT
            or not r > least
        ):
            return False
        path = self.blaming.blame(pair).module
        return (
            (self.settings.is_telling(path) or self._is_of_other_class(pair, path))
            and self._stands_out(pair)
            and not self.allowance.is_noise(pair)
        )

    def _is_of_other_class(self, pair: Pair, path: str) -> bool:
        """Tell whether another class made a value of what is the same but for rounding.

        Of a module that calls others the class says nothing: the same is written in many ways.
        """
        return (
            pair.phase == FORWARD
            and path not in self.ancestry.parents
            and self.settings.is_other_class(path)
            and self.measure_gain(pair)[0] <= USUAL_UNITS * float(self.limits.units[pair.place])
        )

    def _is_sudden(self, pair: Pair) -> bool:
        """Tell whether a value differs by more than rounding while all it is made of is equal.

        A floor holds the rounding of everything before the site, of which nothing happened here.
        How much the module itself makes of rounding is what its floor has grown by.
        """
        at, r = pair.place, float(self.gaps.r[pair.place])
        floor, unit = float(self.limits.floors[at]), float(self.limits.units[at])
        if pair.phase != FORWARD or not self.is_first or self.limits.is_given[at]:
            return False
        is_leaf = pair.a.port == "output" and pair.a.module not in self.ancestry.parents
        if math.isnan(floor):
            # Without a floor it is known of single modules alone how much they round.
            if not (is_leaf and 0 < SUDDEN_LEAF_UNITS * unit <= r):
                return False
        elif not r > max(SUDDEN_UNITS * unit, TELLING_FLOORS * floor):
            return False
        before = [one.place for one in self.ancestry.predecessors(pair)]
        if not before or bool((self.gaps.r[before] != 0).any()):  # also where it is not known
            return False
        if math.isnan(floor):
            return not self.allowance.is_noise(pair)
        given = float(np.nanmax(self.limits.floors[before], initial=USUAL_UNITS * unit))
        return r > SUDDEN_UNITS * unit * max(1.0, floor / given) and not self.allowance.is_noise(
            pair
        )

    def _stands_out(self, pair: Pair) -> bool:
        """Tell whether a pair is well above what it was made of.

        The floor of a site is mostly of rounding before it. How far that went is known here, so
        the floor tells no more than how much the module makes of it.
        """
        largest, _, source = self.measure_gain(pair)
        if source is not None:
            floors = self.limits.floors[[source.place, pair.place]]
            if floors[0] > 0 and floors[1] > floors[0]:
                largest *= float(floors[1] / floors[0])
        r, floor = float(self.gaps.r[pair.place]), float(self.limits.floors[pair.place])
        # A floor from another backend or model is of more than rounding: it allows what it shows.
        is_above = math.isnan(floor) or r > TELLING_FLOORS * floor
        return is_above and r >= TELLING_GAIN * largest

    def _follow(self, pair: Pair) -> Origin:
        """Follow a difference back to where it was introduced."""
        if not self.differs(pair):
            return self._make_origin(pair)
        best: Origin | None = None
        seen: set[int] = set()
        here: Pair | None = pair
        while here is not None and here.place not in seen:
            seen.add(here.place)
            origin = self._make_origin(here)
            if best is None or origin.gain > best.gain:
                best = origin
            if origin.gain >= TELLING_GAIN:
                break
            source = self.measure_gain(here)[2]
            here = None if source is None else self.ancestry.maker(source)
            if here is not None and self._is_within_given(here):
                break  # the user said that it may be off
        assert best is not None
        return replace(best, is_gradual=best.gain < _GRADUAL_GAIN and not best.word)

    def _is_within_given(self, pair: Pair) -> bool:
        return bool(self.limits.is_given[pair.place]) and not self.is_past(pair)

    def _make_origin(self, pair: Pair) -> Origin:
        """Say of a pair whose code made it, and what goes without a number."""
        r_in, gain, _ = self.measure_gain(pair)
        blame = self.blaming.refine(pair, self.blaming.blame(pair))
        direction = "input" if blame.direction == "input" else DIRECTIONS[pair.phase]
        word = ""
        if pair.missing:
            name = "update" if pair.kind == "update" else "gradient"
            side = "there" if pair.missing == "b" else "here"
            if pair.phase == FORWARD:
                word = f"no such output {side} as `{pair.own.address}`"
            else:
                word = (
                    f"no {name} reaches {pair.own.address.partition(':')[0] or 'the model'} {side}"
                )
        return Origin(pair, blame, r_in, gain, word=word, direction=direction)

    def _find_ungraded(self) -> Origin | None:
        """Find the first value that wants a gradient on one side alone."""
        has_gradients = any(
            site.kind in ("gradient", "parameter gradient")
            for trace in self.traces
            for site in trace.sites
        )
        if not has_gradients:
            return None
        for pair in self.pairs:
            wanted = pair.a.requires_grad, pair.b.requires_grad
            if pair.phase != FORWARD or pair.missing or None in wanted or wanted[0] == wanted[1]:
                continue
            blame = self.blaming.blame(pair)
            if blame.direction == "input" and blame.module == "":
                continue  # whether the inputs themselves want one is up to who calls
            word = f"no gradient is wanted {'there' if wanted[0] else 'here'}"
            return Origin(pair, blame, word=word, direction="backward")
        return None
