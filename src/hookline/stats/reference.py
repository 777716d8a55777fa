"""Statistics by plain torch operations in float64: the definition that fast paths are held to.

Works on every device torch computes on and never waits for one: what would be a branch on a value
is a choice between values. Costs several passes and a float64 copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.stats.logs import BINS, SKETCH_WIDTH

_HASH_STEP = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
_HASH_FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_HASH_SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
# More elements than a tensor can have, so that a sum of shares of 2**-64 never overflows.
_SHARE = 2.0**-64
_FLOAT32_BIAS = 127
_LAST_EXPONENT = 254


def measure(values: Tensor) -> Tensor:
    """Give the row of a tensor of real numbers, as a float64 tensor on its device."""
    x = values.to(torch.float64).flatten()
    finite = torch.isfinite(x)
    count = finite.sum(dtype=torch.float64)
    kept = torch.where(finite, x, 0.0)
    some = count.clamp(min=1)

    total = kept.sum()
    shares = (kept * _SHARE).sum()
    mean = torch.where(torch.isfinite(total), total / some, shares / some / _SHARE)
    # What rounding left of the mean shows in the distances from it.
    apart = torch.where(finite, x - mean, 0.0)
    rest = apart.sum() / some
    rest = torch.where(torch.isfinite(rest), rest, 0.0)
    squares, excess = (apart * apart).sum(), count * rest * rest
    m2 = torch.where(torch.isfinite(excess), squares - excess, squares).clamp(min=0)

    infinity = torch.full((1,), torch.inf, dtype=torch.float64, device=x.device)
    low = torch.cat([torch.where(finite, x, torch.inf), infinity]).amin()
    high = torch.cat([torch.where(finite, x, -torch.inf), -infinity]).amax()
    # Where all are equal, rounding must not make up a spread.
    mean, m2 = torch.where(low == high, low, mean + rest), torch.where(low == high, 0.0, m2)
    counts = [torch.isnan(x), x == torch.inf, x == -torch.inf]
    others = [which.sum(dtype=torch.float64) for which in counts]
    return torch.stack([count, *others, low, high, mean, m2])


def sketch(values: Tensor, first: int = 0, positions: Tensor | None = None) -> Tensor:
    """Give the 64 signed sums of numbers that start at row `first`, or stand at `positions`."""
    x = values.to(torch.float64).flatten()
    x = torch.where(torch.isfinite(x), x, 0.0)
    columns = torch.arange(SKETCH_WIDTH, device=x.device)
    if positions is not None:
        column = positions % SKETCH_WIDTH
        bits = (_hash(positions // SKETCH_WIDTH) >> column) & 1
        signed = torch.where(bits == 0, x, -x)
        return torch.zeros(SKETCH_WIDTH, dtype=x.dtype, device=x.device).index_add(
            0, column, signed
        )
    rows = -(-x.numel() // SKETCH_WIDTH)
    padded = torch.nn.functional.pad(x, (0, rows * SKETCH_WIDTH - x.numel()))
    number = torch.arange(first, first + rows, device=x.device)
    bits = (_hash(number)[:, None] >> columns) & 1
    return (padded.view(rows, SKETCH_WIDTH) * (1 - 2 * bits)).sum(dim=0)


def count(values: Tensor, limits: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Give the zeros, the elements below tiny and near the maximum; and elements by exponent."""
    tiny, huge = limits
    x = values.to(torch.float64).flatten().abs()
    which = [x == 0, (x > 0) & (x < tiny), (x > huge) & (x < torch.inf)]
    counts = torch.stack([one.sum(dtype=torch.float64) for one in which])
    # frexp puts the fraction into [0.5, 1), floor(log2) into [1, 2).
    exponents = torch.frexp(x).exponent.long() - 1 + _FLOAT32_BIAS
    bins = torch.where(x == 0, 0, exponents.clamp(0, _LAST_EXPONENT))
    bins = torch.where(torch.isfinite(x), bins, BINS - 1)
    if bins.device.type == "cpu":
        return counts, torch.bincount(bins, minlength=BINS)
    # bincount waits for the device to learn the largest value.
    edges = torch.arange(BINS + 1, device=x.device)
    return counts, torch.searchsorted(bins.sort().values, edges).diff()


def update(before: Tensor, after: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor]:
    """Give the row of `after - before`, and the elements with a gradient and the lost ones."""
    old, new = before.to(torch.float64), after.to(torch.float64)
    given = torch.ones_like(old, dtype=torch.bool) if grad is None else grad != 0
    lost = given & (old == new)
    counts = torch.stack([given.sum(dtype=torch.float64), lost.sum(dtype=torch.float64)])
    return measure(new - old), counts


def _hash(number: Tensor) -> Tensor:
    """Hash row numbers by splitmix64 into 64 bits each; int64 wraps as uint64 does."""
    z = number * _HASH_STEP + _HASH_STEP
    z = (z ^ _shift(z, 30)) * _HASH_FIRST
    z = (z ^ _shift(z, 27)) * _HASH_SECOND
    return z ^ _shift(z, 31)


def _shift(z: Tensor, by: int) -> Tensor:
    """Shift right without the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)
