"""Statistics by name: which blocks each needs, how ranks merge, how it follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hookline.runs.step_sources import Array, Flags, Floats
from hookline.stats.rows import STATS, derive, merge_rows

_COUNTS = ("zeros", "tiny", "huge")
_SHARES = ("zero_share", "tiny_share", "huge_share")
_UPDATES = ("ratio", "lost", "weight_l2")
_UNITS = ("units", "dead", "window", "outlier", "saturated")

MEASURES = (*STATS, *_COUNTS, *_SHARES, *_UPDATES, *_UNITS, "dead_share")
"""Every statistic of a site.

The statistics of a row come first. Then how many elements are zero, below the smallest normal
number, near the largest one; and the shares of these. Then, of updates alone: the size of the
update relative to the weight, the share of its elements that rounding lost, the norm of the weight.

Last, of units, which are the channels of an activation and the rows of a weight's gradient: how
many there are; how many were exactly zero in all of the last measured steps, and of how many steps
that is; the largest channel over the median one; the share of elements at the bound of a sigmoid
or tanh; the dead ones as a share.
"""

WHOLE = {"count", "finite", "nan", "posinf", "neginf", "inf", *_COUNTS, "units", "dead", "window"}
"""Those that are whole numbers."""

Blocks = Mapping[str, tuple[Array, Flags]]


def blocks_for(stat: str) -> tuple[str, ...]:
    """Name the kinds of blocks that a statistic is computed from."""
    if stat in _COUNTS:
        return ("counts",)
    if stat in _SHARES:
        return ("rows", "counts")
    if stat == "ratio":
        return ("rows", "updates")
    if stat in _UNITS or stat == "dead_share":
        return ("units",)
    return ("updates",) if stat in _UPDATES else ("rows",)


def is_of_updates(stat: str) -> bool:
    """Tell whether only updates have this statistic."""
    return stat in _UPDATES


def merge(kind: str, parts: Sequence[tuple[Array, Flags]]) -> tuple[Array, Flags]:
    """Merge what ranks measured, each [steps, sites, columns], as if one had seen all elements."""
    if len(parts) == 1:
        return parts[0]
    is_there = np.logical_or.reduce([flags for _, flags in parts])
    if kind == "rows":
        rows = np.concatenate([values[flags] for values, flags in parts])
        groups = np.concatenate([np.flatnonzero(flags) for _, flags in parts])
        merged = merge_rows(rows, groups, is_there.size)
        return merged.reshape(*is_there.shape, -1), is_there
    if kind == "units":
        return _merge_units(parts), is_there
    # What was not measured is zero.
    total = np.sum([values for values, _ in parts], axis=0)
    if kind == "updates":
        total[..., 2] = np.sqrt(np.sum([values[..., 2] ** 2 for values, _ in parts], axis=0))
    return total, is_there


def _merge_units(parts: Sequence[tuple[Array, Flags]]) -> Array:
    """Merge the units of ranks: one is dead where every rank says so, which none can tell alone."""
    numbers = np.stack([np.where(flags[..., None], values, np.nan) for values, flags in parts])
    units, outlier = (np.fmax.reduce(numbers[..., at]) for at in (0, 3))
    dead, window = (np.fmin.reduce(numbers[..., at]) for at in (1, 2))
    is_there = np.isfinite(numbers[..., 4])
    with np.errstate(invalid="ignore"):
        saturated = np.where(is_there, numbers[..., 4], 0).sum(axis=0) / is_there.sum(axis=0)
    return np.stack([units, dead, window, outlier, saturated], axis=-1)


def compute(stat: str, blocks: Blocks) -> Floats:
    """Compute a statistic [steps, sites] from blocks; NaN where they were not measured."""
    is_there = np.logical_and.reduce([blocks[kind][1] for kind in blocks_for(stat)])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(is_there, _compute(stat, blocks), np.nan)


def _compute(stat: str, blocks: Blocks) -> Array:
    if stat in _COUNTS:
        return np.asarray(blocks["counts"][0][..., _COUNTS.index(stat)])
    if stat in _SHARES:
        share = blocks["counts"][0][..., _SHARES.index(stat)] / _derive(blocks, "count")
        return np.asarray(share)
    if stat == "ratio":
        return np.asarray(_derive(blocks, "l2") / blocks["updates"][0][..., 2])
    if stat == "lost":
        given, lost = blocks["updates"][0][..., 0], blocks["updates"][0][..., 1]
        return np.asarray(lost / given)
    if stat == "weight_l2":
        return np.asarray(blocks["updates"][0][..., 2])
    if stat in _UNITS:
        found = np.asarray(blocks["units"][0][..., _UNITS.index(stat)])
        return np.where(found < 0, np.nan, found)
    if stat == "dead_share":
        units = blocks["units"][0]
        return np.asarray(np.where(units[..., 2] > 0, units[..., 1] / units[..., 0], np.nan))
    return _derive(blocks, stat)


def _derive(blocks: Blocks, stat: str) -> Array:
    rows = blocks["rows"][0]
    return derive(rows.reshape(-1, rows.shape[-1]), stat).reshape(rows.shape[:-1])
