"""Numbers over steps as one short line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

_BARS = "▁▂▃▄▅▆▇█"
_BAD = "!"


def draw(values: Sequence[Any] | Any, width: int) -> str:
    """Draw numbers as bars, a column for as many steps as it takes; `!` is not finite.

    Numbers that reach over three powers of ten are drawn by their logarithm.
    """
    numbers = [float(one) for one in values]
    if not numbers:
        return ""
    columns = [_largest(part) for part in _split(numbers, width)]
    finite = [abs(one) for one in columns if one is not None and math.isfinite(one)]
    positive = [one for one in finite if one > 0]
    is_log = bool(positive) and max(positive) > 1000 * min(positive)
    scaled = [_scale(one, is_log=is_log) for one in columns]
    there = [one for one in scaled if one is not None and math.isfinite(one)]
    low, high = (min(there), max(there)) if there else (0.0, 0.0)
    return "".join(_bar(one, low, high) for one in scaled)


def _split(numbers: list[float], width: int) -> list[list[float]]:
    count = min(width, len(numbers))
    edges = [round(at * len(numbers) / count) for at in range(count + 1)]
    return [numbers[begin:end] for begin, end in itertools.pairwise(edges)]


def _largest(part: list[float]) -> float | None:
    """Give the number of a column that is furthest from 0; what is not finite first."""
    there = [one for one in part if not math.isnan(one)]
    return max(there, key=abs) if there else None


def _scale(value: float | None, *, is_log: bool) -> float | None:
    if value is None or not math.isfinite(value) or not is_log:
        return value
    return math.log10(abs(value)) if value else None


def _bar(value: float | None, low: float, high: float) -> str:
    if value is None:
        return " "
    if not math.isfinite(value):
        return _BAD
    share = (value - low) / (high - low) if high > low else 0.5 * bool(value)
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]
