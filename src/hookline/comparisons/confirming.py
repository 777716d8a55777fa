"""Confirm a difference by asking the modules themselves, and say which operation it is.

A difference found in traces is a place in time. Both models are here, so a module can be run: on
the same input, does it differ? And which line of it? Where a module gives the same whatever
differs inside of it, the comparison is made again without its inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from hookline.comparisons.calling import StepCall
from hookline.comparisons.descending import Descent
from hookline.comparisons.grafting import Graft
from hookline.comparisons.locating import BACKWARD, Located, Locator, Pair
from hookline.comparisons.recorded import graft_recorded
from hookline.diffs.causes import compare_modules
from hookline.diffs.difference import Difference, PairResult
from hookline.diffs.writing import write_r

_DIRECTIONS = ("forward", *BACKWARD)
_STATE = "what it keeps between calls differs, or what it reads besides its arguments"
_MOST_EXCUSED = 16
"""How many modules are excused before it is given up."""

Compare = Callable[[Mapping[str, float]], Difference]
"""Compares again, with more that sites may differ by."""


def confirm(difference: Difference, pair: Pair, compare: Compare) -> Difference:
    """Add to a difference what the modules themselves say: graft, operation, lines, causes."""
    found = difference
    excused: dict[str, str] = {}
    for _ in range(_MOST_EXCUSED):
        if not _can_confirm(found, pair):
            return _leave_out(found, excused)
        locator = Locator(found, pair)
        located = locator.locate()
        if located.excused is None:
            return _leave_out(_tell(found, located, locator), excused)
        more = dict.fromkeys(_list_inside(found, located.excused), located.excused)
        if not more.keys() - excused.keys():
            break
        excused |= more
        found = compare(dict.fromkeys(excused, math.inf))
    return _leave_out(found, excused)


def confirm_recorded(
    difference: Difference, model: nn.Module, call: StepCall, *, is_model_b: bool
) -> Difference:
    """Add what the model's module gives on the input that the run has kept."""
    if difference.same or difference.direction != "forward" or difference.traces is None:
        return difference
    if difference.first is None or difference.first_b is None or difference.steps is None:
        return difference
    side = 0 if is_model_b else 1
    paths = (difference.first, difference.first_b)
    try:
        errors = graft_recorded(
            difference.traces[side],
            model,
            paths if is_model_b else (paths[1], paths[0]),
            call,
            step=difference.steps[side],
            visit=difference.visit,
        )
    except Exception:  # no tensors there, or a module that does not run on another's input
        return difference
    error = max(errors.values(), default=0.0)
    at = difference.introduced
    limit = difference.limit if at is None else min(difference.limit, at / 4)
    told = {**_say(error, is_itself=error > limit), "outputs": errors}
    return replace(difference, graft=told)


def _can_confirm(difference: Difference, pair: Pair) -> bool:
    if difference.same or difference.first is None or difference.first_b is None:
        return False
    if difference.traces is None or difference.direction not in _DIRECTIONS:
        return False
    at = next((one for one in difference.pairs if one.verdict == "introduces"), None)
    if at is None or (difference.direction == "forward" and at.match is None):
        return False  # what one side lacks cannot be asked for again
    needs_loss = difference.direction in BACKWARD
    return not (needs_loss and any(call.loss is None for call in pair.calls))


def _tell(difference: Difference, located: Located, locator: Locator) -> Difference:
    if located.graft is None:
        note = f"no graft: {located.reason}"
        return replace(difference, notes=(*difference.notes, note))
    error = locator.measure(located.graft)
    moved = _move(difference, located)
    told = _describe(located.graft, error, located, direction=difference.direction or "")
    moved = replace(moved, graft=told)
    if located.written_for is not None:
        name = f"`{located.written_for}`" if located.written_for else "the model"
        words = f"with copies of what it is given, {name} is the same on both sides"
        cause = f"it writes into its input, which {name} uses again"
        is_told = any(one.startswith("it writes") for one in moved.causes)
        causes = moved.causes if is_told else (cause, *moved.causes)
        moved = replace(moved, graft={**told, "sentence": words}, causes=causes)
    if located.is_state:
        moved = replace(moved, causes=(*moved.causes, _STATE))
    return moved if located.descent is None else _add(moved, located.descent)


def _move(difference: Difference, located: Located) -> Difference:
    """Put the blame on another module where that one differs itself."""
    if located.paths == (difference.first, difference.first_b):
        return difference
    assert difference.traces is not None
    facts = [
        trace.facts.modules.get(path)
        for trace, path in zip(difference.traces, located.paths, strict=True)
    ]
    own, other = facts
    is_parent = any(
        site.caller == located.paths[0] for site in difference.traces[0].sites if site.caller
    )
    return replace(
        difference,
        first=located.paths[0],
        first_b=located.paths[1],
        candidates=(located.paths[0],),
        type="" if own is None else own.type,
        type_b="" if other is None else other.type,
        source="" if own is None else own.source,
        source_b="" if other is None else other.source,
        causes=tuple(compare_modules(own, other)),
        is_own_code=is_parent,
        before="",
        written="",
    )


def _say(
    error: float, *, is_itself: bool, is_state: bool = False, direction: str = "forward"
) -> dict[str, Any]:
    if is_itself:
        words = f"run on the same input, the two modules differ by {write_r(error)}"
    else:
        agree = "exactly" if error == 0 else f"to {write_r(error)}"
        rest = _STATE if is_state else "it only inherits"
        if direction == "parameter gradient":
            rest = "the gradient is changed outside of it, by a hook or another use"
        words = f"run on the same input, the two modules agree {agree}: {rest}"
    return {
        "verdict": "itself" if is_itself or is_state else "inherits",
        "error": error,
        "sentence": words,
    }


def _describe(graft: Graft, error: float, located: Located, *, direction: str) -> Mapping[str, Any]:
    return {
        **_say(error, is_itself=located.is_itself, is_state=located.is_state, direction=direction),
        "outputs": dict(graft.outputs),
        "gradients": dict(graft.gradients),
        "parameters": dict(graft.parameters),
        "notes": list(graft.notes),
    }


def _add(difference: Difference, found: Descent) -> Difference:
    known = " ".join(difference.causes)
    causes = [one for one in found.causes if one not in known]
    notes = difference.notes
    if found.variable:
        notes = (*notes, f"its result is {found.variable}")
    has_line = bool(found.source or found.source_b)
    return replace(
        difference,
        operation=found.operation,
        source=found.source if has_line else difference.source,
        source_b=found.source_b if has_line else difference.source_b,
        causes=(*difference.causes, *causes),
        notes=notes,
    )


def _list_inside(difference: Difference, path: str) -> list[str]:
    """List the values and gradients inside of a module that differ."""
    assert difference.traces is not None
    callers = {
        site.module: site.caller for site in difference.traces[0].sites if site.kind == "value"
    }

    def is_inside(module: str) -> bool:
        caller = callers.get(module)
        for _ in range(len(callers)):
            if caller is None or caller == path:
                return caller == path
            caller = callers.get(caller)
        return False

    return [
        pair.site
        for pair in difference.pairs
        if pair.kind in ("value", "gradient")
        and pair.verdict in ("introduces", "inherits", "noise", "missing")
        and is_inside(pair.module)
    ]


def _leave_out(difference: Difference, excused: Mapping[str, str]) -> Difference:
    """Say of excused sites that they were not compared, and why."""
    if not excused:
        return difference
    pairs = [
        _excuse(pair, excused[pair.site]) if pair.site in excused else pair
        for pair in difference.pairs
    ]
    # The module that was excused last stands for those inside of it.
    names = list(dict.fromkeys(f"`{path}`" if path else "the model" for path in excused.values()))
    notes = [
        f"what is inside of {name} differs, but on the same input it gives the same"
        for name in names
    ]
    changed = replace(difference, pairs=pairs, notes=(*difference.notes, *notes))
    verdicts = [pair.verdict for pair in pairs]
    until = verdicts.index("introduces") if "introduces" in verdicts else None
    errors = [pair.r for pair in pairs[:until] if pair.verdict == "agrees" and pair.r is not None]
    return replace(changed, agree_to=max(errors, default=0.0))


def _excuse(pair: PairResult, path: str) -> PairResult:
    name = f"`{path}`" if path else "the model"
    return replace(
        pair,
        verdict="not compared",
        word=f"inside of {name}, which gives the same on the same input",
    )
