"""What is measured during one step, site by site, and how it becomes a record of that step.

Values come from hooks, possibly from several threads; each is measured where it is, into a row of
its device's log, and the row is noted under the site. Nothing waits. When the step ends the rows
are handed over as a `Harvest`, which another thread turns into a `StepRecord`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline._errors import UnsupportedTensor
from hookline.runs import Block, SiteFacts, StepRecord
from hookline.stats import Extras, Log, Taken, Update, open_log
from hookline.stats.rows import MEAN, derive, scale_rows
from hookline.watchers.sorting import Event, SiteSorter, UpdateEvent, sort_updates
from hookline.watchers.waiting import TOGETHER, Queue

MakeFacts = Callable[[int, Tensor], SiteFacts]
"""Say what a site is, given its number and the first value seen there."""


@dataclass(slots=True)
class Harvest:
    """Everything measured in one step, on its way out of the training thread."""

    step: int
    """The number of the step."""

    time: float
    """When it ended, in seconds since 1970."""

    seconds: float
    """How long it took."""

    taken: dict[Log, Taken]
    """The rows, by the log they are in; they may still be on their way from a device."""

    events: list[Event]
    """Which site each row belongs to."""

    updates: list[UpdateEvent]
    """Update site, the row of the update, the row of the weight before it, their log."""

    unscaled: dict[tuple[int, Log], int]
    """Rows of gradients that a GradScaler has scaled, with the row of the scale."""

    scale: tuple[int, Log] | None
    """The row of the factor that is in the gradients of values."""

    gradients: frozenset[int]
    """The sites that are gradients of values, where there is such a factor."""

    scalars: dict[str, float]
    """Numbers that are known already."""

    pending: list[tuple[str, int, Log]]
    """Numbers that are on a device: name and row."""

    sites: list[SiteFacts]
    """Sites that were met for the first time."""

    def arrive(self, sorter: SiteSorter) -> StepRecord:
        """Wait for the rows and sort them by site."""
        measured = {log: taken.wait() for log, taken in self.taken.items()}
        scalars = dict(self.scalars)
        for name, row, log in self.pending:
            scalars[name] = _read_number(measured[log].rows[row : row + 1])
        for (row, log), scale_row in self.unscaled.items():
            rows = measured[log].rows
            scale = rows[scale_row, MEAN]
            if scale:
                rows[row] = scale_rows(rows[row : row + 1], 1 / scale)[0]
        blocks = sorter.sort(self.events, measured)
        if self.scale is not None:
            row, log = self.scale
            blocks = [self._unscale(block, measured[log].rows[row, MEAN]) for block in blocks]
        if self.updates:
            blocks.append(sort_updates(self.updates, measured))
        return StepRecord(self.step, self.time, self.seconds, scalars, blocks)

    def _unscale(self, block: Block, scale: float) -> Block:
        """Take the factor out of gradients; what was counted is of the values as they flowed."""
        if block.kind not in ("rows", "sketch") or not scale:
            return block
        factors = np.array([1 / scale if site in self.gradients else 1.0 for site in block.sites])
        if block.kind == "rows":
            return Block(block.kind, block.sites, scale_rows(block.values, factors))
        values = (block.values * factors[:, None]).astype(block.values.dtype)
        return Block(block.kind, block.sites, values)


def _read_number(row: Any) -> float:
    """Give back the one number that a row was measured of."""
    if derive(row, "posinf")[0]:
        return float("inf")
    return float("-inf") if derive(row, "neginf")[0] else float(derive(row, "mean")[0])


@dataclass(slots=True)
class _Step:
    """What the step under way has so far."""

    events: list[Event] = field(default_factory=list)
    updates: list[UpdateEvent] = field(default_factory=list)
    unscaled: dict[tuple[int, Log], int] = field(default_factory=dict)
    scale: tuple[int, Log] | None = None
    scalars: dict[str, float] = field(default_factory=dict)
    pending: list[tuple[str, int, Log]] = field(default_factory=list)
    sites: list[SiteFacts] = field(default_factory=list)


class Recorder:
    """Measure values and remember whose they are."""

    def __init__(self) -> None:
        self.is_on = False
        """Whether values are measured now; hooks look here first."""
        self.extras = 0
        """What is measured besides the row, in the step under way; flags of `Extras`."""
        self.facts: list[SiteFacts] = []
        """Every site met so far, by number."""
        self.unmeasured: dict[str, str] = {}
        """Addresses of values that cannot be measured, with the reason."""
        self.queue = Queue(self)
        """Values on a GPU that wait to be measured with others."""
        self._logs: dict[torch.device, Log] = {}
        self._step = _Step()
        self._started = time.perf_counter()
        self._last: tuple[weakref.ref[Tensor], int, int, Log] | None = None
        """The value measured last: its version, its row. One object, since threads share it."""
        self.lock = threading.RLock()
        """Held while a site is numbered."""

        self.tell_begin: Callable[[], None] | None = None
        """What to call when the next value comes: the step is complete, and that is of the next."""
        self.has_given_up = False
        """Whether nothing will be measured any more: writing failed, or this is a fork."""
        self.own_seconds = 0.0
        """Time spent here in the step under way."""

    def give_up(self) -> None:
        """Measure nothing any more, whoever asks."""
        self.is_on = False
        self.has_given_up = True

    @property
    def has_events(self) -> bool:
        """Whether anything was measured in the step under way."""
        return bool(self._step.events)

    @property
    def has_scalars(self) -> bool:
        """Whether a number was noted in the step under way."""
        return bool(self._step.scalars or self._step.pending)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count what happens inside as hookline's own time, each moment once."""
        before, begun = self.own_seconds, time.perf_counter()
        try:
            yield
        finally:
            self.own_seconds = before + time.perf_counter() - begun

    def log_for(self, device: torch.device) -> Log:
        """Give the log of a device, opened when first needed."""
        log = self._logs.get(device)
        if log is None:
            log = self._logs[device] = open_log(device)
        return log

    def new_site(self, make: MakeFacts, value: Tensor) -> int:
        """Number a site that was met for the first time."""
        with self.lock:
            number = len(self.facts)
            facts = make(number, value)
            self.facts.append(facts)
            self._step.sites.append(facts)
            return number

    def measure(self, site: int, value: Tensor) -> None:
        """Measure a value of a site, at once or with the next few."""
        if not value.is_cuda or not self.queue.take(site, value):
            self.measure_now(site, value)

    def measure_now(self, site: int, value: Tensor) -> tuple[int, Log] | None:
        """Measure a value of a site; give its row, or None where that is not possible.

        A module often returns the very tensor that its last child returned: it is read once.
        """
        begun = time.perf_counter()
        last = self._last
        if last is not None and last[0]() is value:
            _, version, row, log = last
            if version == value._version:
                self._step.events.append((site, row, log))
                self.queue.learn(site, value)
                return row, log
        try:
            log = self._logs.get(value.device) or self.log_for(value.device)
            row = log.add(value, self.extras)
        except UnsupportedTensor as error:
            self.unmeasured[self.facts[site].address] = str(error)
            return None
        self._step.events.append((site, row, log))
        if not value.is_inference():
            self._last = (weakref.ref(value), value._version, row, log)
            self.queue.learn(site, value)
        self.own_seconds += time.perf_counter() - begun
        return row, log

    def measure_together(
        self, values: Sequence[tuple[int, Tensor]]
    ) -> list[tuple[int, Log] | None]:
        """Measure values of one device; one that comes several times in a row is read once."""
        begun = time.perf_counter()
        tensors: list[Tensor] = []
        for _, value in values:
            if not tensors or tensors[-1] is not value:
                tensors.append(value)
        try:
            log = self.log_for(values[0][1].device)
            rows = log.add_together(tensors)
        except UnsupportedTensor:  # one of them; which, they tell one by one
            return [self.measure_now(site, value) for site, value in values]
        found: list[tuple[int, Log] | None] = []
        place, last = -1, None
        for site, value in values:
            if value is not last:
                place, last = place + 1, value
            self._step.events.append((site, rows[place], log))
            found.append((rows[place], log))
        self.own_seconds += time.perf_counter() - begun
        return found

    def measure_all(self, values: Sequence[tuple[int, Tensor]]) -> list[tuple[int, Log] | None]:
        """Measure any number of values, on a GPU several in one launch; give their rows."""
        if self.extras or not all(one.is_cuda for _, one in values):
            return [self.measure_now(site, value) for site, value in values]
        found: list[tuple[int, Log] | None] = []
        for start in range(0, len(values), TOGETHER):
            part = values[start : start + TOGETHER]
            if len({one.device for _, one in part}) == 1:
                found += self.measure_together(part)
            else:
                found += [self.measure_now(site, value) for site, value in part]
        return found

    def measure_updates(self, updates: Sequence[tuple[int, int, Update]]) -> None:
        """Measure what an optimizer added to weights: site, the weight's row, the update."""
        by_device: dict[torch.device, list[tuple[int, int, Update]]] = {}
        for one in updates:
            by_device.setdefault(one[2][1].device, []).append(one)
        for device, group in by_device.items():
            log = self.log_for(device)
            rows = log.add_updates([update for _, _, update in group])
            for (site, weight_row, _), row in zip(group, rows, strict=True):
                self._step.events.append((site, row, log))
                self._step.updates.append((site, row, weight_row, log))

    def note_scale(self, row: int, log: Log, scale_row: int) -> None:
        """Note that a gradient still has the factor of a GradScaler in it."""
        self._step.unscaled[row, log] = scale_row

    def _gradients(self) -> frozenset[int]:
        return frozenset(one.id for one in self.facts if one.kind == "gradient")

    def scale_gradients(self, scale: Tensor) -> None:
        """Note the factor that a GradScaler has put into the gradients of this step."""
        self._step.scale = self.add_scalar("grad_scale", scale)

    def add_scalar(self, name: str, value: float | Tensor) -> tuple[int, Log] | None:
        """Note a number of this step; one on a device is fetched with the rows."""
        if self.has_given_up:
            return None
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"{name} is a tensor of {value.numel()} numbers; give one")
            log = self.log_for(value.device)
            row = log.add(value.detach())
            self._step.pending.append((name, row, log))
            return row, log
        self._step.scalars[name] = float(value)
        return None

    def start_step(self, extras: Extras, *, is_on: bool) -> None:
        """Begin a step; what is measured from now on belongs to it."""
        self.extras = int(extras)  # a plain number: hooks test it again and again
        self.is_on = is_on and not self.has_given_up
        self._started = time.perf_counter()
        self.own_seconds = 0.0

    def end_step(self, number: int) -> Harvest:
        """Hand over what was measured; nothing waits for a device."""
        self.queue.settle()
        if self._step.events:
            self.queue.has_learned = True
        step, self._step = self._step, _Step()
        self._last = None
        used = {log for _, _, log in step.events} | {log for _, _, log in step.pending}
        return Harvest(
            step=number,
            time=time.time(),
            seconds=time.perf_counter() - self._started,
            taken={log: log.take() for log in self._logs.values() if log in used},
            events=step.events,
            updates=step.updates,
            unscaled=step.unscaled,
            scale=step.scale,
            gradients=self._gradients() if step.scale is not None else frozenset(),
            scalars=step.scalars,
            pending=step.pending,
            sites=step.sites,
        )
