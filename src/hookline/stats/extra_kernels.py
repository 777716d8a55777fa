"""The Triton kernels of what is measured more rarely: the sketch, the counts, the histogram."""

from __future__ import annotations

import triton
import triton.language as tl

from hookline.stats.shares import WIDE, decode


@triton.jit(do_not_specialize=["n"])
def sketch(x_ptr, n, out_ptr, ROWS: tl.constexpr, CODE: tl.constexpr, SUMS: tl.constexpr):
    """Add up the signed columns of this program's rows of 64 numbers; a row of partial sums.

    The 64 signs of a row are the bits of a hash of its number, taken as two halves.
    """
    pid = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    n = n.to(tl.int64)
    rows = tl.arange(0, ROWS)
    halves = tl.arange(0, 2)
    columns = tl.arange(0, 32)
    within = halves[:, None] * 32 + columns[None, :]
    total = tl.zeros([2, 32], tl.float64)
    first = pid * ROWS
    while first * 64 < n:
        row = first + rows
        at = row[:, None, None] * 64 + within[None, :, :]
        x = decode(tl.load(x_ptr + at, mask=at < n, other=0), CODE, SUMS)
        # What stands in for numbers beyond the end is not 0 in every dtype.
        x = tl.where((at < n) & (x - x == 0), x, 0.0)
        state = row.to(tl.uint64) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB
        state = state ^ (state >> 31)
        word = (state[:, None] >> (halves[None, :] * 32).to(tl.uint64)).to(tl.uint32)
        bits = (word[:, :, None] >> columns[None, None, :].to(tl.uint32)) & 1
        total += tl.sum(tl.where(bits == 0, x, -x), 0).to(tl.float64)
        first += programs * ROWS
    tl.store(out_ptr + pid * 64 + within, total)


@triton.jit(do_not_specialize=["n"])
def count(
    x_ptr,
    n,
    counts_ptr,
    bins_ptr,
    TINY: tl.constexpr,
    HUGE: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Count zeros, tiny and huge numbers, and numbers by exponent."""
    pid = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    n = n.to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.int32)
    few = tl.zeros([BLOCK], tl.int32)
    many = tl.zeros([BLOCK], tl.int32)
    bins = tl.zeros([256], tl.int32)
    start = pid * BLOCK
    while start < n:
        at = start + lanes
        here = at < n
        x = decode(tl.load(x_ptr + at, mask=here, other=0), CODE, SUMS)
        size = tl.abs(x)
        is_finite = x - x == 0
        zeros += (here & (x == 0)).to(tl.int32)
        few += (here & (size > 0) & (size < TINY)).to(tl.int32)
        many += (here & is_finite & (size > HUGE)).to(tl.int32)
        if SUMS == WIDE:
            field = ((size.to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32) - 1023 + 127
        else:
            field = size.to(tl.int32, bitcast=True) >> 23
        field = tl.minimum(tl.maximum(field, 0), 254)
        field = tl.where(is_finite, field, 255)
        bins += tl.histogram(tl.where(here, field, 0), 256)
        # The histogram takes no mask here: what lies beyond the end went to bin 0.
        beyond = tl.sum((~here).to(tl.int32), 0)
        bins -= tl.where(tl.arange(0, 256) == 0, beyond, 0)
        start += programs * BLOCK
    tl.atomic_add(counts_ptr + 0, tl.sum(zeros, 0).to(tl.int64))
    tl.atomic_add(counts_ptr + 1, tl.sum(few, 0).to(tl.int64))
    tl.atomic_add(counts_ptr + 2, tl.sum(many, 0).to(tl.int64))
    tl.atomic_add(bins_ptr + tl.arange(0, 256), bins.to(tl.int64))
