"""One step of a model as a trace that is in memory: what `trace_step` gives."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hookline._errors import UnsupportedTensor
from hookline.diffs.traces import Measurements, Trace, TraceFacts, TraceSite
from hookline.recordings.course import MakeSite
from hookline.stats import Extras, Log, open_log
from hookline.stats.logs import SKETCH_WIDTH
from hookline.stats.rows import COLUMNS

if TYPE_CHECKING:
    import numpy.typing as npt

MOST_BYTES = 4 << 30
"""How many bytes of tensors a trace keeps where nothing else is said."""


def key_of(site: TraceSite) -> Hashable:
    """Give what a site has in common with the same one of another trace of the same model."""
    arrival = site.more.get("arrival", 0)
    return site.kind, site.module, site.port, site.leaf, site.visit, site.is_part, arrival


class LiveTrace(Trace):
    """One step of a model: sites, their numbers, and their tensors as far as there was room."""

    def __init__(
        self,
        facts: TraceFacts,
        sites: Sequence[TraceSite],
        measurements: Measurements,
        *,
        tensors: dict[int, Tensor],
        notes: Sequence[str] = (),
    ) -> None:
        self.facts = facts
        self.sites = sites
        self.notes = list(notes)
        """What could not be traced, and why."""
        self.loss: float | None = None
        """What backward was called on."""
        self.output: object = None
        """What the model gave, detached."""
        self._measurements = measurements
        self._tensors = tensors
        self._floors: npt.NDArray[np.float64] | None = None

    @property
    def steps(self) -> Sequence[int]:
        return (0,)

    @property
    def kept_bytes(self) -> int:
        """How many bytes of tensors are kept."""
        return sum(one.numel() * one.element_size() for one in self._tensors.values())

    def measurements(self, step: int) -> Measurements:
        return self._measurements

    def tensor(self, site: int, step: int = 0) -> Tensor | None:
        first = self.sites[site].same_as
        found = self._tensors.get(site if first is None else first)
        return None if found is None else found.cpu()

    def floors(self) -> npt.NDArray[np.float64] | None:
        return self._floors

    def set_floors(self, floors: npt.NDArray[np.float64]) -> None:
        """Say how far rounding alone moves each site."""
        self._floors = floors

    def set_unrepeated(self, sites: Sequence[int]) -> None:
        """Say which sites were others when the step was run again from the same random states."""
        self.unrepeated = frozenset(sites)
        if sites:
            self.notes.append(
                f"it does not repeat itself: `{self.sites[min(sites)].address}` is another when "
                "the step is run again from the same random states"
            )

    def drop_tensors(self) -> None:
        """Let go of all tensors; their numbers stay."""
        self._tensors.clear()

    def index(self) -> dict[Hashable, int]:
        """Give the sites by what they have in common with those of another trace."""
        return {key_of(site): site.id for site in self.sites}


class LiveSink:
    """Measure values as they come, and keep copies of them as long as there is room."""

    def __init__(self, *, keep_tensors: bool = True, most_bytes: int = MOST_BYTES) -> None:
        self.sites: list[TraceSite] = []
        self.tensors: dict[int, Tensor] = {}
        self.notes: list[str] = []
        self._room = most_bytes if keep_tensors else 0
        self._keeps = keep_tensors
        self._logs: dict[torch.device, Log] = {}
        self._events: list[tuple[int, Log, int]] = []

    def number(self, make: MakeSite, tensor: Tensor) -> int:
        """Number a site."""
        number = len(self.sites)
        self.sites.append(make(number, tensor))
        return number

    def measure(self, site: int, tensor: Tensor) -> None:
        """Measure a value with its sketch, and copy it."""
        tensor = tensor.detach()
        log = self._logs.get(tensor.device)
        try:
            if log is None:
                log = self._logs[tensor.device] = open_log(tensor.device)
            self._events.append((site, log, log.add(tensor, int(Extras.SKETCH))))
        except UnsupportedTensor as error:
            self._note(f"`{self.sites[site].address}` is not measured: {error}")
            return
        if self._keeps:
            self.keep(site, tensor)

    def share(self, site: int, first: int, tensor: Tensor) -> None:
        """Do nothing: the numbers of the first are those of the other."""

    def keep(self, site: int, tensor: Tensor) -> None:
        """Copy a value that was measured, if there is room."""
        size = tensor.numel() * tensor.element_size()
        if size > self._room:
            self._note("not all tensors were kept: there was no room for the larger ones")
            return
        self._room -= size
        self.tensors[site] = tensor.clone()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def finish(self, facts: TraceFacts, notes: Sequence[str] = ()) -> LiveTrace:
        """Wait for the numbers, and give the trace."""
        count = len(self.sites)
        rows = np.full((count, len(COLUMNS)), np.nan)
        sketches = np.full((count, SKETCH_WIDTH), np.nan, dtype=np.float32)
        for log in self._logs.values():
            measured = log.take().wait()
            own = [(site, row) for site, where, row in self._events if where is log]
            sites, numbers = np.array(own, dtype=np.int64).reshape(-1, 2).T
            place = np.full(len(measured.rows), -1)
            place[measured.sketched] = np.arange(len(measured.sketched))
            rows[sites] = measured.rows[numbers]
            has_sketch = place[numbers] >= 0
            sketches[sites[has_sketch]] = measured.sketches[place[numbers[has_sketch]]]
        for site in self.sites:
            if site.same_as is not None:
                rows[site.id], sketches[site.id] = rows[site.same_as], sketches[site.same_as]
        self._events.clear()
        return LiveTrace(
            facts,
            self.sites,
            Measurements(rows, sketches),
            tensors=self.tensors,
            notes=[*notes, *self.notes],
        )
