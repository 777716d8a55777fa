"""The Triton kernels of slots that do not move: measure into what a slot has, and empty slots.

Each program merges its share into a row of its own, so nothing is atomic and the order of
additions is that of the launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hookline.stats.kernels import WIDTH, reduce_part, store_row
from hookline.stats.shares import flat_share, merge_means, strided_share


@triton.jit(do_not_specialize=["n", "repeats"])
def accumulate(
    x_ptr,
    n,
    repeats,
    rows_ptr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    CODE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Merge numbers that lie side by side, each `repeats` times, into the rows of a slot."""
    share = tl.program_id(0).to(tl.int64)
    shares = tl.num_programs(0).to(tl.int64)
    finite, nan, posinf, neginf, low, high, mean, m2 = flat_share(
        x_ptr, n.to(tl.int64), share, shares, BLOCK, GROUP, UNROLL, CODE, SUMS
    )
    row_ptr = rows_ptr + share * WIDTH
    merge_row(row_ptr, share, repeats, finite, nan, posinf, neginf, low, high, mean, m2)


@triton.jit(do_not_specialize=["inner", "outer", "step", "repeats"])
def accumulate_strided(
    x_ptr,
    inner,
    outer,
    step,
    repeats,
    rows_ptr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    CODE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Merge runs of numbers, each `repeats` times, into the rows of a slot."""
    share = tl.program_id(0).to(tl.int64)
    shares = tl.num_programs(0).to(tl.int64)
    finite, nan, posinf, neginf, low, high, mean, m2 = strided_share(
        x_ptr,
        inner.to(tl.int64) * UNIT,
        outer.to(tl.int64),
        step.to(tl.int64) * UNIT,
        share,
        shares,
        COLUMNS,
        BLOCK,
        UNROLL,
        CODE,
        SUMS,
    )
    row_ptr = rows_ptr + share * WIDTH
    merge_row(row_ptr, share, repeats, finite, nan, posinf, neginf, low, high, mean, m2)


@triton.jit
def merge_row(row_ptr, share, repeats, finite, nan, posinf, neginf, low, high, mean, m2):
    """Merge what a share has into its row; the first share counts the visit."""
    times = repeats.to(tl.float64)
    finite = finite * times
    old_finite = tl.load(row_ptr + 0)
    old_mean = tl.load(row_ptr + 6)
    low = tl.minimum(low, tl.load(row_ptr + 4))
    high = tl.maximum(high, tl.load(row_ptr + 5))
    total = finite + old_finite
    part = finite / tl.maximum(total, 1.0)
    old_part = old_finite / tl.maximum(total, 1.0)
    centre = part * mean + old_part * old_mean
    rest = part * (mean - centre) + old_part * (old_mean - centre)
    centre = merge_means(centre, rest, low, high)
    apart = tl.where(finite > 0, mean - centre, 0.0)
    old_apart = tl.where(old_finite > 0, old_mean - centre, 0.0)
    spread = finite * apart * apart + old_finite * old_apart * old_apart
    store_row(
        row_ptr,
        total,
        tl.load(row_ptr + 1) + nan * times,
        tl.load(row_ptr + 2) + posinf * times,
        tl.load(row_ptr + 3) + neginf * times,
        low,
        high,
        centre,
        tl.load(row_ptr + 7) + m2 * times + spread,
    )
    if share == 0:
        tl.store(row_ptr + 8, tl.load(row_ptr + 8) + 1.0)


@triton.jit
def empty_slots(partials_ptr, out_ptr, MOST: tl.constexpr):
    """Merge each slot into one row of `out`, with its visits, and leave the slot empty."""
    slot = tl.program_id(0).to(tl.int64)
    which = tl.arange(0, MOST)
    rows = partials_ptr + (slot * MOST + which) * WIDTH
    out = out_ptr + slot * WIDTH
    reduce_part(rows, which < MOST, out)
    tl.store(out + 8, tl.sum(tl.load(rows + 8), 0))
    tl.store(out + 9, 0.0)
    nothing = tl.zeros([MOST], tl.float64)
    tl.debug_barrier()  # all of them are read before the first is emptied
    store_row(
        rows,
        nothing,
        nothing,
        nothing,
        nothing,
        nothing + float("inf"),
        nothing - float("inf"),
        nothing,
        nothing,
    )
    tl.store(rows + 8, nothing)
    tl.store(rows + 9, nothing)
