"""What is measured during one step, site by site, and how it becomes a record of that step.

Values come from hooks, possibly from several threads; each is measured where it is, into a row of
its device's log, and the row is noted under the site. Nothing waits. When the step ends the rows
are handed over as a `Harvest`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from hookline._errors import UnsupportedTensor
from hookline.runs import SiteFacts
from hookline.stats import TOGETHER, Extras, Log, Update, open_log
from hookline.watchers.companions import Companions
from hookline.watchers.guarding import Guard
from hookline.watchers.harvesting import Harvest
from hookline.watchers.sorting import Event, UpdateEvent
from hookline.watchers.units import UnitLog
from hookline.watchers.waiting import Queue

_CHECKED = 16
"""One measured step in so many goes the longer way, where every value is looked at: may it wait?"""

_CHECKED_EARLY = (2, 4, 8)
"""Which steps before do too: what was not so in the first step is most likely met soon."""

_MOST_COMPANIONS = 4096
"""How many different ones are known; a model has a hundredth of them."""

MakeFacts = Callable[[int, Tensor], SiteFacts]
"""Say what a site is, given its number and the first value seen there."""


@dataclass(slots=True)
class _Step:
    """What the step under way has so far."""

    events: list[Event] = field(default_factory=list)
    updates: list[UpdateEvent] = field(default_factory=list)
    unscaled: dict[tuple[int, Log], int] = field(default_factory=dict)
    scale: tuple[int, Log] | None = None
    scalars: dict[str, float] = field(default_factory=dict)
    pending: list[tuple[str, int, Log]] = field(default_factory=list)
    losses: list[tuple[int, Log]] = field(default_factory=list)
    sketches: list[tuple[int, Tensor]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    sites: list[SiteFacts] = field(default_factory=list)


class Recorder:
    """Measure values and remember whose they are."""

    def __init__(self, *, strict: bool = False) -> None:
        self.is_on = False
        """Whether values are measured now; hooks look here first."""
        self.guard = Guard(self.give_up, strict=strict)
        """What hooks hand their errors to."""
        self.is_deaf = False
        """Whether calls are not the training's: one of its steps is being repeated."""
        self.units = UnitLog()
        """What is looked at channel by channel."""
        self.extras = 0
        """What is measured besides the row, in the step under way; flags of `Extras`."""
        self.facts: list[SiteFacts] = []
        """Every site met so far, by number."""
        self.has_gradients = False
        """Whether a gradient of a value was ever measured."""
        self.has_graphs = False
        """Whether a value was ever measured inside a graph that torch.compile made."""
        self.unmeasured: dict[str, str] = {}
        """Addresses of values that cannot be measured, with the reason."""
        self.queue = Queue(self)
        """Values on a GPU that wait to be measured with others."""
        self._companions: dict[tuple[int, ...], Companions] = {}
        """By their sites, values that waited together."""
        self._logs: dict[torch.device, Log] = {}
        self._step = _Step()
        self._started = time.perf_counter()
        self._plain_steps = 0
        """How many steps were measured in which nothing else is to be done about values."""
        self._last: tuple[weakref.ref[Tensor], int, int, Log] | None = None
        """The value measured last: its version, its row. One object, since threads share it."""
        self.lock = threading.RLock()
        """Held while a site is numbered, and while a log is opened."""

        self.tell_begin: Callable[[], None] | None = None
        """What to call when the next value comes: the step is complete, and that is of the next."""
        self.has_given_up = False
        """Whether nothing will be measured any more: writing failed, or this is a fork."""
        self.own_seconds = 0.0
        """Time spent here in the step under way."""

    def give_up(self) -> None:
        """Measure nothing any more, whoever asks."""
        self.has_given_up = True
        self.switch(False)

    def switch(self, is_on: bool) -> None:
        """Measure values from now on, or none."""
        if is_on != self.is_on and not self.has_given_up:
            self.queue.settle()  # before: what has come by now counts, or does not
        self.is_on = is_on and not self.has_given_up
        self.queue.open = None

    def await_begin(self, tell: Callable[[], None]) -> None:
        """Have it told when the next value comes: the step is complete, that is of the next."""
        self.tell_begin = tell
        self.queue.open = None

    def look_again(self) -> None:
        """Have the next step go the longer way."""
        self._plain_steps = -1

    @property
    def is_steady(self) -> bool:
        """Whether values are measured, and nothing else is to be done about them in this step."""
        is_plain = not self.extras and not self.units.is_on
        number = self._plain_steps
        is_checked = number % _CHECKED == 0 or number in _CHECKED_EARLY
        return self.is_on and is_plain and not is_checked and self.tell_begin is None

    @property
    def has_events(self) -> bool:
        """Whether anything was measured in the step under way."""
        return bool(self._step.events)

    @property
    def has_scalars(self) -> bool:
        """Whether a number was noted in the step under way."""
        return bool(self._step.scalars or self._step.pending or self._step.losses)

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Hear nothing of what models do inside."""
        was_on, begin = self.is_on, self.tell_begin
        self.switch(False)
        self.tell_begin, self.is_deaf = None, True
        try:
            yield
        finally:
            self.switch(was_on)
            self.tell_begin, self.is_deaf = begin, False

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
            with self.lock:  # of two logs of a device only one would ever be read
                log = self._logs.get(device) or open_log(device)
                self._logs[device] = log
        return log

    def new_site(self, make: MakeFacts, value: Tensor) -> int:
        """Number a site that was met for the first time."""
        with self.lock:
            number = len(self.facts)
            facts = make(number, value)
            self.has_gradients = self.has_gradients or facts.kind == "gradient"
            self.facts.append(facts)
            self._step.sites.append(facts)
            return number

    def measure(self, site: int, value: Tensor) -> None:
        """Measure a value of a site, at once or with the next few."""
        if self.extras or not value.is_cuda or not self.queue.take(site, value):
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

    def measure_passing(self, site: int, value: Tensor) -> None:
        """Measure a value whose memory holds another as soon as this returns."""
        self.has_graphs = True
        self._measure_alone(site, value)

    def _measure_alone(self, site: int, value: Tensor) -> None:
        begun = time.perf_counter()
        try:
            log = self._logs.get(value.device) or self.log_for(value.device)
            self._step.events.append((site, log.add(value, self.extras), log))
        except UnsupportedTensor as error:
            self.unmeasured[self.facts[site].address] = str(error)
        self.own_seconds += time.perf_counter() - begun

    def measure_passing_together(self, sites: Sequence[int], values: Sequence[Tensor]) -> None:
        """Measure such values of one device."""
        self.has_graphs = True
        for start in range(0, len(values), TOGETHER):
            end = start + TOGETHER
            self._measure_alike(sites[start:end], values[start:end])

    def _measure_alike(self, sites: Sequence[int], values: Sequence[Tensor]) -> None:
        """Measure a few values of one device, as if none had come before."""
        begun = time.perf_counter()
        log = self._logs.get(values[0].device) or self.log_for(values[0].device)
        try:
            rows = log.add_together(values)
        except UnsupportedTensor:  # one of them; which, they tell one by one
            for site, value in zip(sites, values, strict=True):
                self._measure_alone(site, value)
        else:
            self._step.events += zip(sites, rows, repeat(log), strict=False)
            self.own_seconds += time.perf_counter() - begun

    def prepare_passing(
        self, sites: Sequence[int], values: Sequence[Tensor]
    ) -> Callable[[Sequence[Tensor]], None]:
        """Give what measures values like these next time, for less where that can be."""
        log = self.log_for(values[0].device)
        parts: list[tuple[slice, Companions]] = []
        for start in range(0, len(values), TOGETHER):
            part = slice(start, start + TOGETHER)
            parts.append((part, Companions(sites[part])))
            parts[-1][1].meet(log, values[part])
        if len(parts) == 1:
            return partial(self._measure_companions, parts[0][1])

        def measure(values: Sequence[Tensor]) -> None:
            for part, companions in parts:
                self._measure_companions(companions, values[part])

        return measure

    def _measure_companions(self, companions: Companions, values: Sequence[Tensor | None]) -> None:
        begun = time.perf_counter()
        events = companions.measure(values)
        if events is not None:
            self._step.events += events
        self.own_seconds += time.perf_counter() - begun
        if events is None:
            self._measure_others(companions, values)

    def _measure_others(self, companions: Companions, values: Sequence[Tensor | None]) -> None:
        """Measure values of a kind that is not known, and know them next time."""
        pairs = zip(companions.sites, values, strict=True)
        there = [(site, one) for site, one in pairs if one is not None]
        for start in range(0, len(there), TOGETHER):
            part = there[start : start + TOGETHER]
            self._measure_alike([site for site, _ in part], [one for _, one in part])
        begun = time.perf_counter()
        if len(there) == len(values):
            found = [one for _, one in there]
            companions.meet(self.log_for(found[0].device), found)
        self.own_seconds += time.perf_counter() - begun

    def measure_part(self, site: int, part: Tensor, sketch: Tensor) -> tuple[int, Log]:
        """Measure what this rank has of a value; its sketch was made by whoever knows the whole."""
        log = self.log_for(part.device)
        row = log.add(part)
        self._step.events.append((site, row, log))
        self._step.sketches.append((site, sketch))
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

    def measure_waiting(self, sites: tuple[int, ...], values: Sequence[Tensor | None]) -> None:
        """Measure values of one device that have waited; where there is none, nothing is noted."""
        companions = self._companions.get(sites)
        if companions is None:
            if len(self._companions) >= _MOST_COMPANIONS:  # most came together by chance
                known = list(self._companions.items())
                self._companions = {key: one for key, one in known if one.comes_again()}
            companions = self._companions[sites] = Companions(sites, by_chance=True)
        self._measure_companions(companions, values)

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
        kinds = ("gradient", "local gradient")
        return frozenset(one.id for one in self.facts if one.kind in kinds)

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

    def add_loss(self, value: Tensor) -> None:
        """Take what backward is called on as a part of the step's loss; nothing is waited for."""
        try:
            log = self.log_for(value.device)
            self._step.losses.append((log.add(value.detach()), log))
        except UnsupportedTensor as error:
            self.unmeasured["loss"] = str(error)

    @property
    def has_losses(self) -> bool:
        """Whether backward was called in the step under way."""
        return bool(self._step.losses)

    @property
    def progress(self) -> int:
        """A number that grows with every value that is measured in the step."""
        return len(self._step.events) + self.queue.length

    def drop_losses(self, count: int) -> None:
        """Forget the latest losses: they turned out to be of something else."""
        del self._step.losses[len(self._step.losses) - count :]

    def note(self, name: str, fact: Any) -> None:
        """Note what is known of the step besides its numbers."""
        self._step.more[name] = fact

    def find_bad(self, *, is_scaled: bool) -> set[str]:
        """Tell which kinds of sites have a NaN or a positive infinity in the step so far.

        `loss` is one of them. Where a GradScaler has put a factor in, a loss that is infinite may
        be so because of that, and says nothing. This waits for devices that are not the CPU.
        """
        self.queue.settle()
        step = self._step
        found: set[str] = set()
        for log in {log for _, _, log in step.events} | {log for _, log in step.losses}:
            bad = log.find_bad()
            if bad:
                found |= {
                    self.facts[site].kind
                    for site, row, where in step.events
                    if where is log and row in bad
                }
                losses = [bad[row] for row, where in step.losses if where is log and row in bad]
                if any(losses) or (losses and not is_scaled):
                    found.add("loss")
        return found

    def start_step(self, extras: Extras, *, is_on: bool, units: bool = False) -> None:
        """Begin a step, channel by channel too if asked; what is measured now belongs to it."""
        self.extras = int(extras)  # a plain number: hooks test it again and again
        self.units.is_on = is_on and units
        self._plain_steps += is_on and not (extras or units)
        self.switch(is_on)
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
        used |= {log for _, log in step.losses}
        taken = {log: log.take() for log in self._logs.values() if log in used}
        return Harvest(
            step=number,
            time=time.time(),
            seconds=time.perf_counter() - self._started,
            taken=taken,
            events=step.events,
            updates=step.updates,
            unscaled=step.unscaled,
            scale=step.scale,
            gradients=self._gradients() if step.scale is not None else frozenset(),
            scalars=step.scalars,
            pending=step.pending,
            losses=step.losses,
            units=self.units.take(),
            sketches=step.sketches,
            more=step.more,
            sites=step.sites,
        )
