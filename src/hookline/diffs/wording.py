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
    if drifted:
        return f"No difference: {sites} {agree} in the first of{count}; {drifted[0]}."
    return f"No difference: {sites}{f' in{count}' if count else ''} {agree}."


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
    place = name_place(difference) + at
    if difference.is_gradual:
        return (
            f"Runs {agree} at best; the difference grows gradually, most at {place}: "
            f"{_say_size(difference)}"
        )
    if difference.word:
        return f"Runs {agree} {before} {place}; {difference.word}"
    return f"Runs {agree} {before} {place}; it introduces {_say_size(difference)}"


def _say_size(difference: Difference) -> str:
    """Say how large the difference is, in what, and against what."""
    r, floor, limit = difference.introduced, difference.floor, difference.limit
    of = _OF.get(difference.direction or "", "")
    of = f" {of} {_name_kept(difference.site or '')}" if of else ""
    if difference.direction == "backward":
        of = " in the gradient"
    if r is None or math.isinf(r):
        return f"NaN, infinities or elements that the other side lacks{of}"
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
