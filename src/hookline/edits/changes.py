"""What each kind of edit computes: one function of a tensor and the operands of the edit.

The same function runs eagerly and is traced into compiled graphs. Numbers are operands too, as
tensors of one element, so that a graph takes another number without being compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.hooks.fitting import show_shape

_REDUCED = (torch.bfloat16, torch.float16)
"""Types with which torch calculates in float32."""


def hold(number: float) -> Tensor:
    """Keep a number as an operand.

    It has a dimension: the compiler takes float64 tensors without one for numbers of Python's, and
    compiles once more to find out.
    """
    return torch.tensor([number], dtype=torch.int64 if isinstance(number, int) else torch.float64)


def _meet(value: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Give a value and a number in the type that torch calculates in with a number of Python's."""
    number = number.reshape(())
    if value.dtype in _REDUCED:
        return value.float(), number.float()
    if value.is_floating_point() or value.is_complex():
        return value, number.to(value.dtype)
    return value, number


def _back(value: Tensor, result: Tensor) -> Tensor:
    return result.to(value.dtype) if value.dtype in _REDUCED else result


def _replace(value: Tensor, new: Tensor) -> Tensor:
    return new


def _fill(value: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(value, requires_grad=False).fill_(number.reshape(()))


def _add(value: Tensor, more: Tensor) -> Tensor:
    return value + more.to(value.dtype)


def _add_number(value: Tensor, number: Tensor) -> Tensor:
    left, right = _meet(value, number)
    return _back(value, left + right)


def _scale(value: Tensor, factor: Tensor) -> Tensor:
    return value * factor.to(value.dtype)


def _scale_by_number(value: Tensor, number: Tensor) -> Tensor:
    left, right = _meet(value, number)
    return _back(value, left * right)


def _clip(value: Tensor, low: Tensor, high: Tensor) -> Tensor:
    least, most = low.reshape(()), high.reshape(())
    if value.is_floating_point():
        least, most = least.to(value.dtype), most.to(value.dtype)
    return torch.clamp(value, least, most)


def _clip_norm(value: Tensor, norm: Tensor, dim: int | tuple[int, ...] | None) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(value, dim=dim, keepdim=True, dtype=torch.float32)
    least = torch.finfo(torch.float32).tiny
    factor = (size.clamp(min=least).reciprocal() * norm.reshape(()).float()).clamp(max=1.0)
    clipped: Tensor = value * factor.to(value.dtype)
    return clipped


def _mask(value: Tensor, keep: Tensor, fill: Tensor) -> Tensor:
    return torch.where(keep.to(value.device), value, fill.reshape(()).to(value.dtype))


def _swap(value: Tensor, first: Tensor, second: Tensor, dim: int) -> Tensor:
    size = value.shape[dim]
    rows = torch.arange(size, device=value.device)
    one = first.to(value.device).reshape(()) % size
    other = second.to(value.device).reshape(()) % size
    order = torch.where(rows == one, other, torch.where(rows == other, one, rows))
    return value.index_select(dim, order)


def _order(value: Tensor, order: Tensor, dim: int) -> Tensor:
    return value.index_select(dim, order.to(value.device))


CHANGES: dict[str, Callable[..., Tensor]] = {
    "replace": _replace,
    "fill": _fill,
    "add": _add,
    "add number": _add_number,
    "scale": _scale,
    "scale by number": _scale_by_number,
    "clip": _clip,
    "clip norm": _clip_norm,
    "mask": _mask,
    "swap": _swap,
    "order": _order,
}
"""What is computed, by kind."""

_MEETING = ("add", "scale", "mask")
"""The kinds whose first operand has to go with the shape of the value."""


def change(value: Tensor, kind: str, operands: Sequence[Tensor], settings: Sequence[Any]) -> Tensor:
    """Give a tensor changed in one of the ways there are."""
    return CHANGES[kind](value, *operands, *settings)


def why_unfit(value: Tensor, kind: str, operands: Sequence[Tensor]) -> str:
    """Say why an operand does not go with a value; empty where it does. May run while traced."""
    if kind not in _MEETING:
        return ""
    given = operands[0]
    for index in range(1, min(given.dim(), value.dim()) + 1):
        one, other = given.shape[-index], value.shape[-index]
        if one != other and one != 1 and other != 1:
            mine, theirs = show_shape(given.shape), show_shape(value.shape)
            return f"a tensor of shape {mine} does not go with one of {theirs}"
    if given.device != value.device and given.dim() and kind != "mask":
        return f"it is on {given.device}, and the value on {value.device}"
    return ""
