"""The ranks of a run as one trace, for a comparison with a run of another number of ranks.

What every rank has alike, parameters and their gradients after they were exchanged, is the first
rank's. What is spread over the ranks is put together: sketches of shards were made at their places
in the whole tensor, so they add up, and so do statistics. Values of a batch that was split over
the ranks are put together where their tensors were kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hookline.diffs.traces import Measurements, Trace, TraceSite
from hookline.stats.rows import merge_rows

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from hookline.diffs.reading import RunTrace

_ALIKE = ("parameter", "buffer", "parameter gradient", "update")
"""What every rank has the same of, unless it is sharded."""


class MergedTrace(Trace):
    """All ranks of a run."""

    def __init__(self, ranks: Sequence[RunTrace]) -> None:
        first = ranks[0]
        self.ranks = ranks
        self.facts = first.facts
        self.notes = list(dict.fromkeys(note for rank in ranks for note in rank.notes))
        index = [{_key(site): site.id for site in rank.sites} for rank in ranks]
        self._ids = np.array(
            [[own.get(_key(site), -1) for own in index] for site in first.sites], np.int64
        ).reshape(len(first.sites), len(ranks))
        self._is_shard = np.array([bool(site.more.get("shard")) for site in first.sites], bool)
        self._is_alike = np.array([site.kind in _ALIKE for site in first.sites], bool)
        steps = set(first.steps)
        for rank in ranks[1:]:
            steps &= set(rank.steps)
        self._steps = sorted(steps)
        self._is_whole = self._find_whole()
        self.sites: Sequence[TraceSite] = [self._describe(site) for site in first.sites]
        left_out = int((~(self._is_shard | self._is_alike | self._is_whole)).sum())
        if left_out:
            self.notes.append(
                f"{left_out} values of {first.facts.title} are spread over {len(ranks)} ranks and "
                "were left out: their tensors were not kept (tensors=True keeps them)"
            )

    @property
    def steps(self) -> Sequence[int]:
        return self._steps

    def measurements(self, step: int) -> Measurements:
        own = [rank.measurements(step) for rank in self.ranks]
        count = len(self.sites)
        rows = np.full((count, 8), np.nan)
        sketches = np.full((count, 64), np.nan, np.float32)
        alike = self._is_alike & ~self._is_shard
        rows[alike], sketches[alike] = own[0].rows[alike], own[0].sketches[alike]
        for site in np.flatnonzero(self._is_shard):
            ids = self._ids[site]
            there = [one for one, number in zip(own, ids, strict=True) if number >= 0]
            numbers = [number for number in ids if number >= 0]
            parts = np.stack([one.rows[at] for one, at in zip(there, numbers, strict=True)])
            if np.isnan(parts[:, 0]).any():
                continue
            rows[site] = merge_rows(parts, [0] * len(parts), 1)[0]
            # A shard without elements has nothing to sketch.
            sums = [one.sketches[at] for one, at in zip(there, numbers, strict=True)]
            sketches[site] = np.nansum(sums, axis=0)
        for site in np.flatnonzero(self._is_whole):
            self._measure_whole(int(site), step, rows, sketches)
        return Measurements(rows, sketches)

    def tensor(self, site: int, step: int) -> Tensor | None:
        if self._is_shard[site]:
            return None
        if self._is_alike[site]:
            return self.ranks[0].tensor(site, step)
        pieces = []
        for rank, number in zip(self.ranks, self._ids[site], strict=True):
            piece = rank.tensor(int(number), step) if number >= 0 else None
            if piece is None or not piece.ndim:
                return None
            pieces.append(piece)
        import torch

        try:
            return torch.cat(pieces)
        except RuntimeError:  # other shapes than a split batch has
            return None

    def floors(self) -> npt.NDArray[np.float64] | None:
        return self.ranks[0].floors()

    def _find_whole(self) -> npt.NDArray[np.bool_]:
        """Find the values that can be put together from tensors."""
        found = np.zeros(len(self._ids), bool)
        if not self._steps or not all(rank.has_tensors(self._steps[0]) for rank in self.ranks):
            return found
        for site in self.ranks[0].sites:
            # The gradient of a rank's own loss is another than that of the loss of all.
            if site.kind == "value" and not self._is_shard[site.id]:
                found[site.id] = self.tensor(site.id, self._steps[0]) is not None
        return found

    def _measure_whole(
        self, site: int, step: int, rows: npt.NDArray[np.float64], sketches: npt.NDArray[np.float32]
    ) -> None:
        from hookline.stats.reference import measure, sketch

        tensor = self.tensor(site, step)
        if tensor is not None:
            rows[site], sketches[site] = measure(tensor).numpy(), sketch(tensor).numpy()

    def _describe(self, site: TraceSite) -> TraceSite:
        """Give a site with the shape of the whole."""
        if not self._is_whole[site.id]:
            return site
        shapes = [
            rank.sites[number].shape
            for rank, number in zip(self.ranks, self._ids[site.id], strict=True)
        ]
        return replace(site, shape=(sum(one[0] for one in shapes), *site.shape[1:]))


def _key(site: TraceSite) -> tuple[object, ...]:
    """Give what a site has in common with the same one of another rank."""
    more = site.more
    return (
        site.kind,
        site.address,
        site.visit,
        site.is_part,
        more.get("after"),
        more.get("arrival"),
    )
