"""Confirm a difference by running the blamed modules again, and say which operation it is.

A difference found in traces is a place in time. Both models are here, so the module can be asked
itself: on the same input, does it differ? And which line of it?
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hookline.comparisons.calling import StepCall
from hookline.comparisons.catching import NotCaught
from hookline.comparisons.descending import Descent, descend
from hookline.comparisons.grafting import Graft, make_graft
from hookline.comparisons.recorded import graft_recorded
from hookline.diffs.difference import Difference
from hookline.diffs.writing import write_r
from hookline.replays.staging import CannotReplay

_DIRECTIONS = ("forward", "backward", "parameter gradient")
_BACKWARD = ("backward", "parameter gradient")


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two models and the step that each of them made."""

    models: tuple[nn.Module, nn.Module]
    """A and B."""

    calls: tuple[StepCall, StepCall]
    """What each was called with."""


def confirm(difference: Difference, pair: Pair) -> Difference:
    """Add to a difference what the modules themselves say: graft, operation, lines, causes."""
    if difference.same or difference.first is None or difference.direction not in _DIRECTIONS:
        return difference
    is_backward = difference.direction in _BACKWARD
    if is_backward and any(call.loss is None for call in pair.calls):
        return difference
    grafted = _settle(difference, pair, is_backward=is_backward)
    if isinstance(grafted, str):
        return replace(difference, notes=(*difference.notes, f"no graft: {grafted}"))
    paths, graft = grafted
    error = graft.error(difference.direction)
    is_itself = error > _limit(difference, error)
    told = _tell(graft, error, is_itself=is_itself)
    found = None
    if is_itself:
        found = _descend(difference, graft, error, is_backward=is_backward)
    changed = replace(difference, first=paths[0], first_b=paths[1], graft=told)
    return changed if found is None else _add(changed, found)


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
    is_itself = error > _limit(difference, error)
    told = {**_say(error, is_itself=is_itself), "outputs": errors}
    return replace(difference, graft=told)


def _limit(difference: Difference, error: float) -> float:
    """Give the error from which a module differs itself: an input that is bit for bit the same.

    What came in agreed to rounding before; now it is equal, so nothing is amplified.
    """
    at = difference.introduced
    if at is None or not math.isfinite(at):
        return difference.limit
    return min(difference.limit, at / 4)


def _settle(
    difference: Difference, pair: Pair, *, is_backward: bool
) -> tuple[tuple[str, str], Graft] | str:
    """Graft the blamed module; where several could be it, the innermost that differs itself."""
    first = (difference.first or "", difference.first_b or "")
    candidates = [first]
    if is_backward and len(difference.candidates) > 1:
        named = [(path, _partner(difference, path)) for path in difference.candidates]
        known = [(a, b) for a, b in named if b is not None]
        candidates = sorted(known, key=lambda paths: -paths[0].count(".")) or candidates
    made: dict[tuple[str, str], Graft] = {}
    reason = ""
    for paths in candidates:
        try:
            graft = make_graft(
                pair.models, paths, pair.calls, visit=difference.visit, backward=is_backward
            )
        except (NotCaught, CannotReplay) as error:
            reason = str(error)
            continue
        except Exception as error:  # a module that does not run on another one's input
            reason = f"{type(error).__name__}: {error}"
            continue
        made[paths] = graft
        error_of = graft.error(difference.direction)
        if error_of > _limit(difference, error_of):
            return paths, graft
    if first in made:
        return first, made[first]
    return next(iter(made.items())) if made else reason


def _partner(difference: Difference, path: str) -> str | None:
    """Give the module of B that is aligned with one of A."""
    return difference.names.get(path)


def _say(error: float, *, is_itself: bool) -> dict[str, Any]:
    if is_itself:
        words = f"run on the same input, the two modules differ by {write_r(error)}"
    else:
        agree = "exactly" if error == 0 else f"to {write_r(error)}"
        words = f"run on the same input, the two modules agree {agree}: it only inherits"
    return {
        "verdict": "itself" if is_itself else "inherits",
        "error": error,
        "sentence": words,
    }


def _tell(graft: Graft, error: float, *, is_itself: bool) -> Mapping[str, Any]:
    return {
        **_say(error, is_itself=is_itself),
        "outputs": dict(graft.outputs),
        "gradients": dict(graft.gradients),
        "parameters": dict(graft.parameters),
        "notes": list(graft.notes),
    }


def _descend(
    difference: Difference, graft: Graft, error: float, *, is_backward: bool
) -> Descent | None:
    try:
        return descend(graft, backward=is_backward, limit=difference.limit, error=error)
    except Exception:  # the graft has run; a mode inside may be what a forward does not bear
        return None


def _add(difference: Difference, found: Descent) -> Difference:
    known = " ".join(difference.causes)
    causes = [one for one in found.causes if one not in known]
    notes = difference.notes
    if found.variable:
        notes = (*notes, f"its result is {found.variable}")
    return replace(
        difference,
        operation=found.operation,
        source=found.source if found.source or found.source_b else difference.source,
        source_b=found.source_b or difference.source_b,
        causes=(*difference.causes, *causes),
        notes=notes,
    )
