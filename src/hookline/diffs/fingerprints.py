"""The weights of a module in a few numbers that do not depend on how they are laid out.

Counts, extremes, mean and spread of a weight are those of its transpose, and those of the pieces of
a weight merge into those of the whole. So they show which layer is which in two code bases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hookline.diffs.outlines import Outline
from hookline.stats.rows import M2, MAX, MEAN, MIN, NEGINF, Rows, merge_rows

if TYPE_CHECKING:
    import numpy.typing as npt

# Sums of the same numbers in another order, in float64.
_TOLERANCE = 1e-6
# One side rounded to half precision.
_COARSE_TOLERANCE = 5e-3
_HALVES = ("bfloat16", "float16")


class Fingerprints:
    """The weights of the modules of one trace."""

    def __init__(self, outline: Outline, rows: Rows) -> None:
        self.outline = outline
        self.rows = rows
        self._merged: dict[str, Rows] = {}

    def find_main(self, path: str) -> int | None:
        """Give the largest parameter of a module itself; None where it has none."""
        sites = list(self.outline.parameters(path).values())
        return max(sites, key=self.outline.size, default=None)

    def merge_below(self, path: str) -> Rows:
        """Give the row of all parameters of a module and everything below it, as [1, 8]."""
        if path not in self._merged:
            sites = [
                site
                for below in self.outline.iterate_below(path)
                for site in self.outline.parameters(below).values()
            ]
            groups = np.zeros(len(sites), dtype=np.intp)
            self._merged[path] = merge_rows(self.rows[sites], groups, 1)
        return self._merged[path]

    def compare(
        self,
        sites: list[int],
        other: Fingerprints,
        others: list[int],
        *,
        with_constant: bool = False,
    ) -> npt.NDArray[np.bool_]:
        """Tell which of some sites are of the same numbers as which of another trace, [n, m]."""
        is_coarse = self._is_coarse(sites) != other._is_coarse(others)
        ours, theirs = self.rows[sites], other.rows[others]
        return compare_rows(ours, theirs, is_coarse=is_coarse, with_constant=with_constant)

    def _is_coarse(self, sites: list[int]) -> bool:
        return any(self.outline.sites[site].dtype in _HALVES for site in sites)


def compare_rows(
    ours: Rows, theirs: Rows, *, is_coarse: bool = False, with_constant: bool = False
) -> npt.NDArray[np.bool_]:
    """Tell which rows are of the same numbers, [n, m]; constant ones tell little, and are not."""
    tolerance = _COARSE_TOLERANCE if is_coarse else _TOLERANCE
    x, y = _describe(ours), _describe(theirs)
    scale = np.maximum(np.abs(x).max(axis=1)[:, None], np.abs(y).max(axis=1)[None])
    sizes, others = ours[:, : NEGINF + 1].sum(axis=1), theirs[:, : NEGINF + 1].sum(axis=1)
    found: npt.NDArray[np.bool_] = sizes[:, None] == others[None]
    for column in range(x.shape[1]):
        with np.errstate(invalid="ignore"):
            found &= np.abs(x[:, column, None] - y[None, :, column]) <= tolerance * scale
    if not with_constant:
        found &= (ours[:, M2] > 0)[:, None] & (theirs[:, M2] > 0)[None]
    return found


def _describe(rows: Rows) -> npt.NDArray[np.float64]:
    """Give extremes, mean and standard deviation, which have one unit."""
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.sqrt(rows[:, M2] / rows[:, 0])
    return np.stack([rows[:, MIN], rows[:, MAX], rows[:, MEAN], spread], axis=1)
