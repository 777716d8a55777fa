"""Where steps go: into memory, into the run folder, to sinks, to the rules and to the terminal.

All of it happens in a thread of its own. Where the folder cannot be written any more, steps are
judged all the same; what else fails ends the watch with one message, and never the training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hookline._errors import HooklineError, RunWriteError
from hookline.replays import KeptCall
from hookline.rules import Finding, Judge
from hookline.runs import DumpFile, RecentSteps, RunWriter, SiteFacts, StepRecord
from hookline.watchers.guarding import Guard, describe
from hookline.watchers.harvesting import Harvest
from hookline.watchers.pacing import Cost
from hookline.watchers.progress import ProgressLine
from hookline.watchers.reacting import Reaction
from hookline.watchers.sinks import Sink, scalars_of
from hookline.watchers.sorting import SiteSorter
from hookline.watchers.units import UnitCounter
from hookline.watchers.working import Worker, say

MOST_WAITING = 200
"""Steps that may wait for the disk; more are left out rather than fill the memory."""

_GATHERING = 0.1
"""Seconds in which steps gather, to be brought together, where nobody waits for what they tell."""


class Delivery:
    """Bring each step to where it is kept."""

    def __init__(
        self,
        writer: RunWriter | None,
        *,
        keep: int,
        sinks: Sequence[Sink],
        progress: ProgressLine | None,
        judge: Judge | None,
        reaction: Reaction,
        guard: Guard,
    ) -> None:
        self.recent = RecentSteps(keep)
        self.writer = writer
        self.findings: list[Finding] = []
        """What rules have found so far."""
        self.steps = 0
        """How many steps were brought."""
        self.last_step: int | None = None
        """The number of the latest of them."""
        self.write_failure: RunWriteError | None = None
        """Why nothing is written to the folder any more."""
        self.gap = ""
        """From where on steps were not judged, in a sentence."""
        self._notes: list[str] = []
        self._judge = judge
        self._reaction = reaction
        self._guard = guard
        self._failures = 0
        self.left_out = 0
        """Steps that were not written because too many waited."""
        self._sinks = list(sinks)
        self._progress = progress
        self._facts: list[SiteFacts] = []
        self._sorter = SiteSorter()
        self._units = UnitCounter()
        gathering = 0.0 if reaction.acts else _GATHERING
        self._worker = Worker("hookline-watch", guard.note, gathering=gathering)

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the thread that brings steps: it cannot wait for itself."""
        return self._worker.is_current

    @property
    def notes(self) -> list[str]:
        """What was not kept or not judged, and why."""
        slow = f"{self.left_out} steps were left out: the disk was too slow"
        return [*self._notes, *([slow] if self.left_out else [])]

    def take(self, harvest: Harvest) -> None:
        """Take a step that ended; returns at once."""
        if self._worker.waiting > MOST_WAITING:
            self.left_out += 1
            sites = harvest.sites
            self._worker.put(lambda: self._add_sites(sites))
            return
        self._worker.put(lambda: self._bring(harvest))

    def take_finding(self, finding: Finding) -> None:
        """Take what the watch itself has found, as if a rule had."""
        self._worker.put(lambda: self._keep(finding, ()))

    def add_finding(self, finding: Mapping[str, Any]) -> None:
        """Note in the run what was concluded from it."""
        self._worker.put(lambda: self._store(lambda writer: writer.add_finding(finding)))

    def describe(self, name: str, facts: Mapping[str, Any]) -> None:
        """Keep a small document in the run."""
        self._worker.put(lambda: self._store(lambda writer: writer.describe(name, facts)))

    def dump(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write tensors beside the run."""
        self._worker.put(lambda: self._store(lambda writer: writer.dump(name, tensors, facts)))

    def finish_dump(self, name: str, file: DumpFile, facts: Mapping[str, Any]) -> None:
        """Keep a dump whose tensors are all written."""
        self._worker.put(lambda: self._store(lambda one: one.finish_dump(name, file, facts)))

    def speak(self) -> None:
        """Warn of what has gone wrong meanwhile: for the thread that trains."""
        self._worker.speak()

    def flush(self) -> bool:
        """Wait until all that was taken is kept; tell whether it is."""
        return self._worker.flush()

    def close(
        self, status: str, cost: Cost, notes: Sequence[str], *, gap: Callable[[], str]
    ) -> None:
        """Complete the run, and end the sinks."""
        writer = self.writer

        def finish(ending: str) -> None:
            assert writer is not None
            writer.describe("cost", cost.facts())
            said = list(dict.fromkeys([*notes, *self.notes]))
            writer.describe("notes", {"notes": said} | ({"gap": gap()} if gap() else {}))
            writer.close(ending)

        self._worker.put(self._judge_end)
        self._worker.put(lambda: self._store(lambda _: finish(status)))
        self._worker.stop()
        if writer is not None and (self._worker.failure or self.write_failure) is not None:
            with contextlib.suppress(HooklineError, OSError):  # it was said when it happened
                finish("failed")
            with contextlib.suppress(HooklineError, OSError):
                writer.close("failed")
        for sink in self._sinks:
            end = getattr(sink, "close", None)
            try:
                if callable(end):
                    end()
            except Exception as error:
                say(f"`{_name(sink)}` could not be closed: {type(error).__name__}: {error}")
        if self._progress is not None:
            self._progress.end(str(cost))

    def _bring(self, harvest: Harvest) -> None:
        record = harvest.arrive(self._sorter, self._units)
        self._add_sites(harvest.sites)
        self.recent.write(record)
        self._store(lambda writer: writer.write(record))
        self.steps += 1
        self.last_step = record.step
        self._send(record)
        if self._judge is not None:
            judge, facts = self._judge, self._facts
            self._take_findings(lambda: judge.see(record, facts), harvest.calls)
        if self._progress is not None:
            self._progress.show(record, self._facts, self.findings)

    def _judge_end(self) -> None:
        if self._judge is not None:
            self._take_findings(self._judge.end, ())

    def _take_findings(
        self, judge: Callable[[], Sequence[Finding]], calls: Sequence[KeptCall]
    ) -> None:
        """Keep what rules find, and do what was asked for about it."""
        try:
            found = judge()
        except Exception as error:
            if self._guard.strict:
                raise
            self._judge = None  # what is measured is worth keeping without it
            self.gap = f"The judging stopped at step {self.last_step}, which was not judged."
            self._notes.append(f"steps are not judged any more. {describe(error)}")
            say(self._notes[-1])
            return
        assert self._judge is not None
        for failure in self._judge.failures[self._failures :]:
            self._notes.append(failure)
            say(failure)
        self._failures = len(self._judge.failures)
        for finding in found:
            self._keep(finding, calls)

    def _keep(self, finding: Finding, calls: Sequence[KeptCall]) -> None:
        self.findings.append(finding)
        self._store(lambda writer: writer.add_finding(finding.to_dict()))
        try:
            self._reaction.take(finding, calls)
        except RunWriteError as error:
            self._lose(error)

    def _add_sites(self, sites: Sequence[SiteFacts]) -> None:
        if sites:
            self._facts += sites
            self.recent.add_sites(sites)
            self._store(lambda writer: writer.add_sites(sites))

    def _store(self, write: Callable[[RunWriter], object]) -> None:
        """Write to the folder, where there is one that can be written."""
        if self.writer is None or self.write_failure is not None:
            return
        try:
            write(self.writer)
        except RunWriteError as error:
            self._lose(error)

    def _lose(self, error: RunWriteError) -> None:
        """Go on in memory: what rules find is worth as much without the numbers."""
        if self._guard.strict:
            raise error
        if self.write_failure is None:
            self.write_failure = error
            after = "" if self.last_step is None else f" after step {self.last_step}"
            self._notes.append(f"nothing is kept{after}, steps are judged all the same. {error}")
            say(self._notes[-1])

    def _send(self, record: StepRecord) -> None:
        for sink in tuple(self._sinks):
            try:
                sink(scalars_of(record, self._facts, getattr(sink, "stats", None)))
            except Exception as error:
                self._sinks.remove(sink)
                say(f"`{_name(sink)}` gets no more steps: {type(error).__name__}: {error}")


def _name(sink: Sink) -> str:
    return str(getattr(sink, "__qualname__", type(sink).__qualname__))
