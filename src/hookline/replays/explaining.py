"""Why an operation gave something non-finite, in words: `log of 0 (12 elements)`.

It looks at what the operation was given and at its name; where neither tells it says so.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.replays.looking import is_floating, look_at, numbers_of
from hookline.replays.naming import tensors_in
from hookline.stats.preparing import undisturbed

Bound = Mapping[str | int, Any]

_OVERFLOWING = ("exp", "expm1", "exp2", "sinh", "cosh", "square", "pow")
_LOGARITHMS = ("log", "log2", "log10", "log1p", "xlogy")
_SOFTMAX = ("softmax", "log_softmax", "softmin")
_CASTS = ("to", "half", "float", "bfloat16", "double", "type", "type_as", "copy_", "_to_copy")
_PRODUCTS = ("mul", "matmul", "bmm", "mm", "linear", "addmm", "baddbmm", "dot", "einsum")
_MEANS = ("mean", "std", "var", "nanmean", "median")
_TARGETED = ("cross_entropy", "nll_loss", "nll_loss_forward", "nll_loss2d_forward")


def explain(name: str, bound: Bound, output: Tensor, *, line: str = "") -> str:
    """Say why an operation gave a non-finite output; `bound` are its arguments by name."""
    try:
        with undisturbed():
            bare = name.removesuffix("_") or name
            found = _explain(bare, bound, output, line)
    except Exception:  # words are not worth an error
        found = None
    return found or _default(name, output)


def _default(name: str, output: Tensor) -> str:
    kind = "NaN" if look_at(output).nan else "infinity"
    return f"{name} gave {kind}, and was given none"


def _explain(name: str, bound: Bound, output: Tensor, line: str) -> str | None:
    values = list(bound.values())
    floats = [one for one in tensors_in(values) if is_floating(one)]
    look = look_at(output)
    reason: str | None = None
    if any(isinstance(one, float) and one != one for one in values):
        return f"{name} was given the number NaN"
    special = _SPECIAL.get(name)
    if special is not None:
        reason = special(name, bound, output, line)
    if reason is None and look.nan and any(not look_at(one).is_fine for one in floats):
        reason = _of_infinities(name)
    if reason is None and name in _MEANS:
        reason = _of_nothing(name, floats)
    if reason is None and (not look.nan or name in _PRODUCTS):
        reason = _overflow(name, floats, output)
    return reason


def _first(bound: Bound) -> Tensor | None:
    first = next(iter(bound.values()), None)
    return first if isinstance(first, Tensor) else None


def _pair(bound: Bound) -> tuple[Any, Any]:
    values = [*bound.values(), None, None]
    return values[0], values[1]


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count} elements"


def _count(values: Tensor) -> int:
    return int(values.sum())


def _of_softmax(name: str, bound: Bound, output: Tensor, line: str) -> str | None:
    given = _first(bound)
    if given is None:
        return None
    dim = bound.get("dim", bound.get(1, -1))
    low = numbers_of(given) == -torch.inf
    rows = _count(low.all(dim if isinstance(dim, int) else -1))
    if not rows:
        return None
    return f"{name} of a row that is all -inf ({rows} row{'s' if rows > 1 else ''})"


def _of_attention(name: str, bound: Bound, output: Tensor, line: str) -> str | None:
    mask = bound.get("attn_mask", bound.get(3, bound.get("key_padding_mask")))
    if not isinstance(mask, Tensor) or not look_at(output).nan:
        return None
    hidden = ~mask if mask.dtype is torch.bool else numbers_of(mask) == -torch.inf
    rows = _count(hidden.all(-1))
    return f"attention of {rows} rows whose mask leaves nothing to attend to" if rows else None


def _of_logarithm(name: str, bound: Bound, output: Tensor, line: str) -> str | None:
    given = _pair(bound)[1] if name == "xlogy" else _first(bound)
    if not isinstance(given, Tensor):
        return None
    values = numbers_of(given) + (1.0 if name == "log1p" else 0.0)
    shift = "-1" if name == "log1p" else "0"
    below, zeros = _count(values < 0), _count(values == 0)
    if below and look_at(output).nan:
        lowest = float(values.min()) - (1.0 if name == "log1p" else 0.0)
        what = "a negative number" if name != "log1p" else "a number below -1"
        return f"{name} of {what} ({_elements(below)}, the lowest {lowest:.3g})"
    return f"{name} of {shift} ({_elements(zeros)})" if zeros else None


def _of_root(name: str, bound: Bound, output: Tensor, line: str) -> str | None:
    given = _first(bound)
    if given is None:
        return None
    values = numbers_of(given)
    below, zeros = _count(values < 0), _count(values == 0)
    if below and look_at(output).nan:
        lowest = float(values.min())
        return f"{name} of a negative number ({_elements(below)}, the lowest {lowest:.3g})"
    return f"{name} of 0 ({_elements(zeros)})" if zeros and name == "rsqrt" else None


def _of_division(name: str, bound: Bound, output: Tensor, line: str) -> str | None:
    over, under = (1.0, _first(bound)) if name == "reciprocal" else _pair(bound)
    if isinstance(under, (int, float)):
        return "division by zero (the divisor is 0)" if under == 0 else None
    if not isinstance(under, Tensor):
        return None
    values = numbers_of(under)
    zeros = _count(values == 0)
    if not zeros:
        top = numbers_of(over) if isinstance(over, Tensor) else torch.tensor(float(over))
        smallest = float(values.abs().min())
        if look_at(output).nan and not torch.isfinite(top).all():
            return "inf / inf"
        return f"division by {smallest:.3g} overflows {_dtype(output)}"
    divisor = _operand(line)
    named = f" of `{divisor}`" if divisor else " of the divisor"
    verb = "is" if zeros == 1 else "are"
    nought = ", 0 / 0" if look_at(output).nan else ""
    return f"division by zero ({_elements(zeros)}{named} {verb} 0{nought})"


def _operand(line: str) -> str:
    """Give the divisor as it is written, if the line has one division."""
    text = line.rstrip(":")
    for attempt in (text, f"{text}: pass", text.removeprefix("return ")):
        try:
            tree = ast.parse(attempt)
        except SyntaxError:
            continue
        found = [one for one in ast.walk(tree) if isinstance(one, ast.BinOp)]
        divisions = [one for one in found if isinstance(one.op, ast.Div)]
        return ast.unparse(divisions[0].right) if len(divisions) == 1 else ""
    return ""


def _of_product(name: str, bound: Bound, output: Tensor, line: str) -> str | None:
    if not look_at(output).nan:
        return None
    one, other = (_plain(value) for value in _pair(bound))
    for left, right in ((one, other), (other, one)):
        if bool(torch.isinf(left).any()) and bool((right == 0).any()):
            return "0 * inf"
    return None


def _plain(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return numbers_of(value)
    return torch.tensor(float(value) if isinstance(value, (int, float)) else 1.0)


def _of_sum(name: str, bound: Bound, output: Tensor, line: str) -> str | None:
    given = [one for one in tensors_in(list(bound.values())) if is_floating(one)]
    has_infinity = any(look.posinf or look.neginf for look in map(look_at, given))
    return "inf - inf" if has_infinity and look_at(output).nan else None


def _of_infinities(name: str) -> str:
    return f"{name} of infinities gives NaN"


def _of_angle(name: str, bound: Bound, output: Tensor, line: str) -> str | None:
    given = _first(bound)
    if given is None:
        return None
    beyond = numbers_of(given).abs()
    most = float(beyond.max())
    count = _count(beyond >= 1 if name == "atanh" else beyond > 1)
    return f"{name} of a number beyond 1 ({_elements(count)}, up to {most:.9g})" if count else None


def _of_power(name: str, bound: Bound, output: Tensor, line: str) -> str | None:
    given, exponent = _pair(bound)
    if not isinstance(given, Tensor):
        return None
    values = numbers_of(given)
    if look_at(output).nan:
        below = _count(values < 0)
        return f"pow of a negative number with exponent {_number(exponent)} ({_elements(below)})"
    zeros = _count(values == 0)
    negative = isinstance(exponent, (int, float)) and exponent < 0
    return (
        f"0 to the power of {_number(exponent)} ({_elements(zeros)})"
        if zeros and negative
        else None
    )


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, (int, float)) else "a tensor"


def _of_targets(name: str, bound: Bound, output: Tensor, line: str) -> str | None:
    target = bound.get("target", bound.get(1))
    ignored = bound.get("ignore_index", -100)
    if isinstance(target, Tensor) and not is_floating(target):
        if target.numel() == 0:
            return f"{name} of no elements: the mean of none is 0 / 0"
        if isinstance(ignored, int) and bool((target == ignored).all()):
            return f"{name} where every target is {ignored}, which is ignored: the mean is 0 / 0"
    return None


def _of_nothing(name: str, floats: list[Tensor]) -> str | None:
    if floats and floats[0].numel() == 0:
        return f"{name} of no elements"
    if name in ("std", "var"):
        return f"{name} of a single element: its divisor n - 1 is 0"
    return None


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _overflow(name: str, floats: list[Tensor], output: Tensor) -> str | None:
    """Say which number was too large."""
    if not floats or not output.dtype.is_floating_point:
        return None
    limit = torch.finfo(output.dtype).max
    largest = max(_largest(one) for one in floats)
    if name in _CASTS:
        return f"{_dtype(output)} overflow: {largest:.3g} > {limit:.6g}"
    if name in _OVERFLOWING:
        values = numbers_of(floats[0])
        top = values[torch.isfinite(values)].abs().max() if name != "exp" else values.max()
        return f"{name} of {float(top):.4g} overflows {_dtype(output)}"
    return (
        f"{_dtype(output)} overflow: {name} passes {limit:.6g} (its largest input is {largest:.3g})"
    )


def _largest(tensor: Tensor) -> float:
    values = numbers_of(tensor)
    values = values[torch.isfinite(values)]
    return float(values.abs().max()) if values.numel() else 0.0


_SPECIAL: dict[str, Callable[[str, Bound, Tensor, str], str | None]] = {
    **dict.fromkeys(_SOFTMAX, _of_softmax),
    **dict.fromkeys(_LOGARITHMS, _of_logarithm),
    **dict.fromkeys(("sqrt", "rsqrt"), _of_root),
    **dict.fromkeys(("div", "reciprocal", "fmod", "remainder", "floor_divide"), _of_division),
    **dict.fromkeys(_PRODUCTS, _of_product),
    **dict.fromkeys(("add", "sub", "sum", "mean", "cumsum"), _of_sum),
    **dict.fromkeys(("acos", "asin", "atanh", "acosh"), _of_angle),
    **dict.fromkeys(_TARGETED, _of_targets),
    "pow": _of_power,
    "scaled_dot_product_attention": _of_attention,
}
