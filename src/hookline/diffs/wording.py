"""The answer of a comparison in one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hookline.diffs.writing import write_r, write_rough, write_times

if TYPE_CHECKING:
    from hookline.diffs.difference import Difference

DRIFT = "drift: "
"""How the note begins that says how far trainings have parted."""

ONLY_ZEROS = "only zeros here"
OTHER_SIZES = "another shape"
NOT_FINITE = "NaN or infinities on one side"
"""What is said of a pair that no number tells the distance of."""

_WITHOUT_NUMBER = {
    ONLY_ZEROS: "numbers there where there are only zeros here",
    OTHER_SIZES: "another shape",
    NOT_FINITE: "NaN or infinities that the other side lacks",
}

_BEFORE = {
    "backward": "forward and up to",
    "parameter gradient": "forward and backward, up to",
    "update": "in all but the update, up to",
    "state": "forward and backward, up to",
}

_OF = {
    "parameter gradient": "in the gradient of",
    "update": "in the update of",
    "state": "in",
}


def write_sentence(difference: Difference) -> str:
    """Say what was found."""
    if difference.same:
        return _say_same(difference)
    parts = [_say_where(difference), *_say_rest(difference)]
    return "; ".join(part for part in parts if part) + "."


def name_module(path: str, type_name: str = "") -> str:
    """Name a module with its class; the root is the model."""
    if not path:
        return f"the model ({type_name})" if type_name else "the model"
    return f"{path} ({type_name})" if type_name else path


def name_place(difference: Difference) -> str:
    """Name the place that is to blame: a module, or the code between those that it calls."""
    named = name_module(difference.first or "", difference.type)
    if difference.visit:
        named += f" at its call {difference.visit}"
    if not difference.is_own_code:
        return named
    before = difference.before
    if difference.first and before.startswith(f"{difference.first}."):
        before = before[len(difference.first) + 1 :]
    return f"the code of {named} itself" + (f", before it calls {before}" if before else "")


def _say_same(difference: Difference) -> str:
    compared = [pair for pair in difference.pairs if pair.verdict in ("agrees", "noise")]
    sites = f"{len(compared)} site{'' if len(compared) == 1 else 's'}"
    limit = f" (limit {write_rough(difference.limit)})" if difference.limit else ""
    agree = _say_agree(difference) + (limit if difference.agree_to else "")
    drifted = [note for note in difference.notes if note.startswith(DRIFT)]
    count = "" if difference.history is None else f" {len(difference.history.steps)} steps"
    history = difference.history
    if history is not None and history.total > len(history.steps):
        count = f" {len(history.steps)} of {history.total} steps"
    if drifted:
        first = _count_first(difference)
        return f"No difference: {sites} {agree} in the first{first} of{count}; {drifted[0]}."
    return f"No difference: {sites}{f' in{count}' if count else ''} {agree}."


def _count_first(difference: Difference) -> str:
    """Say for how many steps all is as it is in the first; empty for the first alone."""
    history = difference.history
    assert history is not None
    is_off = [bool((r > difference.agree_to).any()) for r in history.r]
    count = is_off.index(True) if True in is_off else len(is_off)
    return f" {count}" if count > 1 else ""


def _say_agree(difference: Difference) -> str:
    if difference.agree_to == 0:
        return "agree exactly"
    return f"agree to {write_rough(difference.agree_to)}"


def _say_where(difference: Difference) -> str:
    at = f" at step {difference.step}" if difference.history is not None else ""
    if difference.direction == "input":
        return f"The inputs differ{at}: {difference.site} by {_say_size(difference)}"
    agree = _say_agree(difference)
    before = _BEFORE.get(difference.direction or "", "up to")
    history = difference.history
    if difference.direction == "state" and history and difference.step != history.steps[0]:
        before = "up to"  # what a step begins with is there before it runs
    place = name_place(difference) + at
    if difference.is_gradual:
        return (
            f"Runs {agree} at best; the difference grows gradually, most at {place}: "
            f"{_say_size(difference)}"
        )
    what = difference.word or f"it introduces {_say_size(difference)}"
    seen = _find_compared(difference)
    if seen is not None and "value" not in seen and difference.direction != "forward":
        return f"Runs differ at {place}, and no values before it were compared; {what}"
    if seen is not None and before.startswith("forward and backward") and "gradient" not in seen:
        before = "forward and up to"
    return f"Runs {agree} {before} {place}; {what}"


def _find_compared(difference: Difference) -> set[str] | None:
    """Find the kinds of sites that were compared before the difference; None: nobody knows."""
    verdicts = [pair.verdict for pair in difference.pairs]
    if "introduces" not in verdicts:
        return None
    before = difference.pairs[: verdicts.index("introduces")]
    return {pair.kind for pair in before if pair.r is not None}


def _say_size(difference: Difference) -> str:
    """Say how large the difference is, in what, and against what."""
    r, floor, limit = difference.introduced, difference.floor, difference.limit
    of = _OF.get(difference.direction or "", "")
    of = f" {of} {_name_kept(difference.site or '')}" if of else ""
    if difference.direction == "backward":
        of = " in the gradient"
    if r is None or math.isinf(r):
        words = (pair.word for pair in difference.pairs if pair.verdict == "introduces")
        known = "NaN, infinities or elements that the other side lacks"
        return _WITHOUT_NUMBER.get(next(words, ""), known) + of
    if floor:
        against = f"floor {write_rough(floor)}, {write_times(r / floor)}"
    elif limit and r > limit:
        against = f"limit {write_rough(limit)}, {write_times(r / limit)}"
    elif difference.gain is not None and math.isfinite(difference.gain):
        against = f"{write_times(difference.gain)} what rounding leaves"
    else:
        against = "equal values are expected"
    return f"{write_r(r)}{of} ({against})"


def _name_kept(address: str) -> str:
    return address.removesuffix(":grad").removesuffix(":update")


def _say_rest(difference: Difference) -> list[str]:
    parts = []
    if difference.operation:
        written = f" ({difference.source})" if difference.source else ""
        parts.append(f"at {difference.operation}{written}")
    after = [pair for pair in difference.pairs if pair.verdict in ("inherits", "missing")]
    if after and not difference.is_gradual and difference.direction != "input":
        parts.append("everything after inherits it" if _is_all(difference) else _count(after))
    parts.extend(difference.causes[:3])
    return parts


def _is_all(difference: Difference) -> bool:
    """Tell whether nothing of the same phase agrees after the first difference."""
    verdicts = [pair.verdict for pair in difference.pairs]
    if "introduces" not in verdicts:
        return False
    at = verdicts.index("introduces")
    kind = difference.pairs[at].kind
    later = [pair.verdict for pair in difference.pairs[at + 1 :] if pair.kind == kind]
    return bool(later) and "agrees" not in later


def _count(after: Sequence[object]) -> str:
    return (
        "1 site after it inherits it"
        if len(after) == 1
        else (f"{len(after)} sites after it inherit it")
    )
