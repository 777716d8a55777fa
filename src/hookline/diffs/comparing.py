"""Compare two traces: align them, measure every pair, find the first difference and its cause."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hookline._errors import NotComparable
from hookline.diffs.aligning import align
from hookline.diffs.causes import Settings, compare_settings, compare_site, find_broken_tie
from hookline.diffs.difference import Difference, History, PairResult
from hookline.diffs.drifting import Drift
from hookline.diffs.factors import find_factor
from hookline.diffs.gaps import Gaps, PairMeasurer
from hookline.diffs.judging import Judgement, Origin
from hookline.diffs.measuring import SKETCH_SIGHT
from hookline.diffs.phases import FORWARD, PARAMETER_GRADIENT, UPDATE, Pair, make_pairs
from hookline.diffs.tolerances import EXACT, FLOAT64, Limits, find_unused, set_limits
from hookline.diffs.traces import Trace
from hookline.diffs.tracing_back import Ancestry, Blame

if TYPE_CHECKING:
    import numpy.typing as npt


    Floats = npt.NDArray[np.float64]

_FEW = 0.5
"""Runs of which less than this share of sites can be compared are said to be so."""


def compare(
    a: Trace,
    b: Trace,
    *,
    names: Mapping[str, str] | None = None,
    allow: Mapping[str, float] | None = None,
    tolerance: float | None = None,
    step: int | None = None,
    floors: Floats | Mapping[int, float] | None = None,
) -> Difference:
    """Find the first place where two traces differ.

    `names` says what modules of the first are called in the second, `allow` what sites may differ
    by, `tolerance` the same for all. `floors` says how far rounding alone moves each site of the
    first; where it is not given, those that the first trace itself knows are used.
    """
    return _Comparison(a, b, names, allow, tolerance, step, floors).judge()


class _Comparison:
    """Two traces on their way to a verdict."""

    def __init__(
        self,
        a: Trace,
        b: Trace,
        names: Mapping[str, str] | None,
        allow: Mapping[str, float] | None,
        tolerance: float | None,
        step: int | None,
        floors: Floats | Mapping[int, float] | None,
    ) -> None:
        self.traces = a, b
        self.notes: list[str] = []
        self.steps = _choose_steps(a, b, step, self.notes)
        first = self.steps[0]
        self.alignment = align(a, b, step_a=first[0], step_b=first[1], names=names)
        self.pairs = make_pairs(self.traces, self.alignment)
        if not any(not pair.missing for pair in self.pairs):
            raise _explain(a, b, "have no site in common")
        self.limits = set_limits(
            self.traces,
            self.pairs,
            floors=_read_floors(a, floors),
            allow=allow,
            tolerance=tolerance,
        )
        for pattern in find_unused(allow, self.pairs):
            self.notes.append(f"`{pattern}` in allow= names no site that was compared")
        self.ancestry = Ancestry(a, self.pairs)

    def judge(self) -> Difference:
        """Judge the steps in their order until one differs."""
        measurer = PairMeasurer(self.traces, self.pairs)
        drift = Drift(self.pairs, self.limits)
        history: list[Gaps] = []
        scales: list[float] = []
        judgement = origin = None
        for number, steps in enumerate(self.steps):
            # After the first difference the steps are but told of.
            gaps = measurer.measure(steps, tensors=origin is None)
            scale = drift.measure(gaps) if number else 1.0
            history.append(gaps)
            scales.append(scale)
            if origin is not None or (number and not self._may_differ(gaps, scale)):
                continue
            settings = Settings(
                self.traces, self.alignment, self.pairs, gaps=gaps, limits=self.limits
            )
            now = Judgement(
                self.traces,
                self.pairs,
                gaps,
                self._see(gaps),
                self.ancestry,
                settings,
                scale=scale,
                is_first=not number,
            )
            origin = now.find_origin()
            if origin is not None or judgement is None:
                judgement, at = now, number
        assert judgement is not None
        if not np.isfinite(judgement.gaps.distances).any() and origin is None:
            raise _explain(*self.traces, "have sites in common, but nothing measured of them")
        self.notes.extend(self.alignment.notes)
        self.notes.extend(drift.describe([steps[0] for steps in self.steps], scales))
        return self._conclude(judgement, origin, at, history, scales)

    def _see(self, gaps: Gaps) -> Limits:
        """Raise the limits of what is estimated to what a sketch can see."""
        blurred = [
            place
            for place, measured in enumerate(gaps.measured)
            if measured in ("sketch", "statistics")
            and self.limits.precisions[place] != EXACT
            and not self.limits.is_given[place]
            and self.limits.limits[place] < 2 * SKETCH_SIGHT
        ]
        if not blurred:
            return self.limits
        if any(self.limits.precisions[place] == FLOAT64 for place in blurred):
            note = (
                "float64 was compared by sketches, which are float32: differences below "
                f"{SKETCH_SIGHT:.0e} are not seen; record with tensors=True to see them"
            )
            if note not in self.notes:
                self.notes.append(note)
        limits = self.limits.limits.copy()
        limits[blurred] = 2 * SKETCH_SIGHT
        return Limits(
            self.limits.precisions,
            self.limits.units,
            self.limits.floors,
            limits,
            self.limits.is_given,
        )

    def _may_differ(self, gaps: Gaps, scale: float) -> bool:
        with np.errstate(invalid="ignore"):
            wide = np.where(self.limits.is_given, 1.0, scale) * self.limits.limits
            return bool((gaps.r > wide).any())

    def _conclude(
        self,
        judgement: Judgement,
        origin: Origin | None,
        at: int,
        history: Sequence[Gaps],
        scales: Sequence[float],
    ) -> Difference:
        a, b = self.traces
        steps = self.steps[at]
        limits = [judgement.limit(pair) for pair in self.pairs]
        results = [self._result(judgement, origin, pair, limits[pair.place]) for pair in self.pairs]
        common = {
            "pairs": results,
            "alone_a": tuple(a.sites[one].address for one in self.alignment.alone_a),
            "alone_b": tuple(b.sites[one].address for one in self.alignment.alone_b),
            "names": self.alignment.names,
            "titles": (a.facts.title or "A", b.facts.title or "B"),
            "history": self._history(history, scales) if len(history) > 1 else None,
            "traces": self.traces,
            "steps": steps,
            "step": steps[0],
        }
        if origin is None:
            self.notes.extend(self._compare_ties(None))
            usual = [limits[pair.place] for pair in self.pairs if results[pair.place].r is not None]
            return Difference(
                same=True,
                limit=float(np.median(usual)) if usual else 0.0,
                agree_to=_largest(results, None, judgement),
                notes=tuple(dict.fromkeys(self.notes)),
                **common,
            )
        return self._describe(judgement, origin, results, common)

    def _describe(
        self,
        judgement: Judgement,
        origin: Origin,
        results: Sequence[PairResult],
        common: dict[str, object],
    ) -> Difference:
        pair = origin.pair
        blame, causes = self._settle(judgement, origin)
        facts = self.traces[0].facts.modules, self.traces[1].facts.modules
        own = facts[0].get(blame.module)
        other = facts[1].get(blame.module_b) if blame.module_b is not None else None
        floor = float(self.limits.floors[pair.place])
        r = float(judgement.gaps.r[pair.place])
        return Difference(
            same=False,
            first=blame.module,
            first_b=blame.module_b,
            site=pair.own.address if pair.missing == "a" else pair.a.address,
            site_b=pair.own.address if pair.missing == "b" else pair.b.address,
            direction=origin.direction,
            visit=pair.a.visit,
            introduced=None if math.isnan(r) else r,
            r_in=origin.r_in,
            floor=None if math.isnan(floor) else floor,
            limit=judgement.limit(pair),
            gain=origin.gain,
            agree_to=_largest(results, pair, judgement),
            is_gradual=origin.is_gradual,
            type=own.type if own else (pair.a.type if blame.module == pair.a.module else ""),
            type_b=other.type
            if other
            else (pair.b.type if blame.module_b == pair.b.module else ""),
            is_own_code=blame.is_own_code,
            before=blame.before,
            word=origin.word,
            candidates=blame.candidates or (blame.module,),
            source=own.source if own else "",
            source_b=other.source if other else "",
            causes=tuple(dict.fromkeys(causes)),
            notes=tuple(dict.fromkeys(self.notes)),
            **common,  # type: ignore[arg-type]
        )

    def _settle(self, judgement: Judgement, origin: Origin) -> tuple[Blame, list[str]]:
        """Name what is to blame and the causes; some causes name another place."""
        pair, blame = origin.pair, origin.blame
        tie = self._find_tie(origin)
        if tie is not None:
            path = tie[0].rpartition(".")[0]
            return Blame(path, judgement.settings.counterpart(path)), [tie[1]]
        if pair.phase in (PARAMETER_GRADIENT, UPDATE):
            factor = find_factor(self.pairs, judgement.gaps, pair.phase, judgement.differs)
            if factor:
                return Blame("", ""), [factor]
        causes = [] if origin.word.startswith("no gradient is") else compare_site(pair)
        causes += judgement.settings.causes(blame.module)
        if blame.direction == "loss":
            causes.append("the loss sends the model another gradient")
        causes += compare_settings(self.traces[0].facts, self.traces[1].facts)
        return blame, causes

    def _find_tie(self, origin: Origin) -> tuple[str, str] | None:
        found = find_broken_tie((self.traces[0].facts, self.traces[1].facts), self.alignment.names)
        if found is None:
            return None
        group = {name.rpartition(".")[0] for tie in self._ties() for name in tie}
        if origin.pair.phase == FORWARD and origin.blame.module not in group:
            return None
        return found

    def _ties(self) -> list[tuple[str, ...]]:
        return [tuple(one) for trace in self.traces for one in trace.facts.ties]

    def _compare_ties(self, origin: Origin | None) -> list[str]:
        found = find_broken_tie((self.traces[0].facts, self.traces[1].facts), self.alignment.names)
        return [] if found is None else [found[1]]

    def _result(
        self, judgement: Judgement, origin: Origin | None, pair: Pair, limit: float
    ) -> PairResult:
        r = float(judgement.gaps.r[pair.place])
        floor = float(self.limits.floors[pair.place])
        sites = self.traces[0].sites
        return PairResult(
            site=pair.a.address if pair.missing != "a" else pair.own.address,
            site_b=pair.b.address if pair.missing != "b" else pair.own.address,
            kind=pair.kind,
            rule=pair.match.rule,
            r=None if math.isnan(r) else r,
            limit=limit,
            floor=None if math.isnan(floor) else floor,
            verdict=_find_verdict(judgement, origin, pair, r),
            module=pair.a.module,
            module_b=pair.b.module,
            type=pair.a.type,
            type_b=pair.b.type,
            port=pair.a.port,
            visit=pair.a.visit,
            dtype=pair.a.dtype,
            dtype_b=pair.b.dtype,
            shape=pair.a.shape,
            shape_b=pair.b.shape,
            how=pair.match.how,
            measured=judgement.gaps.measured[pair.place],
            same_as="" if pair.a.same_as is None else sites[pair.a.same_as].address,
            word=f"lacking on side {pair.missing.upper()}" if pair.missing else "",
            match=None if pair.missing else pair.match,
        )

    def _history(self, history: Sequence[Gaps], scales: Sequence[float]) -> History:
        wide = np.where(self.limits.is_given, 1.0, np.array(scales)[:, None])
        return History(
            tuple(steps[0] for steps in self.steps),
            np.stack([gaps.r for gaps in history]),
            wide * self.limits.limits,
        )


def _find_verdict(judgement: Judgement, origin: Origin | None, pair: Pair, r: float) -> str:
    if origin is not None and pair is origin.pair:
        return "introduces"
    if math.isnan(r):
        return "not compared"
    if not judgement.is_past(pair):
        return "agrees"
    if judgement.allowance.is_noise(pair):
        return "noise"
    if pair.missing:
        return "missing"
    # Nothing differs before the first difference, but for the state of a later step.
    return "inherits"


def _largest(results: Sequence[PairResult], until: Pair | None, judgement: Judgement) -> float:
    """Give the largest error before a pair, or of all of them."""
    found = 0.0
    for result in results[: None if until is None else until.place]:
        if result.r is not None and result.verdict == "agrees":
            found = max(found, result.r)
    return found


def _read_floors(a: Trace, floors: Floats | Mapping[int, float] | None) -> Floats | None:
    if floors is None:
        return a.floors()
    if isinstance(floors, Mapping):
        found = np.full(len(a.sites), np.nan)
        for number, floor in floors.items():
            found[number] = floor
        return found
    return floors


def _choose_steps(a: Trace, b: Trace, step: int | None, notes: list[str]) -> list[tuple[int, int]]:
    """Choose the steps that both have; one that is asked for must be there."""
    have = list(a.steps), list(b.steps)
    for trace, steps in zip((a, b), have, strict=True):
        if not steps:
            raise NotComparable(
                f"`{trace.facts.title or 'a run'}` has no steps. Record one with "
                "`hl.record(model, path, inputs)`, or let it run longer."
            )
    if step is not None:
        for trace, steps in zip((a, b), have, strict=True):
            if step not in steps and len(steps) > 1:
                raise NotComparable(
                    f"`{trace.facts.title or 'a run'}` has no step {step}; it has "
                    f"{len(steps)} from {steps[0]} to {steps[-1]}."
                )
        return [(step if step in have[0] else have[0][0], step if step in have[1] else have[1][0])]
    common = sorted(set(have[0]) & set(have[1]))
    if not common:
        if len(have[0]) == len(have[1]) == 1:
            return [(have[0][0], have[1][0])]
        raise NotComparable(
            f"the two have no step in common: {have[0][0]} to {have[0][-1]} and "
            f"{have[1][0]} to {have[1][-1]}. Record the same steps, or name one with step=."
        )
    for trace, steps in zip((a, b), have, strict=True):
        missing = sorted((set(have[0]) | set(have[1])) - set(steps))
        if missing:
            listed = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            notes.append(f"{trace.facts.title or 'one side'} lacks step {listed}: left out")
    return [(one, one) for one in common]


def _explain(a: Trace, b: Trace, what: str) -> NotComparable:
    titles = f"`{a.facts.title or 'A'}` and `{b.facts.title or 'B'}`"
    return NotComparable(
        f"{titles} {what} ({len(a.sites)} and {len(b.sites)} sites). If they are the same model "
        "under other names, say which is which: names={'path in the first': 'path in the second'}."
    )
