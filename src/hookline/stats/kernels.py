"""The Triton kernels that measure a tensor on a CUDA device. Imported only where one is there.

Each program reads its share of the tensor once and writes one partial row; `reduce_rows` merges
the partial rows of many tensors at the end of a step. No atomics in the rows, so that the same
tensor gives the same bits each time.

A share is read in a fast way that assumes finite numbers. Sums of squared distances from a pivot
(the mean of the first tile) show by not being finite that this was wrong, or that they were too
large for it; the share is then read again with care.
"""

from __future__ import annotations

import triton
import triton.language as tl

WIDTH = tl.constexpr(10)
"""Numbers of a partial row: the eight of a row, and of an update what was given and lost."""


@triton.jit
def _store_row(row_ptr, finite, nan, posinf, neginf, low, high, mean, m2):
    tl.store(row_ptr + 0, finite)
    tl.store(row_ptr + 1, nan)
    tl.store(row_ptr + 2, posinf)
    tl.store(row_ptr + 3, neginf)
    tl.store(row_ptr + 4, low)
    tl.store(row_ptr + 5, high)
    tl.store(row_ptr + 6, mean)
    tl.store(row_ptr + 7, m2)


@triton.jit
def _careful_row(x_ptr, n, row_ptr, share, shares, BLOCK: tl.constexpr):
    """Measure a share that has numbers which are not finite, or very large ones."""
    lanes = tl.arange(0, BLOCK)
    nan = tl.zeros([BLOCK], tl.int64)
    posinf = tl.zeros([BLOCK], tl.int64)
    neginf = tl.zeros([BLOCK], tl.int64)
    finite = tl.zeros([BLOCK], tl.int64)
    low = tl.full([BLOCK], float("inf"), tl.float64)
    high = tl.full([BLOCK], float("-inf"), tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    start = share * BLOCK
    while start < n:
        at = start + lanes
        here = at < n
        x = tl.load(x_ptr + at, mask=here, other=0).to(tl.float64)
        is_finite = here & (x - x == 0)
        nan += (here & (x != x)).to(tl.int64)
        posinf += (here & (x == float("inf"))).to(tl.int64)
        neginf += (here & (x == float("-inf"))).to(tl.int64)
        finite += is_finite.to(tl.int64)
        low = tl.minimum(low, tl.where(is_finite, x, float("inf")))
        high = tl.maximum(high, tl.where(is_finite, x, float("-inf")))
        total += tl.where(is_finite, x, 0.0) * 0.0009765625  # room for sums of the largest numbers
        start += shares * BLOCK
    count = tl.sum(finite, 0).to(tl.float64)
    mean = tl.where(count > 0, tl.sum(total, 0) / tl.maximum(count, 1.0) * 1024.0, 0.0)
    squares = tl.zeros([BLOCK], tl.float64)
    rest = tl.zeros([BLOCK], tl.float64)
    start = share * BLOCK
    while start < n:
        at = start + lanes
        here = at < n
        x = tl.load(x_ptr + at, mask=here, other=0).to(tl.float64)
        apart = tl.where(here & (x - x == 0), x - mean, 0.0)
        squares += apart * apart
        rest += apart
        start += shares * BLOCK
    off = tl.sum(rest, 0) / tl.maximum(count, 1.0)
    m2 = tl.sum(squares, 0)
    correction = count * off * off
    m2 = tl.where(correction < m2, m2 - correction, m2)
    mean = tl.where(off - off == 0, mean + off, mean)
    _store_row(
        row_ptr,
        count,
        tl.sum(nan, 0).to(tl.float64),
        tl.sum(posinf, 0).to(tl.float64),
        tl.sum(neginf, 0).to(tl.float64),
        tl.min(low, 0),
        tl.max(high, 0),
        mean,
        m2,
    )


@triton.jit
def _measure_share(
    x_ptr,
    n,
    rows_ptr,
    programs_ptr,
    share,
    shares,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the partial row of one share of `n` numbers that lie one after the other.

    `WIDE` numbers need float64 for every operation; narrow ones (16 bits and less) are exact in
    float32, where `UNROLL` of them are added before the sum becomes float64.
    """
    if share == 0:
        tl.store(programs_ptr, shares.to(tl.int32))
    row_ptr = rows_ptr + share * WIDTH
    lanes = tl.arange(0, BLOCK)
    stride = shares * BLOCK
    first = share * BLOCK
    at = first + lanes
    here = at < n
    x = tl.load(x_ptr + at, mask=here, other=0).to(tl.float64 if WIDE else tl.float32)
    is_finite = here & (x - x == 0)
    finite_here = tl.sum(is_finite.to(tl.int32), 0)
    pivot = tl.sum(tl.where(is_finite, x, 0.0), 0) / tl.maximum(finite_here, 1)
    pivot = tl.where(pivot - pivot == 0, pivot, 0.0).to(x.dtype)

    low = tl.where(here, x, float("inf"))
    high = tl.where(here, x, float("-inf"))
    apart = tl.where(here, x.to(tl.float64) - pivot.to(tl.float64), 0.0)
    total = apart if WIDE else tl.where(here, x, 0.0).to(tl.float64)
    squares = apart * apart
    start = first + stride
    # Whole groups of tiles need no mask.
    while start + (UNROLL - 1) * stride + BLOCK <= n:
        sum_32 = tl.zeros([BLOCK], x.dtype)
        squares_32 = tl.zeros([BLOCK], x.dtype)
        for step in tl.static_range(UNROLL):
            x = tl.load(x_ptr + start + step * stride + lanes).to(sum_32.dtype)
            low = tl.minimum(low, x)
            high = tl.maximum(high, x)
            near = x - pivot
            sum_32 += near if WIDE else x
            squares_32 += near * near
        total += sum_32.to(tl.float64)
        squares += squares_32.to(tl.float64)
        start += UNROLL * stride
    while start < n:
        at = start + lanes
        here = at < n
        x = tl.load(x_ptr + at, mask=here, other=0).to(low.dtype)
        low = tl.minimum(low, tl.where(here, x, float("inf")))
        high = tl.maximum(high, tl.where(here, x, float("-inf")))
        apart = tl.where(here, x.to(tl.float64) - pivot.to(tl.float64), 0.0)
        total += apart if WIDE else tl.where(here, x, 0.0).to(tl.float64)
        squares += apart * apart
        start += stride

    all_squares = tl.sum(squares, 0)
    all_total = tl.sum(total, 0)
    if (all_squares - all_squares == 0) & (all_total - all_total == 0):
        whole = (n - first + stride - 1) // stride  # tiles of this program, the last maybe cut
        last = first + (whole - 1) * stride
        count_int = (whole - 1) * BLOCK + tl.minimum(n - last, BLOCK)
        count = tl.where(whole > 0, count_int, 0).to(tl.float64)
        # The sum of wide numbers is of their distances from the pivot: nothing is lost of a mean.
        off = all_total / tl.maximum(count, 1.0) - (0.0 if WIDE else pivot.to(tl.float64))
        mean = pivot.to(tl.float64) + off
        m2 = tl.maximum(all_squares - count * off * off, 0.0)
        _store_row(
            row_ptr,
            count,
            0.0,
            0.0,
            0.0,
            tl.min(low, 0).to(tl.float64),
            tl.max(high, 0).to(tl.float64),
            mean,
            m2,
        )
    else:
        _careful_row(x_ptr, n, row_ptr, share, shares, BLOCK)


@triton.jit(do_not_specialize=["n"])
def measure(
    x_ptr, n, rows_ptr, programs_ptr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, WIDE: tl.constexpr
):
    """Write the partial rows of one tensor."""
    share = tl.program_id(0).to(tl.int64)
    shares = tl.num_programs(0).to(tl.int64)
    n = n.to(tl.int64)
    _measure_share(x_ptr, n, rows_ptr, programs_ptr, share, shares, BLOCK, UNROLL, WIDE)


@triton.jit(do_not_specialize=["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"])
def measure_eight(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    x3_ptr,
    x4_ptr,
    x5_ptr,
    x6_ptr,
    x7_ptr,
    n0,
    n1,
    n2,
    n3,
    n4,
    n5,
    n6,
    n7,
    rows_ptr,
    programs_ptr,
    MOST: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the partial rows of eight tensors of one dtype in slots that follow each other.

    One launch, because that takes longer than reading a tensor. Fewer come with empty ones.
    """
    pid = tl.program_id(0)
    which = pid // SHARES
    share = (pid % SHARES).to(tl.int64)
    x_ptr = x0_ptr
    n = n0
    if which == 1:
        x_ptr = x1_ptr
        n = n1
    elif which == 2:
        x_ptr = x2_ptr
        n = n2
    elif which == 3:
        x_ptr = x3_ptr
        n = n3
    elif which == 4:
        x_ptr = x4_ptr
        n = n4
    elif which == 5:
        x_ptr = x5_ptr
        n = n5
    elif which == 6:
        x_ptr = x6_ptr
        n = n6
    elif which == 7:
        x_ptr = x7_ptr
        n = n7
    n = n.to(tl.int64)
    shares = tl.minimum((n + BLOCK - 1) // BLOCK, SHARES)
    if share < shares:
        _measure_share(
            x_ptr,
            n,
            rows_ptr + which.to(tl.int64) * MOST * WIDTH,
            programs_ptr + which,
            share,
            shares,
            BLOCK,
            UNROLL,
            WIDE,
        )


@triton.jit
def reduce_rows(partials_ptr, programs_ptr, out_ptr, MOST: tl.constexpr):
    """Merge the partial rows of each tensor into one."""
    event = tl.program_id(0).to(tl.int64)
    programs = tl.load(programs_ptr + event)
    which = tl.arange(0, MOST)
    here = which < programs
    rows = partials_ptr + (event * MOST + which) * WIDTH
    count = tl.load(rows + 0, mask=here, other=0.0)
    mean = tl.load(rows + 6, mask=here, other=0.0)
    m2 = tl.load(rows + 7, mask=here, other=0.0)
    total = tl.sum(count, 0)
    share = count / tl.maximum(total, 1.0)
    centre = tl.sum(share * mean, 0)
    rest = tl.sum(share * (mean - centre), 0)
    centre = tl.where(rest - rest == 0, centre + rest, centre)
    apart = tl.where(count > 0, mean - centre, 0.0)
    _store_row(
        out_ptr + event * WIDTH,
        total,
        tl.sum(tl.load(rows + 1, mask=here, other=0.0), 0),
        tl.sum(tl.load(rows + 2, mask=here, other=0.0), 0),
        tl.sum(tl.load(rows + 3, mask=here, other=0.0), 0),
        tl.min(tl.load(rows + 4, mask=here, other=float("inf")), 0),
        tl.max(tl.load(rows + 5, mask=here, other=float("-inf")), 0),
        centre,
        tl.sum(m2 + count * apart * apart, 0),
    )
    tl.store(out_ptr + event * WIDTH + 8, tl.sum(tl.load(rows + 8, mask=here, other=0.0), 0))
    tl.store(out_ptr + event * WIDTH + 9, tl.sum(tl.load(rows + 9, mask=here, other=0.0), 0))


@triton.jit
def _update_share(
    before_ptr,
    after_ptr,
    grad_ptr,
    n,
    rows_ptr,
    programs_ptr,
    share,
    shares,
    HAS_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the partial row of what was added to a weight, and count what stayed as it was."""
    if share == 0:
        tl.store(programs_ptr, shares.to(tl.int32))
    row_ptr = rows_ptr + share * WIDTH
    lanes = tl.arange(0, BLOCK)
    given = tl.zeros([BLOCK], tl.int64)
    lost = tl.zeros([BLOCK], tl.int64)
    nan = tl.zeros([BLOCK], tl.int64)
    posinf = tl.zeros([BLOCK], tl.int64)
    neginf = tl.zeros([BLOCK], tl.int64)
    finite = tl.zeros([BLOCK], tl.int64)
    low = tl.full([BLOCK], float("inf"), tl.float64)
    high = tl.full([BLOCK], float("-inf"), tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    start = share * BLOCK
    pivot = tl.load(after_ptr + start).to(tl.float64) - tl.load(before_ptr + start).to(tl.float64)
    pivot = tl.where(pivot - pivot == 0, pivot, 0.0)
    while start < n:
        at = start + lanes
        here = at < n
        before = tl.load(before_ptr + at, mask=here, other=0).to(tl.float64)
        after = tl.load(after_ptr + at, mask=here, other=0).to(tl.float64)
        moves = here
        if HAS_GRAD:
            grad = tl.load(grad_ptr + at, mask=here, other=0)
            moves = here & (grad != 0)
        given += moves.to(tl.int64)
        lost += (moves & (before == after)).to(tl.int64)
        x = after - before
        is_finite = here & (x - x == 0)
        nan += (here & (x != x)).to(tl.int64)
        posinf += (here & (x == float("inf"))).to(tl.int64)
        neginf += (here & (x == float("-inf"))).to(tl.int64)
        finite += is_finite.to(tl.int64)
        low = tl.minimum(low, tl.where(is_finite, x, float("inf")))
        high = tl.maximum(high, tl.where(is_finite, x, float("-inf")))
        x = tl.where(is_finite, x - pivot, 0.0)
        total += x
        squares += x * x
        start += shares * BLOCK
    amount = tl.sum(finite, 0).to(tl.float64)
    off = tl.sum(total, 0) / tl.maximum(amount, 1.0)
    mean = tl.where(amount > 0, pivot + off, 0.0)
    _store_row(
        row_ptr,
        amount,
        tl.sum(nan, 0).to(tl.float64),
        tl.sum(posinf, 0).to(tl.float64),
        tl.sum(neginf, 0).to(tl.float64),
        tl.min(low, 0),
        tl.max(high, 0),
        mean,
        tl.maximum(tl.sum(squares, 0) - amount * off * off, 0.0),
    )
    tl.store(row_ptr + 8, tl.sum(given, 0).to(tl.float64))
    tl.store(row_ptr + 9, tl.sum(lost, 0).to(tl.float64))


@triton.jit(do_not_specialize=["n0", "n1", "n2", "n3"])
def measure_four_updates(
    before0_ptr,
    before1_ptr,
    before2_ptr,
    before3_ptr,
    after0_ptr,
    after1_ptr,
    after2_ptr,
    after3_ptr,
    grad0_ptr,
    grad1_ptr,
    grad2_ptr,
    grad3_ptr,
    n0,
    n1,
    n2,
    n3,
    rows_ptr,
    programs_ptr,
    MOST: tl.constexpr,
    SHARES: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the partial rows of four updates of one dtype, in slots that follow each other."""
    pid = tl.program_id(0)
    which = pid // SHARES
    share = (pid % SHARES).to(tl.int64)
    before_ptr = before0_ptr
    after_ptr = after0_ptr
    grad_ptr = grad0_ptr
    n = n0
    if which == 1:
        before_ptr = before1_ptr
        after_ptr = after1_ptr
        grad_ptr = grad1_ptr
        n = n1
    elif which == 2:
        before_ptr = before2_ptr
        after_ptr = after2_ptr
        grad_ptr = grad2_ptr
        n = n2
    elif which == 3:
        before_ptr = before3_ptr
        after_ptr = after3_ptr
        grad_ptr = grad3_ptr
        n = n3
    n = n.to(tl.int64)
    shares = tl.minimum((n + BLOCK - 1) // BLOCK, SHARES)
    if share < shares:
        _update_share(
            before_ptr,
            after_ptr,
            grad_ptr,
            n,
            rows_ptr + which.to(tl.int64) * MOST * WIDTH,
            programs_ptr + which,
            share,
            shares,
            HAS_GRAD,
            BLOCK,
        )
