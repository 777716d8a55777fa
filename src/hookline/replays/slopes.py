"""Why a backward operation gave a non-finite gradient, in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hookline.replays.looking import look_at, numbers_of
from hookline.stats.preparing import undisturbed

Saved = Mapping[str, Tensor]


def explain_slope(
    node: str, saved: Saved, received: Tensor | None, given: Tensor, *, operation: str
) -> str:
    """Say why a node gave a non-finite gradient of a finite one, from what its forward saved."""
    name = re.sub(r"Backward\d*$", "", node)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    try:
        with undisturbed():
            rule = _RULES.get(name)
            reason = None if rule is None else rule(name, saved)
            return (reason or _default(operation or name, given)) + _thrown_away(received, given)
    except Exception:  # words are not worth an error
        return _default(operation or name, given)


def _default(name: str, given: Tensor) -> str:
    look = look_at(given)
    kind = "NaN" if look.nan else "an infinite gradient"
    return f"the backward of {name} gave {kind}, and was given a finite gradient"


def _thrown_away(received: Tensor | None, given: Tensor) -> str:
    """Tell where a gradient of 0 met an infinite slope."""
    if received is None or received.shape != given.shape:
        return ""
    at = torch.isnan(numbers_of(given))
    if not bool(at.any()) or not bool((numbers_of(received)[at] == 0).any()):
        return ""
    return "; the gradient that comes in there is 0 (a value that is not used), and 0 * inf is NaN"


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count} elements"


def _zeros(tensor: Tensor | None) -> int:
    return 0 if tensor is None else int((numbers_of(tensor) == 0).sum())


def _at_zero(name: str, saved: Saved) -> str | None:
    count = _zeros(saved.get("result", saved.get("self")))
    return f"{name} at 0 has an infinite slope ({_elements(count)})" if count else None


def _of_power(name: str, saved: Saved) -> str | None:
    count = _zeros(saved.get("self"))
    exponent = saved.get("exponent")
    shown = (
        "" if exponent is None or exponent.numel() != 1 else f" with exponent {exponent.item():.3g}"
    )
    return f"pow at 0{shown} has an infinite slope ({_elements(count)})" if count else None


def _of_division(name: str, saved: Saved) -> str | None:
    under = saved.get("result" if name == "reciprocal" else "other")
    if under is None:
        return None
    values = numbers_of(under)
    if name == "reciprocal":
        values = 1 / values
    count = int((values == 0).sum())
    if count:
        return f"division by zero ({_elements(count)} of the divisor are 0)"
    return f"division by {float(values.abs().min()):.3g}: its slope passes the largest number"


def _at_one(name: str, saved: Saved) -> str | None:
    given = saved.get("self")
    if given is None:
        return None
    count = int((numbers_of(given).abs() >= 1).sum())
    return f"{name} at 1 or -1 has an infinite slope ({_elements(count)})" if count else None


_RULES: dict[str, Callable[[str, Saved], str | None]] = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10", "std", "norm"), _at_zero),
    **dict.fromkeys(("linalg_vector_norm", "cdist", "pow_tensor_tensor"), _at_zero),
    **dict.fromkeys(("div", "reciprocal"), _of_division),
    **dict.fromkeys(("acos", "asin", "atanh", "acosh"), _at_one),
    "pow": _of_power,
}
