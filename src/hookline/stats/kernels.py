"""The Triton kernels that measure a tensor on a CUDA device. Imported only where one is there.

Each program reads its share of the tensor once and writes one partial row; `reduce_rows` merges
the partial rows of many tensors at the end of a step. No atomics in the rows, so that the same
tensor gives the same bits each time.

A share is read in a fast way that assumes finite numbers. Sums of squared distances from a pivot
(the mean of the first tile) show by not being finite that this was wrong, or that they were too
large for it; the share is then read again with care. See shares.py for how.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hookline.stats.shares import flat_share, merge_means, strided_share

WIDTH = tl.constexpr(10)
"""Numbers of a partial row: the eight of a row, and of an update what was given and lost."""


@triton.jit
def store_row(row_ptr, finite, nan, posinf, neginf, low, high, mean, m2):
    """Write the eight numbers of a row."""
    tl.store(row_ptr + 0, finite)
    tl.store(row_ptr + 1, nan)
    tl.store(row_ptr + 2, posinf)
    tl.store(row_ptr + 3, neginf)
    tl.store(row_ptr + 4, low)
    tl.store(row_ptr + 5, high)
    tl.store(row_ptr + 6, mean)
    tl.store(row_ptr + 7, m2)


@triton.jit(do_not_specialize=["n"])
def measure(
    x_ptr,
    n,
    rows_ptr,
    programs_ptr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    CODE: tl.constexpr,
    SUMS: tl.constexpr,
    IN_WORDS: tl.constexpr,
):
    """Write the partial rows of one tensor whose numbers lie side by side."""
    share = tl.program_id(0).to(tl.int64)
    shares = tl.num_programs(0).to(tl.int64)
    if share == 0:
        tl.store(programs_ptr, tl.num_programs(0))
    finite, nan, posinf, neginf, low, high, mean, m2 = flat_share(
        x_ptr, n.to(tl.int64), share, shares, BLOCK, GROUP, UNROLL, CODE, SUMS, IN_WORDS
    )
    row_ptr = rows_ptr + share * WIDTH
    store_row(row_ptr, finite, nan, posinf, neginf, low, high, mean, m2)


@triton.jit(do_not_specialize=["inner", "outer", "step"])
def measure_strided(
    x_ptr,
    inner,
    outer,
    step,
    rows_ptr,
    programs_ptr,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    CODE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Write the partial rows of one tensor of runs: `outer` of `inner` numbers, `step` apart.

    `inner` and `step` count units of `UNIT` numbers, so that several can be read at once.
    """
    share = tl.program_id(0).to(tl.int64)
    shares = tl.num_programs(0).to(tl.int64)
    if share == 0:
        tl.store(programs_ptr, tl.num_programs(0))
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
    store_row(row_ptr, finite, nan, posinf, neginf, low, high, mean, m2)


@triton.jit(do_not_specialize=[f"{name}{number}" for name in ("n", "end") for number in range(16)])
def measure_several(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    x3_ptr,
    x4_ptr,
    x5_ptr,
    x6_ptr,
    x7_ptr,
    x8_ptr,
    x9_ptr,
    x10_ptr,
    x11_ptr,
    x12_ptr,
    x13_ptr,
    x14_ptr,
    x15_ptr,
    n0,
    n1,
    n2,
    n3,
    n4,
    n5,
    n6,
    n7,
    n8,
    n9,
    n10,
    n11,
    n12,
    n13,
    n14,
    n15,
    end0,
    end1,
    end2,
    end3,
    end4,
    end5,
    end6,
    end7,
    end8,
    end9,
    end10,
    end11,
    end12,
    end13,
    end14,
    end15,
    rows_ptr,
    programs_ptr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    CODE: tl.constexpr,
    SUMS: tl.constexpr,
    IN_WORDS: tl.constexpr,
):
    """Write the partial rows of sixteen tensors of one dtype in slots that follow each other.

    One launch, because that takes longer than reading a tensor. The programs up to `end0` read the
    first one, those up to `end1` the second: larger ones have more. Fewer come with empty ones.
    """
    x_ptrs = (
        x0_ptr,
        x1_ptr,
        x2_ptr,
        x3_ptr,
        x4_ptr,
        x5_ptr,
        x6_ptr,
        x7_ptr,
        x8_ptr,
        x9_ptr,
        x10_ptr,
        x11_ptr,
        x12_ptr,
        x13_ptr,
        x14_ptr,
        x15_ptr,
    )
    counts = (n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15)
    ends = (
        end0,
        end1,
        end2,
        end3,
        end4,
        end5,
        end6,
        end7,
        end8,
        end9,
        end10,
        end11,
        end12,
        end13,
        end14,
        end15,
    )
    pid = tl.program_id(0)
    which = 0
    x_ptr = x0_ptr
    n = n0
    begin = end0 * 0
    end = end0
    for number in tl.static_range(1, 16):
        if pid >= ends[number - 1]:
            which = number
            x_ptr = x_ptrs[number]
            n = counts[number]
            begin = ends[number - 1]
            end = ends[number]
    share = (pid - begin).to(tl.int64)
    shares = (end - begin).to(tl.int64)
    if share == 0:
        tl.store(programs_ptr + which, end - begin)
    finite, nan, posinf, neginf, low, high, mean, m2 = flat_share(
        x_ptr, n.to(tl.int64), share, shares, BLOCK, GROUP, UNROLL, CODE, SUMS, IN_WORDS
    )
    row_ptr = rows_ptr + (which * MOST + share) * WIDTH
    store_row(row_ptr, finite, nan, posinf, neginf, low, high, mean, m2)


@triton.jit
def reduce_rows(partials_ptr, programs_ptr, out_ptr, MOST: tl.constexpr):
    """Merge the partial rows of each tensor into one."""
    event = tl.program_id(0).to(tl.int64)
    programs = tl.load(programs_ptr + event)
    which = tl.arange(0, MOST)
    here = which < programs
    rows = partials_ptr + (event * MOST + which) * WIDTH
    out = out_ptr + event * WIDTH
    reduce_part(rows, here, out)
    tl.store(out + 8, tl.sum(tl.load(rows + 8, mask=here, other=0.0), 0))
    tl.store(out + 9, tl.sum(tl.load(rows + 9, mask=here, other=0.0), 0))


@triton.jit
def reduce_part(rows, here, out):
    """Merge the rows that are there into the one at `out`."""
    count = tl.load(rows + 0, mask=here, other=0.0)
    mean = tl.load(rows + 6, mask=here, other=0.0)
    low = tl.min(tl.load(rows + 4, mask=here, other=float("inf")), 0)
    high = tl.max(tl.load(rows + 5, mask=here, other=float("-inf")), 0)
    total = tl.sum(count, 0)
    share = count / tl.maximum(total, 1.0)
    centre = tl.sum(share * mean, 0)
    rest = tl.sum(share * (mean - centre), 0)
    centre = merge_means(centre, rest, low, high)
    apart = tl.where(count > 0, mean - centre, 0.0)
    store_row(
        out,
        total,
        tl.sum(tl.load(rows + 1, mask=here, other=0.0), 0),
        tl.sum(tl.load(rows + 2, mask=here, other=0.0), 0),
        tl.sum(tl.load(rows + 3, mask=here, other=0.0), 0),
        low,
        high,
        centre,
        tl.sum(tl.load(rows + 7, mask=here, other=0.0) + count * apart * apart, 0),
    )
