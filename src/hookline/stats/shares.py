"""What every measuring kernel is made of: reading a share of a tensor into the numbers of a row.

`CODE` tells how the bits of an element are read and `SUMS` how its sums are made; `readings.py`
has both for every dtype. A share is every so-manieth tile of a tensor; tiles have `BLOCK` numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hookline.stats.grouping import group_max, group_min, group_sum, read_words

PLAIN = tl.constexpr(0)
E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)
E4M3_BITS = tl.constexpr(3)
E4M3_FNUZ = tl.constexpr(4)
E5M2_FNUZ = tl.constexpr(5)
E8M0 = tl.constexpr(6)

FEW = tl.constexpr(0)
"""Numbers of 8 bits: float32 holds sums of a few squares, or they lie far apart."""
NARROW = tl.constexpr(1)
"""Numbers of 16 bits, exact in float32: a few are added there, squares as seen from a pivot."""
SINGLE = tl.constexpr(2)
"""Numbers of float32: their sums need float64."""
WIDE = tl.constexpr(3)
"""Numbers that need float64 for every operation."""

CAREFUL = tl.constexpr(512)
"""Numbers that are read at once where care is taken."""


@triton.jit
def decode(x, CODE: tl.constexpr, SUMS: tl.constexpr):
    """Give elements as float32 where that holds them, and else as float64."""
    KIND: tl.constexpr = tl.float64 if SUMS == WIDE else tl.float32
    if CODE == PLAIN:
        return x.to(KIND)
    if CODE == E4M3:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(KIND)
    if CODE == E5M2:
        return x.to(tl.float8e5, bitcast=True).to(tl.float32).to(KIND)
    bits = x.to(tl.int32)
    size = bits & 0x7F
    if CODE == E8M0:
        # 2**-127 is no normal number, and what would be infinity is NaN.
        bits = tl.where(bits == 0, 0x00400000, tl.where(bits == 255, 0x7FC00000, bits << 23))
        return bits.to(tl.float32, bitcast=True).to(KIND)
    # The exponent is moved to where float32 has it; a product corrects its bias, exactly.
    if CODE == E5M2_FNUZ:
        x = (size << 21).to(tl.float32, bitcast=True) * 2.0**111
    elif CODE == E4M3_FNUZ:
        x = (size << 20).to(tl.float32, bitcast=True) * 2.0**119
    else:
        x = (size << 20).to(tl.float32, bitcast=True) * 2.0**120
    x = tl.where(bits >= 128, -x, x)
    is_nan = size == 127 if CODE == E4M3_BITS else bits == 128
    return tl.where(is_nan, float("nan"), x).to(KIND)


@triton.jit
def merge_means(centre, rest, low, high):
    """Correct the mean of merged rows by what rounding left of it."""
    centre = tl.where(rest - rest == 0, centre + rest, centre)
    # Where all elements are equal, rounding must not make up a spread.
    return tl.where(low == high, low, centre)


@triton.jit
def flat_share(
    x_ptr,
    n,
    share,
    shares,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    CODE: tl.constexpr,
    SUMS: tl.constexpr,
    IN_WORDS: tl.constexpr,
):
    """Measure one share of `n` numbers that lie side by side.

    `IN_WORDS` where they are float8 at an aligned address.
    """
    lanes = tl.arange(0, BLOCK)
    stride = shares * BLOCK
    first = share * BLOCK
    at = first + lanes
    here = at < n
    x = decode(tl.load(x_ptr + at, mask=here, other=0), CODE, SUMS)
    pivot = _find_pivot(x, here, SUMS)
    low = group_min(tl.where(here, x, float("inf")), GROUP)
    high = group_max(tl.where(here, x, float("-inf")), GROUP)
    total, squares = _add_up(x, here, pivot, GROUP, SUMS)
    tiles = (n - first + stride - 1) // stride  # of this share, the last maybe cut
    last = first + (tiles - 1) * stride
    start = first + stride
    if IN_WORDS:
        low, high, total, squares, start = read_words(
            x_ptr,
            n,
            start,
            stride,
            low,
            high,
            total,
            squares,
            BLOCK,
            GROUP,
            UNROLL,
            CODE == E4M3,
        )
    while start + (UNROLL - 1) * stride + BLOCK <= n:
        low, high, more_total, more_squares = _read_group(
            x_ptr, n, first, start, stride, lanes, pivot, low, high, GROUP, UNROLL, CODE, SUMS, True
        )
        total += more_total
        squares += more_squares
        start += UNROLL * stride
    if start + BLOCK <= n:
        low, high, more_total, more_squares = _read_group(
            x_ptr,
            n,
            first,
            start,
            stride,
            lanes,
            pivot,
            low,
            high,
            GROUP,
            UNROLL,
            CODE,
            SUMS,
            False,
        )
        total += more_total
        squares += more_squares
    if (tiles > 1) & (last + BLOCK > n):
        here = last + lanes < n
        x = decode(tl.load(x_ptr + last + lanes, mask=here, other=0), CODE, SUMS)
        low = tl.minimum(low, group_min(tl.where(here, x, float("inf")), GROUP))
        high = tl.maximum(high, group_max(tl.where(here, x, float("-inf")), GROUP))
        more_total, more_squares = _add_up(x, here, pivot, GROUP, SUMS)
        total += more_total
        squares += more_squares
    count = tl.where(tiles > 0, (tiles - 1) * BLOCK + tl.minimum(n - last, BLOCK), 0)
    return _finish(
        x_ptr,
        n,
        1,
        0,
        share,
        shares,
        count,
        pivot,
        low,
        high,
        total,
        squares,
        BLOCK,
        BLOCK,
        CODE,
        SUMS,
    )


@triton.jit
def _read_group(
    x_ptr,
    n,
    first,
    start,
    stride,
    lanes,
    pivot,
    low,
    high,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    CODE: tl.constexpr,
    SUMS: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Read up to `UNROLL` whole tiles, all on their way at once; a mask would slow that down.

    In place of tiles that are not there, or are cut, the first one is read again for nothing.
    """
    BLOCK: tl.constexpr = lanes.shape[0]
    kind: tl.constexpr = tl.float64 if SUMS >= SINGLE else tl.float32
    total = tl.zeros([BLOCK // GROUP], kind)
    squares = tl.zeros([BLOCK // GROUP], kind)
    for step in tl.static_range(UNROLL):
        at = start + step * stride
        is_there = at + BLOCK <= n
        if not IS_FULL:
            at = tl.where(is_there, at, first)
        x = decode(tl.load(x_ptr + at + lanes), CODE, SUMS)
        low = tl.minimum(low, group_min(x, GROUP))
        high = tl.maximum(high, group_max(x, GROUP))
        near = x if SUMS == FEW else x.to(kind) - pivot
        added = near if SUMS >= SINGLE else x
        if not IS_FULL:
            near = tl.where(is_there, near, 0.0)
            added = tl.where(is_there, added, 0.0)
        total += group_sum(added, GROUP)
        squares += group_sum(near * near, GROUP)
    return low, high, total.to(tl.float64), squares.to(tl.float64)


@triton.jit
def _add_up(x, here, pivot, GROUP: tl.constexpr, SUMS: tl.constexpr):
    """Give the sums of some numbers and of their squares, as seen from the pivot, in float64."""
    x = x.to(tl.float64)
    near = tl.where(here, x - pivot.to(tl.float64), 0.0)
    added = near if SUMS >= SINGLE else tl.where(here, x, 0.0)
    return group_sum(added, GROUP), group_sum(near * near, GROUP)


@triton.jit
def strided_share(
    x_ptr,
    inner,
    outer,
    step,
    share,
    shares,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    CODE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Measure one share of `outer` runs of `inner` numbers, `step` from run to run.

    A tile is `COLUMNS` numbers of some runs that follow each other.
    """
    kind: tl.constexpr = tl.float64 if SUMS >= SINGLE else tl.float32
    ROWS: tl.constexpr = BLOCK // COLUMNS
    lanes = tl.arange(0, BLOCK)
    columns = lanes % COLUMNS
    rows = lanes // COLUMNS
    across = (inner + COLUMNS - 1) // COLUMNS
    # Where the next tile is, without a division each time.
    down = share // across
    along = share % across
    jump_down = shares // across
    jump_along = shares % across

    # What stands in for elements beyond the end: one that is there does not move the extremes.
    filler = tl.load(x_ptr + down * ROWS * step + along * COLUMNS)
    column = along * COLUMNS + columns
    row = down * ROWS + rows
    here = (column < inner) & (row < outer)
    x = decode(tl.load(x_ptr + row * step + column, mask=here, other=filler), CODE, SUMS)
    pivot = _find_pivot(x, here, SUMS)
    low = x
    high = x
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    count = tl.zeros([], tl.int64)
    while down * ROWS < outer:
        few_total = tl.zeros([BLOCK], kind)
        few_squares = tl.zeros([BLOCK], kind)
        for _ in tl.static_range(UNROLL):
            column = along * COLUMNS + columns
            row = down * ROWS + rows
            here = (column < inner) & (row < outer)
            x = decode(tl.load(x_ptr + row * step + column, mask=here, other=filler), CODE, SUMS)
            low = tl.minimum(low, x)
            high = tl.maximum(high, x)
            near = tl.where(here, x if SUMS == FEW else x.to(kind) - pivot, 0.0)
            few_total += near if SUMS != NARROW else tl.where(here, x, 0.0)
            few_squares += near * near
            wide = tl.minimum(inner - along * COLUMNS, COLUMNS)
            count += wide * tl.maximum(tl.minimum(outer - down * ROWS, ROWS), 0)
            along += jump_along
            down += jump_down
            down = tl.where(along >= across, down + 1, down)
            along = tl.where(along >= across, along - across, along)
        total += few_total.to(tl.float64)
        squares += few_squares.to(tl.float64)
    return _finish(
        x_ptr,
        inner,
        outer,
        step,
        share,
        shares,
        count,
        pivot,
        low,
        high,
        total,
        squares,
        COLUMNS,
        BLOCK,
        CODE,
        SUMS,
    )


@triton.jit
def _find_pivot(x, here, SUMS: tl.constexpr):
    """Give the mean of the first tile's finite numbers; 0 where none is needed."""
    kind: tl.constexpr = tl.float64 if SUMS >= SINGLE else tl.float32
    if SUMS == FEW:
        return tl.zeros([], kind)
    x = x.to(kind)
    is_finite = here & (x - x == 0)
    count = tl.sum(is_finite.to(tl.int32), 0)
    pivot = tl.sum(tl.where(is_finite, x, 0.0), 0) / tl.maximum(count, 1)
    return tl.where(pivot - pivot == 0, pivot, 0.0).to(kind)


@triton.jit
def _finish(
    x_ptr,
    inner,
    outer,
    step,
    share,
    shares,
    count,
    pivot,
    low,
    high,
    total,
    squares,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Give the row of what was added up, or of the share read again with care."""
    finite = count.to(tl.float64)
    all_squares = tl.sum(squares, 0)
    all_total = tl.sum(total, 0)
    least = tl.min(low, 0).to(tl.float64)
    most = tl.max(high, 0).to(tl.float64)
    is_fast = (all_squares - all_squares == 0) & (all_total - all_total == 0)
    if SUMS == NARROW:
        # Squares of very small numbers are not exact in float32, or nothing.
        is_fast = is_fast & ((all_squares >= finite * 2.0**-120) | (least == most))
    nan = tl.zeros([], tl.float64)
    posinf = tl.zeros([], tl.float64)
    neginf = tl.zeros([], tl.float64)
    # The sum of wide numbers is of their distances from the pivot: nothing is lost of a mean.
    middle = pivot.to(tl.float64)
    off = all_total / tl.maximum(finite, 1.0) - (0.0 if SUMS >= SINGLE else middle)
    mean = middle + off
    m2 = tl.maximum(all_squares - finite * off * off, 0.0)
    if not is_fast:
        finite, nan, posinf, neginf, least, most, mean, m2 = careful_share(
            x_ptr, inner, outer, step, share, shares, COLUMNS, BLOCK, CODE
        )
    return finite, nan, posinf, neginf, least, most, mean, m2


@triton.jit
def careful_share(
    x_ptr,
    inner,
    outer,
    step,
    share,
    shares,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
):
    """Measure a share that has numbers which are not finite, or very large or small ones.

    Piece by piece: this way is rare, and must not need more registers than the other.
    """
    SMALL: tl.constexpr = CAREFUL if CAREFUL < BLOCK else BLOCK
    PIECES: tl.constexpr = BLOCK // SMALL
    ROWS: tl.constexpr = BLOCK // COLUMNS
    lanes = tl.arange(0, SMALL)
    across = (inner + COLUMNS - 1) // COLUMNS
    pieces = across * ((outer + ROWS - 1) // ROWS) * PIECES
    nan = tl.zeros([SMALL], tl.int32)
    posinf = tl.zeros([SMALL], tl.int32)
    neginf = tl.zeros([SMALL], tl.int32)
    finite = tl.zeros([SMALL], tl.int32)
    low = tl.full([SMALL], float("inf"), tl.float64)
    high = tl.full([SMALL], float("-inf"), tl.float64)
    total = tl.zeros([SMALL], tl.float64)
    piece = share * PIECES
    while piece < pieces:
        tile = piece // PIECES
        within = (piece % PIECES) * SMALL + lanes
        column = (tile % across) * COLUMNS + within % COLUMNS
        row = (tile // across) * ROWS + within // COLUMNS
        here = (column < inner) & (row < outer)
        x = decode(tl.load(x_ptr + row * step + column, mask=here, other=0), CODE, WIDE)
        is_finite = here & (x - x == 0)
        nan += (here & (x != x)).to(tl.int32)
        posinf += (here & (x == float("inf"))).to(tl.int32)
        neginf += (here & (x == float("-inf"))).to(tl.int32)
        finite += is_finite.to(tl.int32)
        low = tl.minimum(low, tl.where(is_finite, x, float("inf")))
        high = tl.maximum(high, tl.where(is_finite, x, float("-inf")))
        total += tl.where(is_finite, x, 0.0) * 0.0009765625  # room for sums of the largest numbers
        piece += 1
        if piece % PIECES == 0:
            piece += (shares - 1) * PIECES
    count = tl.sum(finite.to(tl.int64), 0).to(tl.float64)
    mean = tl.where(count > 0, tl.sum(total, 0) / tl.maximum(count, 1.0) * 1024.0, 0.0)
    least = tl.min(low, 0)
    most = tl.max(high, 0)
    mean = tl.where(least == most, least, mean)
    squares = tl.zeros([SMALL], tl.float64)
    rest = tl.zeros([SMALL], tl.float64)
    piece = share * PIECES
    while piece < pieces:
        tile = piece // PIECES
        within = (piece % PIECES) * SMALL + lanes
        column = (tile % across) * COLUMNS + within % COLUMNS
        row = (tile // across) * ROWS + within // COLUMNS
        here = (column < inner) & (row < outer)
        x = decode(tl.load(x_ptr + row * step + column, mask=here, other=0), CODE, WIDE)
        apart = tl.where(here & (x - x == 0), x - mean, 0.0)
        squares += apart * apart
        rest += apart
        piece += 1
        if piece % PIECES == 0:
            piece += (shares - 1) * PIECES
    off = tl.sum(rest, 0) / tl.maximum(count, 1.0)
    m2 = tl.sum(squares, 0)
    correction = count * off * off
    m2 = tl.where(correction < m2, m2 - correction, m2)
    mean = tl.where(off - off == 0, mean + off, mean)
    return (
        count,
        tl.sum(nan.to(tl.int64), 0).to(tl.float64),
        tl.sum(posinf.to(tl.int64), 0).to(tl.float64),
        tl.sum(neginf.to(tl.int64), 0).to(tl.float64),
        least,
        most,
        mean,
        m2,
    )
