"""What a rule sees: one step of a training, its numbers by site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from hookline.rules.roster import Roster
from hookline.runs import Block, SiteFacts, StepRecord
from hookline.runs.measures import blocks_for, compute
from hookline.runs.records import WIDTHS
from hookline.runs.step_sources import Array, Flags, Floats, Integers
from hookline.stats.rows import NAN, NEGINF, POSINF


def name_site(site: SiteFacts) -> str:
    """Name a site as short as it can be: an output is what a module's path means by itself."""
    return site.address.removesuffix(":output") or site.address


class Step:
    """One watched step, as a rule sees it. Statistics are arrays by the id of the site."""

    def __init__(self, record: StepRecord, roster: Roster) -> None:
        self.roster = roster
        """The sites by what they are, as arrays."""
        self._blocks: dict[str, Block] = {block.kind: block for block in record.blocks}
        self._record = record
        self._spread: dict[str, tuple[Array, Flags]] = {}
        self._stats: dict[str, Floats] = {}

    @property
    def number(self) -> int:
        """The number of the step."""
        return self._record.step

    @property
    def sites(self) -> Sequence[SiteFacts]:
        """All sites met so far, by id."""
        return self.roster.sites

    @property
    def scalars(self) -> Mapping[str, float]:
        """The numbers of the step itself: loss, lr."""
        return self._record.scalars

    @property
    def more(self) -> Mapping[str, Any]:
        """What else is known of the step."""
        more: Mapping[str, Any] = getattr(self._record, "more", {})
        return more

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """The operation that made the first non-finite value, where a replay has found it."""
        return self.more.get("origin")

    @property
    def is_complete(self) -> bool:
        """Whether the step came to its end: an optimizer stepped."""
        return not self.scalars.get("partial")

    @property
    def is_skipped(self) -> bool:
        """Whether a gradient scaler left the step out, as it does when a gradient overflows."""
        return bool(self.scalars.get("skipped"))

    def has(self, kind: str) -> bool:
        """Tell whether blocks of this kind were measured in this step."""
        return kind in self._blocks

    def stat(self, name: str) -> Floats:
        """Give a statistic of every site: float64 by id, NaN where it was not measured."""
        found = self._stats.get(name)
        if found is None:
            blocks = {kind: self.spread(kind) for kind in blocks_for(name)}
            found = self._stats[name] = compute(name, blocks)
        return found

    def spread(self, kind: str) -> tuple[Array, Flags]:
        """Give the numbers of a block by site [sites, columns], and where they were measured."""
        found = self._spread.get(kind)
        if found is None:
            count = len(self.roster.sites)
            values = np.zeros((count, WIDTHS[kind]))
            is_there = np.zeros(count, bool)
            block = self._blocks.get(kind)
            if block is not None:
                values[block.sites] = block.values
                is_there[block.sites] = True
            found = self._spread[kind] = values, is_there
        return found

    def find(self, condition: Flags) -> list[SiteFacts]:
        """List the sites where a condition holds."""
        return [self.sites[number] for number in np.flatnonzero(condition).tolist()]

    @cached_property
    def update_ratios(self) -> tuple[Integers, Floats]:
        """The weight matrices that were updated, and by how much of their size.

        A matrix that begins at zero is measured against a tenth of the norm that a layer of its
        shape usually has: any step is infinitely large beside nothing.
        """
        roster = self.roster
        matrices = roster.layer_matrices
        updates = roster.update_of[matrices]
        there = updates >= 0
        if not there.any() or not self.has("updates"):
            return matrices[:0], np.zeros(0)
        there &= self.spread("updates")[1][updates]
        matrices, updates = matrices[there], updates[there]
        size = np.maximum(self.stat("weight_l2")[updates], 0.1 * roster.usual_norm[matrices])
        return matrices, self.stat("l2")[updates] / size

    @cached_property
    def is_measured(self) -> Flags:
        """Which sites were measured in this step."""
        return self.spread("rows")[1]

    @cached_property
    def nans(self) -> Flags:
        """Which sites have a NaN."""
        return np.asarray(self.spread("rows")[0][:, NAN] > 0)

    @cached_property
    def infinities(self) -> Flags:
        """Which sites have an infinity that is no mask: of outputs, only the positive ones."""
        rows = self.spread("rows")[0]
        has_negative = (rows[:, NEGINF] > 0) & ~self.roster.is_value
        return np.asarray((rows[:, POSINF] > 0) | has_negative)

    @cached_property
    def is_whole(self) -> bool:
        """Whether everything is finite that has to be, so that statistics mean what they say."""
        return not (self.nans.any() or (self.infinities & ~self.roster.is_value).any())
