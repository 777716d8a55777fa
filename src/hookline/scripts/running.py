"""Run a script under watch, from its first line to the report.

The script runs as it would without; what it prints, raises and returns is its own.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hookline._errors import NoSuchSite
from hookline.scripts.awaiting import TorchArrival
from hookline.scripts.endings import (
    Ending,
    EnoughSteps,
    Terminated,
    await_threads,
    ending_on_terminate,
    read_ending,
    show_error,
    unhurried,
)
from hookline.scripts.folders import read_rank
from hookline.scripts.launching import Launch, NoSuchScript
from hookline.scripts.options import RunOptions
from hookline.scripts.speaking import say

if TYPE_CHECKING:
    from hookline.rules import Finding
    from hookline.runs import Run
    from hookline.scripts.watching import ScriptWatch
    from hookline.views import Report

_SEVERITIES = ("error", "warning", "info")
_MOST_SECONDS = 10.0
"""How long rank 0 waits for the others to end before it reports."""


class ScriptRun:
    """One run of one script."""

    def __init__(self, launch: Launch, options: RunOptions) -> None:
        self.launch = launch
        self.options = options
        self.ending = Ending(0, "finished")
        """How the script ended."""
        self.report: Report | None = None
        """What the run folder says; None where there is none."""
        self.verdict = ""
        """What happened, in one sentence; empty where nothing was watched."""
        self.silence = ""
        """Why nothing was watched, where that is to be said."""
        self.findings: list[Finding] = []
        """What was found, on all ranks where this is the first."""
        self._watched: ScriptWatch | None = None
        self._rank, self._world = read_rank()
        self._process = os.getpid()

    @property
    def notes(self) -> list[str]:
        """What could not be watched, and why."""
        return [] if self._watched is None else self._watched.notes

    @property
    def folder(self) -> Path | None:
        """Where the run lies."""
        watched = self._watched
        return None if watched is None or watched.watch is None else watched.folder

    @property
    def page(self) -> Path | None:
        """Where the HTML report goes, if one is written."""
        if not self.options.has_page or self.folder is None:
            return None
        return self.options.page or self.folder / "report.html"

    @property
    def code(self) -> int:
        """The exit code: the script's own, or 1 where it is 0 and something bad was found."""
        is_lost = self.options.folder is not None and self.folder is None
        if self.ending.code or is_lost or self._rank or self._has_failed:
            return self.ending.code
        return int(is_bad(self.findings, self.options.fail_on))

    @property
    def is_here(self) -> bool:
        """Whether this is the process that was started, and no fork that the script made."""
        return os.getpid() == self._process

    def run(self) -> int:
        """Run the script, close its run, say what there is to say, and give the exit code."""
        self.launch.check()
        arrival = TorchArrival(self._arrive)
        with ending_on_terminate():
            arrival.start()
            try:
                self._run_script()
            finally:
                arrival.stop()
        if not self.is_here:  # it ends as it would have without us; the parent reports
            return self.ending.code
        with unhurried() as hurry:
            if self._watched is not None:
                self._watched.close(self.ending.status)
            if not hurry.is_asked:
                try:
                    self._conclude()
                except Exception as problem:
                    self._explain(problem)
        return self.code

    def _run_script(self) -> None:
        """Run it to its end and that of its threads, and see how it ended."""
        known = set(threading.enumerate())
        error: BaseException | None = None
        try:
            self.launch.run()
        except NoSuchScript:
            if self._watched is not None:
                self._watched.close("failed")
            raise
        except BaseException as raised:
            error = raised
        self.ending = read_ending(error)
        try:
            if self.ending.error is not None:
                show_error(self.ending.error)
            if self.is_here and not isinstance(error, EnoughSteps | Terminated):
                await_threads(known)
        except BaseException as raised:  # a signal on the way
            self.ending = read_ending(raised)

    def _arrive(self) -> None:
        """Begin to look for models, now that there is torch."""
        try:
            self._watched = self._make_watch()
            self._watched.start()
        except Exception as error:
            self._watched = None
            if self.options.is_strict:
                raise
            say(f"hookline: nothing is watched, and the script goes on: {error!r}")

    def _make_watch(self) -> ScriptWatch:
        from hookline.scripts.watching import ScriptWatch

        return ScriptWatch(self.options, is_speaking=self._rank == 0)

    @property
    def _has_failed(self) -> bool:
        return self._watched is None or self._watched.failure is not None

    def _conclude(self) -> None:
        """Gather what was found, and report it."""
        watched = self._watched
        if watched is None or watched.watch is None:
            if self._rank == 0 and self.ending.code == 0:
                self.silence = self._explain_silence()
                self._say(self.silence)
            return
        self.findings = watched.findings
        self.verdict = watched.watch.verdict
        if self._rank != 0:
            return
        if self.folder is not None:
            from hookline.runs import open_run
            from hookline.views import read_report

            run = open_run(self.folder)
            if self._world > 1:
                _await_others(run, self._world)
            self.report = self._complete(read_report(run), watched)
            self.findings = list(self.report.findings)
            self.verdict = self.report.verdict
            self._write_page(self.report)
        if self.options.steps is None:
            self._show()

    def _complete(self, report: Report, watched: ScriptWatch) -> Report:
        """Say also what was found and noted after the run could not be written any more."""
        if watched.watch is None or watched.watch.write_failure is None:
            return report
        notes = tuple(dict.fromkeys([*report.notes, *watched.watch.notes]))
        from hookline.rules import fold

        groups = tuple(fold(self.findings))
        findings = tuple(one for group in groups for one in (group.root, *group.follows))
        return dataclasses.replace(
            report, verdict=self.verdict, findings=findings, groups=groups, notes=notes
        )

    def _explain_silence(self) -> str:
        """Say why nothing was watched."""
        watched = self._watched
        why = None if watched is None else watched.unmatched or watched.failure
        if why is not None:
            asked = " ".join(f"--watch {one}" for one in self.options.sites)
            of = f"`{asked}`: " if isinstance(why, NoSuchSite) else ""
            return f"nothing was watched: {of}{str(why) or type(why).__name__}"
        return _NO_MODEL + _ELSEWHERE

    def _write_page(self, report: Report) -> None:
        page = self.page
        if page is None:
            return
        from hookline.views import write_html

        try:
            page.parent.mkdir(parents=True, exist_ok=True)
            write_html(report, page)
        except OSError as error:
            say(f"hookline: the HTML report could not be written: {error}")

    def _show(self) -> None:
        """Print the report: the verdict first, and last where to look further."""
        if self.options.is_quiet:
            if is_bad(self.findings, "warning"):
                say(f"hookline: {self.verdict}")
            return
        color = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        from hookline.views import format_findings, format_report

        say("")
        if self.report is not None:
            say(format_report(self.report, color=color))
            if self.page is not None and self.page.exists():
                say(f"page  {show_path(self.page)}")
        else:
            say(self.verdict)
            if self.findings:
                say(format_findings(self.findings, color=color))

    def _say(self, text: str) -> None:
        if not self.options.is_quiet:
            say(f"hookline: {text}")

    def _explain(self, error: Exception) -> None:
        say(f"hookline: the report could not be made: {type(error).__name__}: {error}")
        if self.folder is not None:
            say(f"hookline: the run is there: hookline report {show_path(self.folder)}")
        if self.options.is_strict:
            raise error


_NO_MODEL = "nothing was watched: no module with trainable parameters was called with grad."
_ELSEWHERE = (
    " Where the script starts other processes, run hookline in those: "
    "torchrun ... -m hookline run train.py"
)


def is_bad(findings: list[Finding], least: str) -> bool:
    """Tell whether a finding is at least as severe as asked; `never` is never reached."""
    if least not in _SEVERITIES:
        return False
    counted = _SEVERITIES[: _SEVERITIES.index(least) + 1]
    return any(finding.severity in counted for finding in findings)


def show_path(path: Path) -> str:
    """Write a path as a person at this place would."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _await_others(run: Run, world: int) -> None:
    """Wait until all ranks have closed their part, or for a while."""
    until = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < until:
        if len(run.ranks) >= world and run.status != "running":
            return
        time.sleep(0.1)
