"""The statistics of a tensor in exact arithmetic, written from their definitions alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from torch import Tensor

MASK = (1 << 64) - 1
EPS = 2.0**-52


def numbers_of(tensor: Tensor) -> tuple[float, ...]:
    """Give the elements in logical order; float64 holds every dtype but the largest integers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tuple(tensor.detach().cpu().to(torch.float64).flatten().tolist())


def to_float(value: Fraction) -> float:
    """Round to float64; beyond it, infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


@cache
def exact_row(numbers: tuple[float, ...]) -> list[float]:
    """Give the eight columns, each rounded once."""
    finite = [Fraction(x) for x in numbers if math.isfinite(x)]
    nan = sum(map(math.isnan, numbers))
    posinf, neginf = numbers.count(math.inf), numbers.count(-math.inf)
    if not finite:
        return [0, nan, posinf, neginf, math.inf, -math.inf, 0, 0]
    mean = sum(finite) / len(finite)
    m2 = sum((x - mean) ** 2 for x in finite)
    extremes = float(min(finite)), float(max(finite))
    return [len(finite), nan, posinf, neginf, *extremes, to_float(mean), to_float(m2)]


@cache
def exact_sketch(numbers: tuple[float, ...]) -> tuple[list[float], float]:
    """Give the 64 signed sums, and the L2 norm that errors are measured by."""
    sums = [Fraction(0)] * 64
    for k, x in enumerate(numbers):
        if not math.isfinite(x):
            continue
        z = ((k // 64 + 1) * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        sums[k % 64] += Fraction(x) * (-1 if z >> (k % 64) & 1 else 1)
    norm = math.hypot(*(x for x in numbers if math.isfinite(x)), 0.0)
    return [to_float(x) for x in sums], norm


def exact_counts(numbers: tuple[float, ...], dtype: torch.dtype) -> tuple[list[int], list[int]]:
    """Give zeros, tiny and huge elements, and elements by exponent."""
    tiny, huge = 0.0, math.inf
    if dtype.is_floating_point or dtype.is_complex:
        tiny, huge = torch.finfo(dtype).tiny, torch.finfo(dtype).max / 8
    counts, bins = [0, 0, 0], [0] * 256
    for x in map(abs, numbers):
        if not math.isfinite(x):
            bins[255] += 1
            continue
        counts[0] += x == 0
        counts[1] += 0 < x < tiny
        counts[2] += x > huge
        # frexp is exact where log2 rounds up just below a power of two.
        exponent = math.frexp(x)[1] - 1 + 127 if x else 0
        bins[min(max(exponent, 0), 254)] += 1
    return counts, bins


def assert_row(
    row: np.ndarray,
    numbers: Sequence[float],
    *,
    is_merged: bool = False,
    tolerance: float = 1e-10,
) -> None:
    """Compare a row: counts and extremes exactly, sums as far as float64 sums allow.

    A row that was merged from others cannot tell means apart that round to one float64.
    """
    exact = exact_row(tuple(numbers))
    assert row[:6].tolist() == exact[:6]
    finite = [x for x in numbers if math.isfinite(x)]
    count = len(finite)
    share = sum(abs(Fraction(x)) for x in finite) / max(count, 1)
    magnitude = to_float(Fraction(share))
    # 1e-6 of the true mean is what is promised; what follows is what float64 sums give.
    assert row[6] == exact[6] or abs(row[6] - exact[6]) <= (
        tolerance / 100 * abs(exact[6]) + 8 * EPS * magnitude + 2.0**-1074
    )
    if row[7] != exact[7]:
        rounded = math.sqrt(count) * 2 * EPS * magnitude if is_merged else 0
        allowed = tolerance * exact[7] + rounded * rounded + count * 2.0**-1070
        assert math.isfinite(row[7])
        assert abs(row[7] - exact[7]) <= allowed
