"""Statistics of all sites over all steps, in as many columns as a page can show.

Where there are more steps than columns, a column is the largest of its steps: a peak, or a value
that is not finite, is never lost. Steps are read in portions, so that a long run fits in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hookline.runs import History
from hookline.runs.step_sources import Flags, Floats, Integers

_PORTION = 2_000_000
"""About how many numbers are held at once while reading."""

Maps = dict[tuple[str, str], Floats]
"""Statistics [sites, columns] by kind of site and name."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Say which steps the columns of a map stand for."""

    steps: Integers
    """All steps of the run."""

    stride: int
    """How many of them are one column."""

    @property
    def count(self) -> int:
        """How many columns there are."""
        return math.ceil(len(self.steps) / self.stride)

    @property
    def first(self) -> Integers:
        """The first step of each column."""
        return self.steps[:: self.stride]

    @property
    def last(self) -> Integers:
        """The last step of each column."""
        ends = np.minimum(np.arange(1, self.count + 1) * self.stride, len(self.steps)) - 1
        return self.steps[ends] if self.count else self.steps

    def halve(self) -> Columns:
        """Make each two columns one."""
        return Columns(self.steps, self.stride * 2)


def choose_columns(steps: Integers, most: int) -> Columns:
    """Make at most so many columns of steps."""
    return Columns(steps, max(1, math.ceil(len(steps) / most)))


def read_maps(history: History, wanted: Mapping[str, Sequence[str]], columns: Columns) -> Maps:
    """Read statistics by kind of site, pooled into columns."""
    found: Maps = {}
    for kind, stats in wanted.items():
        sites = len(history.describe_sites(kind=kind))
        if not sites or not columns.count:
            continue
        for stat in stats:
            found[kind, stat] = np.full((sites, columns.count), np.nan)
        portion = max(1, _PORTION // (sites * len(stats) * columns.stride))
        for start in range(0, columns.count, portion):
            end = min(start + portion, columns.count)
            steps = columns.steps[start * columns.stride : end * columns.stride]
            for stat, read in history.maps(stats, steps, kind=kind).items():
                # A site that was met since the count stays for the next report.
                pooled = pool(read.values[:sites], columns.stride)
                found[kind, stat][: len(pooled), start:end] = pooled
    return found


def pool(values: Floats, stride: int) -> Floats:
    """Take of each `stride` columns the value of the largest magnitude; NaN where there is none."""
    if stride == 1:
        return values
    rows, columns = values.shape
    count = math.ceil(columns / stride)
    padded = np.full((rows, count * stride), np.nan)
    padded[:, :columns] = values
    groups = padded.reshape(rows, count, stride)
    size = np.where(np.isnan(groups), -1.0, np.abs(groups))
    return np.take_along_axis(groups, size.argmax(axis=2)[..., None], axis=2)[..., 0]


def pool_line(values: Floats, stride: int) -> list[Floats]:
    """Pool one number over steps: its mean, least and largest; the mean is NaN where one is."""
    if stride == 1:
        return [values]
    count = math.ceil(len(values) / stride)
    ends = [slice(at * stride, (at + 1) * stride) for at in range(count)]
    with np.errstate(invalid="ignore"):
        means = np.array([values[one].mean() for one in ends])
    return [
        means,
        np.array([np.fmin.reduce(values[one]) for one in ends]),
        np.array([np.fmax.reduce(values[one]) for one in ends]),
    ]


def read_exponents(history: History, kind: str, most: int) -> tuple[Integers, Floats] | None:
    """Read the exponents of sites over the steps that have them: [sites, columns, 256] as shares.

    Gives the first step of each column with them; None where no step has any.
    """
    steps = history.steps
    addresses = [site.address for site in history.describe_sites(kind=kind)]
    if not addresses or not len(steps):
        return None
    own = steps[_find_counted(history, kind, steps)]
    if not len(own):
        return None
    columns = choose_columns(own, most)
    shares = np.zeros((len(addresses), columns.count, 256), np.float64)
    portion = max(1, _PORTION // (len(addresses) * 256))
    for start in range(0, len(own), portion):
        read = history.histograms(own[start : start + portion], kind=kind)
        at = np.arange(start, start + len(read.steps)) // columns.stride
        for place, column in enumerate(at):
            counts = read.counts[: len(addresses), place]
            shares[: len(counts), column] += counts
    total = shares.sum(axis=2, keepdims=True)
    np.divide(shares, total, out=shares, where=total > 0)
    return columns.first, shares


def _find_counted(history: History, kind: str, steps: Integers) -> Flags:
    """Tell which steps have histograms: they have the counts too, which are far smaller."""
    portion = max(1, _PORTION // max(1, len(history.describe_sites(kind=kind))))
    parts = [steps[start : start + portion] for start in range(0, len(steps), portion)]
    zeros = [history.maps(["zeros"], part, kind=kind)["zeros"].values for part in parts]
    return np.concatenate([~np.isnan(one).all(axis=0) for one in zeros])
