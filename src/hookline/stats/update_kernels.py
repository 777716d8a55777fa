"""The Triton kernels that measure what an optimizer added to weights."""

from __future__ import annotations

import triton
import triton.language as tl

from hookline.stats.kernels import WIDTH, store_row


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
    store_row(
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
