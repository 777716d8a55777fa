"""The rows and positions that an edit is limited to, as operands of what chooses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Places = int | slice | Sequence[int] | None
"""One index, several, a slice of them, or None for all."""

_FAR = 1 << 62
"""The end of a slice that has none."""


class Choice(NamedTuple):
    """Which indexes along one dimension are chosen."""

    form: str
    """`numbers`, `span` (start, end, step) or `flags`."""
    chosen: Tensor
    """The numbers, as they were given: those below 0 count from the end."""
    dim: int
    """The dimension."""


def choose(places: Places, dim: int) -> Choice:
    """Write down what is chosen, for any size of the dimension."""
    if isinstance(places, slice):
        end = _FAR if places.stop is None else places.stop
        return Choice("span", torch.tensor([places.start or 0, end, places.step or 1]), dim)
    chosen = torch.as_tensor([places] if isinstance(places, int) else places)
    if chosen.dtype == torch.bool:
        return Choice("flags", chosen.reshape(-1), dim)
    return Choice("numbers", chosen.reshape(-1).long(), dim)


def limit(value: Tensor, new: Tensor, choices: Sequence[tuple[str, Tensor, int]]) -> Tensor:
    """Give the new value where it is chosen along every dimension, and the old one elsewhere."""
    mask = torch.ones((1,) * value.dim(), dtype=torch.bool, device=value.device)
    for form, chosen, dim in choices:
        shape = [1] * value.dim()
        shape[dim] = value.shape[dim]
        flags = _flags(value.shape[dim], form, chosen.to(value.device))
        mask = mask & flags.reshape(shape)
    return torch.where(mask, new, value)


def _flags(size: int, form: str, chosen: Tensor) -> Tensor:
    if form == "flags":
        return chosen
    rows = torch.arange(size, device=chosen.device)
    if form == "numbers":
        # Compared, not indexed: a number that is outside writes nowhere.
        return (rows[:, None] == torch.where(chosen < 0, chosen + size, chosen)).any(1)
    start, end, step = chosen[0], chosen[1], chosen[2]
    start = torch.where(start < 0, start + size, start).clamp(min=0)
    end = torch.where(end < 0, end + size, end)
    return (rows >= start) & (rows < end) & ((rows - start) % step == 0)


def explain(shape: Sequence[int], places: Places, dim: int, address: str) -> str:
    """Say why places cannot be chosen in a tensor of this shape; empty where they can."""
    if not -len(shape) <= dim < len(shape):
        return (
            f"`{address}` has {len(shape)} dimensions, so there is no dimension {dim} to "
            "select rows or positions in. Give row_dim or position_dim."
        )
    size = shape[dim]
    if isinstance(places, slice):
        return ""
    form, chosen, _ = choose(places, dim)
    numbers = chosen.tolist()
    is_outside = (
        len(numbers) != size
        if form == "flags"
        else any(not -size <= number < size for number in numbers)
    )
    if is_outside:
        return f"`{address}` has {size} entries in dimension {dim}; {places!r} is outside."
    return ""
