"""Where steps go: into memory, into the run folder, to sinks, to the rules and to the terminal.

All of it happens in a thread of its own. What fails there ends the writing with one message, and
never the training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hookline._errors import HooklineError
from hookline.replays import KeptCall
from hookline.rules import Finding, Judge
from hookline.runs import RecentSteps, RunWriter, SiteFacts, StepRecord
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
        self._worker = Worker("hookline-watch", guard.note)

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the thread that brings steps: it cannot wait for itself."""
        return self._worker.is_current

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
        writer = self.writer
        if writer is not None:
            self._worker.put(lambda: writer.add_finding(finding))

    def describe(self, name: str, facts: Mapping[str, Any]) -> None:
        """Keep a small document in the run."""
        writer = self.writer
        if writer is not None:
            self._worker.put(lambda: writer.describe(name, facts))

    def dump(self, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write tensors beside the run."""
        writer = self.writer
        assert writer is not None

        def write() -> None:
            writer.dump(name, tensors, facts)

        self._worker.put(write)

    def flush(self) -> bool:
        """Wait until all that was taken is kept; tell whether it is."""
        return self._worker.flush()

    def close(self, status: str, cost: Cost, notes: Sequence[str]) -> None:
        """Complete the run, and end the sinks."""
        writer = self.writer
        self._worker.put(self._judge_end)
        if writer is not None:

            def finish() -> None:
                writer.describe("cost", cost.facts())
                writer.describe("notes", {"notes": list(notes)})
                writer.close(status)

            self._worker.put(finish)
        self._worker.stop()
        if writer is not None and self._worker.failure is not None:
            with contextlib.suppress(HooklineError, OSError):  # it was said when it happened
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
        if self.writer is not None:
            self.writer.write(record)
        self.steps += 1
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
            say(f"steps are not judged any more. {describe(error)}")
            return
        assert self._judge is not None
        for failure in self._judge.failures[self._failures :]:
            say(failure)
        self._failures = len(self._judge.failures)
        for finding in found:
            self._keep(finding, calls)

    def _keep(self, finding: Finding, calls: Sequence[KeptCall]) -> None:
        self.findings.append(finding)
        if self.writer is not None:
            self.writer.add_finding(finding.to_dict())
        self._reaction.take(finding, calls)

    def _add_sites(self, sites: Sequence[SiteFacts]) -> None:
        if sites:
            self._facts += sites
            self.recent.add_sites(sites)
            if self.writer is not None:
                self.writer.add_sites(sites)

    def _send(self, record: StepRecord) -> None:
        for sink in tuple(self._sinks):
            try:
                sink(scalars_of(record, self._facts, getattr(sink, "stats", None)))
            except Exception as error:
                self._sinks.remove(sink)
                say(f"`{_name(sink)}` gets no more steps: {type(error).__name__}: {error}")


def _name(sink: Sink) -> str:
    return str(getattr(sink, "__qualname__", type(sink).__qualname__))
