"""The Triton kernel that finds its slot by itself: in the memory of a key, when it runs."""

from __future__ import annotations

import triton
import triton.language as tl

from hookline.stats.kernels import WIDTH
from hookline.stats.shares import flat_share
from hookline.stats.static_kernels import merge_row


@triton.jit(do_not_specialize=["n", "repeats", "number"])
def accumulate_keyed(
    x_ptr,
    n,
    repeats,
    key_ptr,
    number,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    CODE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Merge numbers into the slot that lies `number` slots after the one the key points to."""
    at = tl.load(key_ptr)
    if at != 0:
        first = at.to(tl.pointer_type(tl.float64))
        rows_ptr = first + number.to(tl.int64) * MOST * WIDTH
        share = tl.program_id(0).to(tl.int64)
        shares = tl.num_programs(0).to(tl.int64)
        finite, nan, posinf, neginf, low, high, mean, m2 = flat_share(
            x_ptr, n.to(tl.int64), share, shares, BLOCK, GROUP, UNROLL, CODE, SUMS
        )
        row_ptr = rows_ptr + share * WIDTH
        merge_row(row_ptr, share, repeats, finite, nan, posinf, neginf, low, high, mean, m2)
