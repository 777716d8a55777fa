"""The CPU path without compiled code: torch operations over blocks that stay in the cache.

Which operations matters more than how many: a float64 copy of a block, its sum, its dot product
with itself and its extremes cost less than one `std` or `isfinite` of the tensor. They show
whether the block is finite and well centred; only where it is not, the reference measures it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hookline.stats import reference
from hookline.stats.rows import Rows, empty_rows, merge_rows

_BLOCK = 1 << 16
# A mean beyond a hundred times the spread: the sum of squares would lose what the spread is.
_LEAST_SPREAD = 1e-4
# Pieces of an update: some float64 copies of each are alive at a time.
_PIECE = 1 << 20


def measure(values: Tensor) -> Rows:
    """Give the row of a vector on the CPU."""
    blocks = [_measure_block(block) for block in values.split(_BLOCK)]
    return _merge(blocks)


def update(before: Tensor, after: Tensor, grad: Tensor | None) -> tuple[Rows, Rows]:
    """Give the row of the difference of two vectors, and the counts of elements given and lost."""
    rows, counts = [], np.zeros(2)
    for start in range(0, before.numel(), _PIECE):
        old, new = before[start : start + _PIECE], after[start : start + _PIECE]
        slope = None if grad is None else grad[start : start + _PIECE]
        row, counted = reference.update(old, new, slope)
        rows.append(row.tolist())
        counts += counted.numpy()
    return _merge(rows), counts


def _merge(rows: list[list[float]]) -> Rows:
    rows = rows or empty_rows(1).tolist()
    merged: Rows = merge_rows(np.array(rows), np.zeros(len(rows), dtype=np.intp), 1)[0]
    return merged


def _measure_block(block: Tensor) -> list[float]:
    x = block.to(torch.float64)
    count = x.numel()
    if count:
        total, square = x.sum().item(), x.dot(x).item()
        m2 = square - total * (total / count)
        # Also false where anything is NaN or infinite.
        if math.isfinite(total) and math.inf > m2 > _LEAST_SPREAD * square:
            low, high = x.aminmax()
            return [count, 0, 0, 0, low.item(), high.item(), total / count, m2]
    row: list[float] = reference.measure(x).tolist()
    return row
