"""Statistics by name: which blocks each needs, how ranks merge, how it follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hookline.runs.step_sources import Array, Flags, Floats
from hookline.stats.rows import STATS, derive, merge_rows

_COUNTS = ("zeros", "tiny", "huge")
_SHARES = ("zero_share", "tiny_share", "huge_share")
_UPDATES = ("ratio", "lost", "weight_l2")

MEASURES = (*STATS, *_COUNTS, *_SHARES, *_UPDATES)
"""Every statistic of a site.

The statistics of a row come first. Then how many elements are zero, below the smallest normal
number, near the largest one; and the shares of these. Then, of updates alone: the size of the
update relative to the weight, the share of its elements that rounding lost, the norm of the weight.
"""

WHOLE = {"count", "finite", "nan", "posinf", "neginf", "inf", *_COUNTS}
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
    # What was not measured is zero.
    total = np.sum([values for values, _ in parts], axis=0)
    if kind == "updates":
        total[..., 2] = np.sqrt(np.sum([values[..., 2] ** 2 for values, _ in parts], axis=0))
    return total, is_there


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
    return _derive(blocks, stat)


def _derive(blocks: Blocks, stat: str) -> Array:
    rows = blocks["rows"][0]
    return derive(rows.reshape(-1, rows.shape[-1]), stat).reshape(rows.shape[:-1])
