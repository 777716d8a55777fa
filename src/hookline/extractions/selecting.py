"""From what a model made of a batch to what is kept of each sample.

Padding is left out wherever a mask says what is padding. Knows no model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hookline._errors import StoreError
from hookline.extractions.collating import Padded

Reduce = (
    Literal["tokens", "last", "first", "mean", "max", "sum", "spatial"]
    | int
    | Callable[[Tensor, Tensor | None], Tensor]
    | None
)
"""What is kept of a sample's value: see `hl.extract`."""

NAMES = ("tokens", "last", "first", "mean", "max", "sum", "spatial")


class Ragged(NamedTuple):
    """The rows of samples that have any number of them."""

    rows: Tensor
    """Those of all samples, one after the other."""

    lengths: list[int]
    """How many rows each sample has."""


Rows = Tensor | Ragged


def check_reduce(reduce: Any) -> Any:
    """Refuse what is no way to reduce a value."""
    is_number = isinstance(reduce, int) and not isinstance(reduce, bool)
    if reduce is None or callable(reduce) or is_number:
        return reduce
    if isinstance(reduce, str) and reduce in NAMES:
        return reduce
    raise ValueError(
        f"{reduce!r} is no way to reduce a value: give one of {', '.join(NAMES)}, the number of a "
        "token, a function of a value and its mask, or nothing"
    )


def name_reduce(reduce: Reduce) -> str | int | None:
    """Name a way, so that two extractions can be compared."""
    return name_function(reduce) if callable(reduce) else reduce


def name_function(function: Any) -> str | None:
    """Name a function, so that two extractions can be compared; one without a name by its code."""
    if function is None:
        return None
    kind = function if hasattr(function, "__qualname__") else type(function)
    name = f"{kind.__module__}:{kind.__qualname__}"
    code = getattr(function, "__code__", None)
    if code is None or "<lambda>" not in name:
        return name
    parts = (code.co_code, *map(str, code.co_names), *map(str, code.co_varnames))
    # The code of a function in it is told by its address, which is another one each time.
    consts = [repr(one) for one in code.co_consts if not isinstance(one, type(code))]
    return f"{name} {hashlib.sha256(repr((parts, consts)).encode()).hexdigest()[:8]}"


def find_mask(batch: Any) -> Tensor | None:
    """Find the mask that a batch brings along: which tokens of each sample are its own."""
    if isinstance(batch, Padded):
        return batch.attention_mask
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def select_rows(
    value: Tensor, mask: Tensor | None, reduce: Reduce, *, count: int, name: str
) -> Rows:
    """Give what is kept of each sample: one row of each, or any number of them.

    Where nothing says how, a value of the mask's shape has tokens; but not one of two dimensions,
    unless it holds whole numbers: that is pooled as a rule. What there is to find out of a mask is
    found where it lies, which is the host as a rule: so nobody waits for a device.
    """
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
    own = None if mask is None or mask.shape != value.shape[:2] else mask.bool()
    if reduce is None:
        # A pooled value may well have as many channels as a batch has tokens.
        is_pooled = value.dim() == 2 and (value.is_floating_point() or value.is_complex())
        return value if own is None or is_pooled else _keep_tokens(value, own)
    if reduce == "spatial":
        return _average(value.flatten(2), None, 2) if value.dim() > 2 else value
    if value.dim() < 2:
        raise StoreError(f"`{name}` is {list(value.shape)}: it has no tokens for {reduce!r}")
    if own is None:
        if mask is not None:
            raise StoreError(
                f"`{name}` is {list(value.shape)} and the attention mask {list(mask.shape)}: which "
                f"of it is padding cannot be told, so {reduce!r} would count it in. Reduce it by a "
                "function of the value and the mask"
            )
        own = torch.ones(value.shape[:2], dtype=torch.bool)
    return _keep_tokens(value, own) if reduce == "tokens" else _reduce_tokens(value, own, reduce)


def _keep_tokens(value: Tensor, own: Tensor) -> Ragged:
    """Keep the tokens of each sample that are its own."""
    lengths: list[int] = own.sum(1).tolist()
    rows = value.flatten(0, 1)
    if not bool(own.all()):
        rows = rows[own.flatten().nonzero().flatten().to(value.device)]
    return Ragged(rows, lengths)


def _reduce_tokens(value: Tensor, own: Tensor, reduce: Any) -> Tensor:
    """Make one row of the tokens of each sample."""
    lengths = own.sum(1)
    if reduce != "sum" and not bool(lengths.all()):
        raise ValueError(f"a sample without a token has nothing for {reduce!r}")
    if isinstance(reduce, int) or reduce in ("last", "first"):
        at = {"last": -1, "first": 0}.get(reduce, reduce)
        return value[
            torch.arange(len(value), device=value.device),
            _find_token(own, lengths, at).to(value.device),
        ]
    shape = (*own.shape, *[1] * (value.dim() - 2))
    mine = own.view(shape).to(value.device)
    if reduce == "max":
        return torch.where(mine, value, _smallest(value.dtype)).amax(1)
    if reduce == "sum":
        return torch.where(mine, _widen(value), 0).sum(1).to(value.dtype)
    return _average(value, mine, 1)


def _find_token(own: Tensor, lengths: Tensor, at: int) -> Tensor:
    """Find where a token of this number is, among each sample's own; the last is -1."""
    wanted = lengths + at if at < 0 else torch.full_like(lengths, at)
    missing = (wanted < 0) | (wanted >= lengths)
    if bool(missing.any()):
        raise ValueError(f"there is no token {at} in a sample of {int(lengths[missing][0])}")
    return (own & (own.cumsum(1) - 1 == wanted[:, None])).int().argmax(1)


def _smallest(dtype: torch.dtype) -> float | int | bool:
    """Give what is larger than nothing of this type."""
    if dtype == torch.bool:
        return False
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _widen(value: Tensor) -> Tensor:
    """Give a value in a type whose sums are not rounded more than need be."""
    if value.is_complex() or value.dtype == torch.float64:
        return value
    return value.float() if value.is_floating_point() else value.long()


def _average(value: Tensor, own: Tensor | None, dim: int) -> Tensor:
    """Average in float32 or better; what is padding may be anything, also not finite."""
    wide = _widen(value)
    if not wide.is_floating_point() and not wide.is_complex():
        wide = wide.double()
    found = wide.mean(dim) if own is None else torch.where(own, wide, 0).sum(dim) / own.sum(dim)
    return found.to(value.dtype if value.is_floating_point() or value.is_complex() else torch.float)
