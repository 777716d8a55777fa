"""From what a model made of a batch to what is kept of each sample.

Padding is left out wherever a mask says what is padding. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hookline._errors import StoreError

Reduce = (
    Literal["tokens", "last", "first", "mean", "max", "sum", "spatial"]
    | int
    | Callable[[Tensor, Tensor | None], Tensor]
    | None
)
"""What is kept of a sample's value: see `hl.extract`."""

NAMES = ("tokens", "last", "first", "mean", "max", "sum", "spatial")

Rows = Tensor | list[Tensor]


def check_reduce(reduce: Any) -> Any:
    """Refuse what is no way to reduce a value."""
    if reduce is None or callable(reduce) or (isinstance(reduce, int) and reduce is not True):
        return reduce
    if reduce in NAMES:
        return reduce
    raise ValueError(
        f"{reduce!r} is no way to reduce a value: give one of {', '.join(NAMES)}, the number of a "
        "token, a function of a value and its mask, or nothing"
    )


def name_reduce(reduce: Reduce) -> str | int | None:
    """Name a way, so that two extractions can be compared."""
    if callable(reduce):
        return f"{reduce.__module__}:{getattr(reduce, '__qualname__', type(reduce).__qualname__)}"
    return reduce


def find_mask(batch: Any) -> Tensor | None:
    """Find the mask that a batch brings along: which tokens of each sample are its own."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def select_rows(
    value: Tensor, mask: Tensor | None, reduce: Reduce, *, count: int, name: str
) -> Rows:
    """Give what is kept of each sample: a tensor with a row for each, or a tensor for each."""
    if callable(reduce):
        kept = reduce(value, mask)
        if not isinstance(kept, Tensor) or not kept.dim() or len(kept) != count:
            told = list(kept.shape) if isinstance(kept, Tensor) else type(kept).__name__
            raise StoreError(
                f"the function that reduces `{name}` has to give a tensor with a row for each of "
                f"the {count} samples, and gave {told}"
            )
        return kept
    if not value.dim() or len(value) != count:
        raise StoreError(
            f"`{name}` is {list(value.shape)} for {count} samples: its first dimension does not "
            "number them. Name another site or one of its values, or reduce it by a function"
        )
    own = None if mask is None or mask.shape != value.shape[:2] else mask.to(value.device).bool()
    if reduce is None:
        return value if own is None else [one[keep] for one, keep in zip(value, own, strict=True)]
    if reduce == "spatial":
        return _average(value.flatten(2), None, 2) if value.dim() > 2 else value
    if value.dim() < 2:
        raise StoreError(f"`{name}` is {list(value.shape)}: it has no tokens for {reduce!r}")
    if reduce == "tokens":
        if own is None:
            return list(value)
        return [one[keep] for one, keep in zip(value, own, strict=True)]
    return _reduce_tokens(value, own, reduce, name)


def _reduce_tokens(value: Tensor, own: Tensor | None, reduce: Any, name: str) -> Tensor:
    """Make one row of the tokens of each sample."""
    samples = torch.arange(len(value), device=value.device)
    if own is None:
        own = torch.ones(value.shape[:2], dtype=torch.bool, device=value.device)
    places = torch.arange(value.shape[1], device=value.device)
    if reduce == "last":
        return value[samples, torch.where(own, places, 0).amax(1)]
    if reduce == "first":
        return value[samples, torch.where(own, places, value.shape[1] - 1).amin(1)]
    shape = (*own.shape, *[1] * (value.dim() - 2))
    if isinstance(reduce, int):
        order = own.cumsum(1) - 1  # the number of each token among the sample's own
        lengths = own.sum(1)
        wanted = lengths + reduce if reduce < 0 else torch.full_like(lengths, reduce)
        if bool(((wanted < 0) | (wanted >= lengths)).any()):
            raise StoreError(f"a sample of `{name}` has no token {reduce}")
        return value[samples, (own & (order == wanted[:, None])).int().argmax(1)]
    if reduce == "max":
        return value.masked_fill(~own.view(shape), float("-inf")).amax(1)
    if reduce == "sum":
        wide = torch.where(own.view(shape), value.float(), 0)
        return wide.sum(1).to(value.dtype)
    return _average(value, own.view(shape), 1)


def _average(value: Tensor, own: Tensor | None, dim: int) -> Tensor:
    """Average in float32; what is padding may be anything, also not finite."""
    wide = value.float() if value.dtype != torch.float64 else value
    if own is None:
        return wide.mean(dim).to(value.dtype)
    total = torch.where(own, wide, 0).sum(dim)
    return (total / own.sum(dim).clamp(min=1)).to(value.dtype)
