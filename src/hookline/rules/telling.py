"""What the finding of a NaN says: the sentence, the evidence and the hint, from what is known.

An origin is what a replay has found, as a dict: `site`, `operation`, `cause`, `why`, `inputs`, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.rules.wording import count_of

Origin = Mapping[str, Any]

HINTS = {
    "parameter": (
        "Look where the parameter comes from: its initialisation, the checkpoint it was loaded "
        "from, or the optimizer's step before it was watched."
    ),
    "value": (
        "Look at the operations of this module for a division by zero, log or sqrt of a number "
        "that is not positive, exp of a large one, or a row that is masked as a whole."
    ),
    "data": (
        "It is the first module that ran and its parameters are finite: look at the batch, "
        "for example with torch.isfinite(batch).all()."
    ),
    "loss": (
        "Look at the loss function: log(0), a division by an empty count, a sum over no element."
    ),
    "gradient": (
        "Look for an operation whose derivative is infinite there: sqrt or norm at 0, "
        "a division by a small number, torch.where over a branch that is not finite."
    ),
    "local gradient": "Look at what uses this parameter for an infinite derivative.",
    "parameter gradient": "Look at what uses this parameter for an infinite derivative.",
    "update": (
        "The gradients were finite: lower the learning rate, and give the optimizer an eps "
        "above zero."
    ),
}
"""What to try where only the kind of site is known."""

_MASKED = (
    "Give every row something to look at: leave out rows that are masked as a whole, or let them "
    "see one place and drop what comes of it."
)
_DIVISOR = "Add an epsilon to the divisor or clamp it: y.clamp(min=1e-8), a count with min=1."
_LOG = (
    "Clamp what goes into the log: x.clamp(min=1e-8).log(). From logits take log_softmax, "
    "logsigmoid or binary_cross_entropy_with_logits."
)
_ROOT = "Clamp what goes into it: x.clamp(min=0), with an epsilon where gradients go through."
_SLOPE = (
    "Add an epsilon before the root or norm: (x + 1e-12).sqrt(). A torch.where after it is too "
    "late for the gradient: choose safe inputs before it."
)
_ANGLE = "Keep it inside of -1 and 1: x.clamp(-1 + 1e-6, 1 - 1e-6)."
_EXP = (
    "Take the largest away before exp, as softmax, logsumexp and logsigmoid do, or clamp what "
    "goes into it."
)
_HALF = (
    "Use bfloat16, or keep this part in float32: with torch.autocast(device_type, enabled=False)."
)

_REASONS = (
    ("all -inf", _MASKED),
    ("nothing to attend to", _MASKED),
    (
        "which is ignored",
        "Leave out batches in which every target is ignored, or divide the sum of the losses by "
        "max(count, 1).",
    ),
    ("of no elements", "Leave out what is empty, or divide a sum by max(count, 1)."),
    ("of a single element", "Leave out groups of one element, or give correction=0."),
    ("division by", _DIVISOR),
    ("float16 overflow", _HALF),
    ("overflows float16", _HALF),
    ("inf / inf", _EXP),
    ("exp of", _EXP),
    ("expm1 of", _EXP),
    ("acos at", _ANGLE),
    ("asin at", _ANGLE),
    ("beyond 1", _ANGLE),
    ("infinite slope", _SLOPE),
    ("rsqrt of 0", _DIVISOR),
    ("0 to the power of -", _DIVISOR),
    ("sqrt of a negative", _ROOT),
    ("pow of a negative", _ROOT),
    ("log of", _LOG),
    ("log2 of", _LOG),
    ("log10 of", _LOG),
    ("log1p of", _LOG),
    ("xlogy of", _LOG),
    (
        "0 * inf",
        "Choose with torch.where or masked_fill in place of multiplying by 0, and before the "
        "infinity is made.",
    ),
    ("inf - inf", "Look where the infinities come from; masks of -inf belong before a softmax."),
    ("infinities", "Look where the infinities come from; masks of -inf belong before a softmax."),
    ("torch.empty", "Fill it before it is read, or take torch.zeros."),
    ("overflow", "Scale down or normalise what comes in here, or lower the learning rate."),
)
"""Words of a reason, and what to try about it; the first that fits counts."""

_ARTICLES = {"NaN": "a NaN", "infinity": "an infinity"}


def is_shown(origin: Origin | None) -> bool:
    """Tell whether a replay has shown where it comes from."""
    return origin is not None and bool(origin) and origin.get("cause") != "not reproduced"


def say(
    site: str, *, step: int, source: str, kind: str, phase: str, origin: Origin | None, carried: int
) -> str:
    """Write the sentence: who made it, when, where, why, and how many carried it on."""
    what = "NaN" if kind == "nan" else "infinity"
    where = f" ({source})" if source else ""
    name = site or "the model"
    rest = f"; {count_of(carried, 'site')} downstream only carried it on" if carried else ""
    if origin and is_shown(origin):
        head = _say_origin(origin, name, what, step, where)
    else:
        head = _say_phase(phase, name, kind, what, step, where)
    return f"{head[0].upper() if not site else head[0]}{head[1:]}{rest}."


def _say_origin(origin: Origin, name: str, what: str, step: int, where: str) -> str:
    cause, a_what = origin.get("cause"), _ARTICLES[what]
    if cause == "input":
        named = name.partition(":input")[0]
        owner = f"The input of {named or 'the model'}"
        return f"{owner} held {a_what} already at step {step}{where}"
    if cause == "parameter":
        return f"{name} held {a_what} already when step {step} began{where}"
    head = f"{name} made the first {what} at step {step}{where}"
    if origin.get("is_backward"):
        head += ", in the backward pass"
    why = str(origin.get("why") or "")
    if why and not why.endswith("was given none"):
        return f"{head}: {why}"
    inputs = origin.get("inputs") or ()
    if not inputs or any(one.get("nan") or one.get("inf") for one in inputs):
        return head
    return f"{head}; its input{'s were' if len(inputs) > 1 else ' was'} finite"


def _say_phase(phase: str, name: str, kind: str, what: str, step: int, where: str) -> str:
    """Say as much as the measured sites tell."""
    when, a_what = f"at step {step}", _ARTICLES[what]
    return {
        "parameter": f"{name} held {a_what} already when step {step} began{where}",
        "value": (
            f"{name} made the first {what} {when}{where}; everything that ran before it was finite"
        ),
        "loss": f"The loss became {kind} {when}{where}, and all outputs were finite",
        "gradient": (
            f"The backward pass made the first {what} {when} in {name}{where}; "
            "all outputs were finite"
        ),
        "local gradient": (
            f"{name} became {kind} {when}{where} on this rank, before gradients were reduced, and "
            "the gradients of all outputs were finite"
        ),
        "parameter gradient": (
            f"{name} became {kind} {when}{where}, and the gradients of all outputs were finite"
        ),
        "update": (
            f"The optimizer made the first {what} {when} in {name}; the gradients were finite"
        ),
    }.get(phase, f"{name} holds {a_what} {when}{where}")


def show_origin(origin: Origin | None) -> list[str]:
    """Give lines of evidence: the line of code, what the operation was given, remarks."""
    if not origin:
        return []
    lines = []
    if origin.get("line"):
        lines.append(f"{origin.get('source', '')}: {str(origin['line']).strip()}")
    for given in origin.get("inputs", ()):
        shape = "x".join(map(str, given.get("shape", ())))
        low, high = given.get("min"), given.get("max")
        reach = "" if low is None or high is None else f", {low:.4g} to {high:.4g}"
        counts = "".join(
            f", {given[one]} {one}" for one in ("zeros", "nan", "inf") if given.get(one)
        )
        lines.append(
            f"input {given.get('name', '')}: {given.get('dtype', '')} {shape}{reach}{counts}"
        )
    return [*lines, *map(str, origin.get("evidence", ()))]


def hint_at(origin: Origin | None) -> str:
    """Say what to try about what a replay has shown; empty where it tells nothing."""
    if not origin or not is_shown(origin):
        return ""
    if origin.get("cause") == "input":
        return "Look at the batch: torch.isfinite(batch).all() before the model is called."
    if origin.get("cause") == "parameter":
        return HINTS["parameter"]
    why = str(origin.get("why") or "")
    return next((hint for words, hint in _REASONS if words in why), "")
