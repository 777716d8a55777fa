"""Compare two traces: align them, measure every pair, find the first difference and its cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hookline._errors import NotComparable
from hookline.diffs.aligning import align
from hookline.diffs.causes import Settings
from hookline.diffs.concluding import conclude
from hookline.diffs.difference import Difference, History
from hookline.diffs.drifting import Drift
from hookline.diffs.gaps import Gaps, PairMeasurer
from hookline.diffs.judging import Judgement
from hookline.diffs.measuring import SKETCH_SIGHT
from hookline.diffs.overwriting import find_overwrites
from hookline.diffs.phases import list_lacking, make_pairs
from hookline.diffs.relating import refuse_unrelated
from hookline.diffs.tolerances import (
    EXACT,
    FLOAT64,
    Limits,
    find_unused,
    refuse_unknown,
    set_limits,
)
from hookline.diffs.traces import Trace
from hookline.diffs.tracing_back import Ancestry

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]


_MOST_NAMED = 3


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
        self.notes = _list_notes(a, b)
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
        unused = find_unused(allow, self.pairs)
        refuse_unknown(unused, self.traces)
        for pattern in unused:
            self.notes.append(f"`{pattern}` in allow= names no site that was compared")
        self.ancestry = Ancestry(a, self.pairs)

    def judge(self) -> Difference:
        """Judge the steps in their order until one differs."""
        measurer = PairMeasurer(self.traces, self.pairs)
        drift = Drift(self.pairs, self.limits)
        errors: list[Floats] = []
        limits: list[Floats] = []
        judgement = origin = None
        for number, steps in enumerate(self.steps):
            # After the first difference the steps are but told of.
            gaps = measurer.measure(steps, tensors=origin is None)
            seen = self._see(gaps)
            changed = drift.find_changed(gaps, seen, steps) if origin is None else frozenset()
            wide = drift.widen(gaps, seen, changed=changed) if number else seen.limits
            errors.append(gaps.r)
            limits.append(wide)
            if origin is not None:
                continue
            settings = Settings(
                self.traces, self.alignment, self.pairs, gaps=gaps, limits=self.limits
            )
            now = Judgement(
                self.traces,
                self.pairs,
                gaps,
                seen,
                self.ancestry,
                settings,
                wide,
                overwrites=find_overwrites(self.traces, self.alignment, steps),
                is_first=not number,
                changed=changed,
            )
            origin = now.find_origin()
            if origin is not None or judgement is None:
                judgement, at = now, number
            drift.note(gaps, steps)
        assert judgement is not None
        if origin is not None:
            refuse_unrelated(self.traces, self.alignment, self.pairs)
        if not np.isfinite(judgement.gaps.distances).any() and origin is None:
            raise _explain(*self.traces, "have sites in common, but nothing measured of them")
        found = conclude(judgement, origin, alignment=self.alignment, steps=self.steps[at])
        drifted = drift.describe(self.steps[-1][0])
        given = self._list_given() if found.same else []
        notes = dict.fromkeys([*self.notes, *self.alignment.notes, *found.notes, *given, *drifted])
        return dataclasses.replace(
            found,
            notes=tuple(notes),
            history=self._make_history(errors, limits) if len(errors) > 1 else None,
        )

    def _list_given(self) -> list[str]:
        """Say which arguments are passed on one side alone."""
        sides = ("here", "there")
        lacking = list_lacking(self.traces, self.alignment)
        given = [(side, site.address) for side, site in lacking if site.port == "input"]
        return [f"`{one}` is given {sides[side]} alone" for side, one in given[:_MOST_NAMED]]

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
        return dataclasses.replace(self.limits, limits=limits)

    def _make_history(self, errors: Sequence[Floats], limits: Sequence[Floats]) -> History:
        steps = tuple(steps[0] for steps in self.steps)
        total = len(set(self.traces[0].steps) | set(self.traces[1].steps))
        return History(steps, np.stack(errors), np.stack(limits), total)


def _read_floors(a: Trace, floors: Floats | Mapping[int, float] | None) -> Floats | None:
    if floors is None:
        return a.floors()
    if isinstance(floors, Mapping):
        found = np.full(len(a.sites), np.nan)
        for number, floor in floors.items():
            found[number] = floor
        return found
    return floors


def _list_notes(a: Trace, b: Trace) -> list[str]:
    """List what the traces themselves say, and of which of the two it is true."""
    one, other = (list(getattr(trace, "notes", ())) for trace in (a, b))
    return [
        *(note if note in other else f"A: {note}" for note in one),
        *(f"B: {note}" for note in other if note not in one),
    ]


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
