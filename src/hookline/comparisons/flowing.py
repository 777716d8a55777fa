"""The second model's values compared with those of the first as they flow, not kept for later.

A value that is that of the first model to rounding is let go at once; what differs, or has no
counterpart of the same name, is kept to look into.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookline.diffs.measuring import measure_gap
from hookline.diffs.tolerances import LEAST_UNITS
from hookline.diffs.traces import Trace, TraceFacts
from hookline.recordings.live import LiveSink, LiveTrace, key_of


class FlowTrace(LiveTrace):
    """A step whose values were compared with those of another trace while it ran."""

    against: Trace | None = None
    """The other trace."""

    gaps: dict[int, tuple[int, float, float]]
    """By site: that of the other trace, the norm of the difference, and that of the other."""

    def known_gap(self, site: int, other: Trace, other_site: int) -> tuple[float, float] | None:
        found = self.gaps.get(site)
        if found is None or other is not self.against or found[0] != other_site:
            return None
        return found[1], found[2]


class FlowSink(LiveSink):
    """Compare values with those of a trace by their name, and keep those that differ."""

    def __init__(self, against: LiveTrace) -> None:
        super().__init__()
        self._against = against
        self._index = against.index()
        self._gaps: dict[int, tuple[int, float, float]] = {}

    def keep(self, site: int, tensor: Tensor) -> None:
        """Compare a value; copy it where it is not what the other trace has."""
        number = self._index.get(key_of(self.sites[site]))
        other = None if number is None else self._against.tensor(number)
        if number is None or other is None or other.shape != tensor.shape:
            super().keep(site, tensor)
            return
        first = self._against.sites[number].same_as
        gap = measure_gap(other, tensor)
        self._gaps[site] = (number if first is None else first, gap.distance, gap.norm)
        is_float = tensor.dtype.is_floating_point and tensor.dtype == other.dtype
        unit = torch.finfo(tensor.dtype).eps / 2 if is_float else 0.0
        if not gap.r <= LEAST_UNITS * unit:
            super().keep(site, tensor)

    def finish(self, facts: TraceFacts, notes: Sequence[str] = ()) -> LiveTrace:
        """Wait for the numbers, and give the trace."""
        done = super().finish(facts, notes)
        made = FlowTrace(
            facts,
            done.sites,
            done.measurements(0),
            tensors=self.tensors,
            notes=done.notes,
        )
        made.against, made.gaps = self._against, self._gaps
        return made
