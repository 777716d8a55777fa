"""Statistics of a set of numbers as one row of eight, and what follows from such rows.

A row holds what can be merged exactly: counts, the extremes, the mean, and the sum of squared
distances from the mean (never the sum of squares, from which a standard deviation cancels). Rows
of micro-batches, ranks and steps merge into the row of all their elements together. Needs numpy
alone, and knows neither tensors nor how a row was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

# Not imported at run time: `import hookline` should load what it needs and no more.
if TYPE_CHECKING:
    import numpy.typing as npt

COLUMNS = ("finite", "nan", "posinf", "neginf", "min", "max", "mean", "m2")
"""What the eight numbers of a row are; the last four are of the finite elements alone."""

FINITE, NAN, POSINF, NEGINF, MIN, MAX, MEAN, M2 = range(8)

Rows = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Values = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]

_EMPTY = np.array([0.0, 0.0, 0.0, 0.0, np.inf, -np.inf, 0.0, 0.0])


def empty_rows(n: int) -> Rows:
    """Make the rows of `n` sets without elements."""
    return np.tile(_EMPTY, (n, 1))


def merge_rows(rows: Rows, groups: npt.ArrayLike, size: int) -> Rows:
    """Merge row `i` into group `groups[i]` of `size` groups; a group without rows is empty."""
    rows = np.asarray(rows, dtype=np.float64)
    index = np.asarray(groups, dtype=np.intp)
    merged = empty_rows(size)
    if not len(rows):
        return merged
    for column in (FINITE, NAN, POSINF, NEGINF):
        merged[:, column] = np.bincount(index, weights=rows[:, column], minlength=size)
    np.minimum.at(merged[:, MIN], index, rows[:, MIN])
    np.maximum.at(merged[:, MAX], index, rows[:, MAX])

    finite, mean = rows[:, FINITE], rows[:, MEAN]
    total = merged[:, FINITE]
    # Shares of the mean and not sums: a sum of float64 elements may pass the largest float64.
    share = finite / np.where(total == 0, 1, total)[index]
    centre = np.bincount(index, weights=share * mean, minlength=size)
    with np.errstate(over="ignore", invalid="ignore"):
        # What rounding left of the mean: small, and found again from the distances to it.
        rest = np.bincount(index, weights=share * (mean - centre[index]), minlength=size)
        centre += np.where(np.isfinite(rest), rest, 0)
        # Where all elements are equal, rounding must not make up a spread.
        centre = np.where(merged[:, MIN] == merged[:, MAX], merged[:, MIN], centre)
        apart = np.where(finite == 0, 0, mean - centre[index])
        merged[:, M2] = np.bincount(
            index, weights=rows[:, M2] + finite * apart * apart, minlength=size
        )
    merged[:, MEAN] = centre
    return merged


def scale_rows(rows: Rows, factor: float | Values) -> Rows:
    """Give the rows of `factor * x` from the rows of `x`; one finite factor, or one for each row.

    What passes the largest or falls below the smallest float64 by scaling is not counted anew.
    """
    rows = np.asarray(rows, dtype=np.float64)
    factors = np.broadcast_to(np.asarray(factor, dtype=np.float64), len(rows))
    if not np.isfinite(factors).all():
        raise ValueError(f"Rows are scaled by finite factors, not by {factor}.")
    scaled = rows.copy()
    turned = factors < 0
    scaled[turned, POSINF], scaled[turned, NEGINF] = rows[turned, NEGINF], rows[turned, POSINF]
    # An infinity times zero is a NaN, as it is for the elements.
    gone = factors == 0
    scaled[gone, NAN] += rows[gone, POSINF] + rows[gone, NEGINF]
    scaled[gone, POSINF] = scaled[gone, NEGINF] = 0

    filled = rows[:, FINITE] > 0
    factors = factors[filled]
    low, high = rows[filled, MIN] * factors, rows[filled, MAX] * factors
    scaled[filled, MIN], scaled[filled, MAX] = np.minimum(low, high), np.maximum(low, high)
    scaled[filled, MEAN] = rows[filled, MEAN] * factors
    with np.errstate(over="ignore", invalid="ignore"):
        spread = rows[filled, M2] * factors * factors
    scaled[filled, M2] = np.where(factors == 0, 0, spread)
    return scaled


def derive(rows: Rows, stat: str) -> Values:
    """Compute one statistic (one of `STATS`) of every row.

    Without a finite element the statistics of size are NaN, sums are 0 and counts are counts.
    """
    rows = np.asarray(rows, dtype=np.float64)
    if stat not in _DERIVED:
        raise ValueError(f"`{stat}` is not a statistic. There are: {', '.join(STATS)}.")
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        values: Values = _DERIVED[stat](rows)
    return values


def _of_filled(rows: Rows, values: Any) -> Values:
    """Put NaN where a row has no finite element."""
    return np.where(rows[:, FINITE] > 0, values, np.nan)


def _std(rows: Rows) -> Values:
    return np.sqrt(rows[:, M2] / rows[:, FINITE])


def _l2(rows: Rows) -> Values:
    # Not the root of the sum of squares, which overflows long before the norm does.
    return np.hypot(np.sqrt(rows[:, M2]), np.sqrt(rows[:, FINITE]) * rows[:, MEAN])


_DERIVED: dict[str, Callable[[Rows], Any]] = {
    "count": lambda rows: rows[:, : NEGINF + 1].sum(axis=1),
    "finite": lambda rows: rows[:, FINITE].copy(),
    "nan": lambda rows: rows[:, NAN].copy(),
    "posinf": lambda rows: rows[:, POSINF].copy(),
    "neginf": lambda rows: rows[:, NEGINF].copy(),
    "inf": lambda rows: rows[:, POSINF] + rows[:, NEGINF],
    "min": lambda rows: _of_filled(rows, rows[:, MIN]),
    "max": lambda rows: _of_filled(rows, rows[:, MAX]),
    "absmax": lambda rows: _of_filled(rows, np.maximum(np.abs(rows[:, MIN]), np.abs(rows[:, MAX]))),
    "mean": lambda rows: _of_filled(rows, rows[:, MEAN]),
    "sum": lambda rows: rows[:, FINITE] * rows[:, MEAN],
    "sumsq": lambda rows: rows[:, M2] + rows[:, FINITE] * rows[:, MEAN] ** 2,
    "std": lambda rows: _of_filled(rows, _std(rows)),
    "rms": lambda rows: _of_filled(rows, np.hypot(_std(rows), rows[:, MEAN])),
    "l2": _l2,
}

STATS = tuple(_DERIVED)
"""The statistics that `derive` knows."""
