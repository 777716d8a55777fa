"""Values that are spread over ranks: where in the whole tensor the part of this rank stands.

The sketch of a part is made at its places in the whole, so that the sketches of all ranks add up
to that of the whole tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookline.stats.logs import SKETCH_WIDTH
from hookline.stats.reference import sketch

_AT_ONCE = 1 << 22
"""How many elements are sketched at once."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that this rank has."""

    local: Tensor
    """Its elements."""

    whole: tuple[int, ...]
    """The shape of the whole tensor."""

    offset: tuple[int, ...]
    """Where in the whole it begins, in each dimension."""

    def facts(self) -> dict[str, Any]:
        """Say where it is, so that JSON can hold it."""
        return {"offset": list(self.offset), "shape": list(self.local.shape)}


def find_shard(tensor: Tensor) -> Shard | None:
    """Give the part that this rank has of a tensor; None where it has all of it."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    if module is None or kind is None or not isinstance(tensor, kind):
        return None
    spread: Any = tensor
    if not any(one.is_shard() for one in spread.placements):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        spread.shape, spread.device_mesh, spread.placements
    )
    return Shard(spread._local_tensor.detach(), tuple(spread.shape), tuple(offset))


def sketch_shard(shard: Shard) -> Tensor:
    """Give the 64 sums of a part, made at its places in the whole tensor."""
    local = shard.local
    total = torch.zeros(SKETCH_WIDTH, dtype=torch.float64, device=local.device)
    if not local.numel() or not local.dim():
        return sketch(local) if local.numel() else total
    rows = max(1, _AT_ONCE // max(1, local[0].numel()))
    for start in range(0, local.shape[0], rows):
        part = local[start : start + rows]
        offset = (shard.offset[0] + start, *shard.offset[1:])
        total += sketch(part.contiguous(), positions=_number(part, shard.whole, offset))
    return total


def _number(part: Tensor, whole: Sequence[int], offset: Sequence[int]) -> Tensor:
    """Number the elements of a part as they are numbered in the whole."""
    places = torch.zeros((), dtype=torch.int64, device=part.device)
    for size, full, first in zip(part.shape, whole, offset, strict=True):
        own = torch.arange(first, first + size, device=part.device)
        places = places.unsqueeze(-1) * full + own
    return places.flatten()
