"""hl.open_run: read a run folder, while it is written or long after."""

from __future__ import annotations

import difflib
import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline._errors import NoSuchRun, NotRecorded
from hookline.runs.documents import read_document
from hookline.runs.dumps import Dump
from hookline.runs.history import History
from hookline.runs.processes import is_alive
from hookline.runs.ranks import RankReader
from hookline.runs.schema import RUN_FILE, find_ranks, is_run

_WORST_FIRST = ("running", "failed", "killed", "interrupted", "finished")
_MOST_SUGGESTIONS = 5
_MOST_SEARCHED = 1000


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run folder for reading.

    Nothing is read yet: every question reads what is there at that moment, so a run that is being
    written is read as far as it has come. What cannot be read is left out and named in `run.notes`.
    """
    folder = Path(path).expanduser().absolute()
    if folder.is_file() and is_run(folder.parent):
        folder = folder.parent
    if not is_run(folder):
        raise _explain(Path(path), folder)
    run = Run(folder)
    run.status  # noqa: B018 (a run of a newer hookline is refused here and not at the first question)
    return run


class Run(History):
    """A run folder: statistics of sites over steps, and what was kept beside them.

    Statistics of several ranks are merged as if one had seen all elements; `rank=` reads one.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._readers: dict[int, RankReader] = {}

    def __repr__(self) -> str:
        steps = self.steps
        reach = f"{len(steps)} steps ({steps[0]} to {steps[-1]})" if len(steps) else "no steps"
        ranks = f", {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        return f"Run `{self.path}`: {self.status}, {reach}, {len(self.sites())} sites{ranks}"

    def _repr_html_(self) -> str:
        """Say what it is, for a notebook: how it stands, its findings, its loss."""
        found = self.findings
        counts = ", ".join(
            f"{count} {severity}"
            for severity in ("error", "warning", "info")
            if (count := sum(one.get("severity") == severity for one in found))
        )
        line = f"<div>{html.escape(repr(self))}</div><div>{counts or 'no findings'}</div>"
        loss = "loss" in self.scalars and self.scalar("loss")._repr_html_()
        return f"<div>{line}{loss or ''}</div>"

    @property
    def status(self) -> str:
        """How it stands: running, finished, interrupted, failed, killed, or empty."""
        found = {_read_status(reader.attempt()) for reader in self._sources()}
        return next((one for one in _WORST_FIRST if one in found), "empty")

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing or could not be read, in words."""
        notes: dict[str, None] = {}
        world = 0
        readers = self._sources()
        for reader in readers:
            facts = reader.attempt()
            world = max(world, facts.get("world", 0))
            reader.index()
            if _read_status(facts) == "killed":
                notes[f"rank {reader.rank} was killed: its last steps are all there is"] = None
            notes.update(reader.notes)
        missing = sorted(set(range(world)) - {reader.rank for reader in readers})
        if missing:
            notes[f"nothing was written by {_list_ranks(missing)} of {world}"] = None
        if not readers:
            notes["no rank has written anything yet"] = None
        if read_document(self.path / RUN_FILE) is None:
            notes[f"`{RUN_FILE}` is missing or not whole; it is for people and not needed"] = None
        return tuple(notes)

    @property
    def findings(self) -> list[dict[str, Any]]:
        """What rules concluded, in the order of steps where they name one."""
        found = [
            {"rank": reader.rank, **finding}
            for reader in self._sources()
            for finding in reader.findings()
        ]
        return sorted(found, key=_find_step)

    @property
    def tensors(self) -> Mapping[str, Dump]:
        """The dumped tensors by the name of the dump; they are read when asked for.

        A name that was used again, or by several ranks, is followed by the file's name.
        """
        found: dict[str, Dump] = {}
        for reader in self._sources():
            for name, file, facts in reader.dumps():
                path = self.path / file
                found[name if name not in found else f"{name} ({path.name})"] = Dump(
                    name, reader.rank, path, facts
                )
        return found

    @property
    def environment(self) -> dict[str, Any]:
        """Where it ran: versions, machine, command, git. Empty where that was not written."""
        return self._read("environment")

    @property
    def model(self) -> dict[str, Any]:
        """What was watched: the modules and their parameters. Empty where that was not written."""
        return self._read("model")

    @property
    def cost(self) -> dict[str, Any]:
        """What watching cost, as measured by itself. Empty where that was not written."""
        return self._read("cost")

    def document(self, name: str, *, rank: int | None = None) -> dict[str, Any]:
        """Read any document by its name: the first rank's that has it, or one rank's."""
        for reader in self._sources():
            if rank in (None, reader.rank) and (facts := reader.document(name)) is not None:
                return facts
        # A database that cannot be read still has its documents beside it.
        facts = read_document(self.path / f"{name}.json") if rank in (None, 0) else None
        if facts is None:
            raise NotRecorded(f"`{self.path}` holds no document `{name}`.")
        return facts

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return self.document(name)
        except NotRecorded:
            return {}

    def _sources(self) -> Sequence[RankReader]:
        """Give the ranks that are there now; others may have come since the last question."""
        try:
            found = find_ranks(self.path)
        except OSError as error:
            raise NoSuchRun(f"`{self.path}` is gone: {error.strerror}.") from error
        return [
            self._readers.setdefault(rank, RankReader(path, rank)) for rank, path in found.items()
        ]


def _read_status(facts: Mapping[str, Any]) -> str | None:
    status = facts.get("status")
    if status == "running" and is_alive(facts.get("process", {})) is False:
        return "killed"
    return status


def _find_step(finding: Mapping[str, Any]) -> float:
    step = finding.get("step")
    return step if isinstance(step, int | float) else float("inf")


def _list_ranks(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:_MOST_SUGGESTIONS]))
    more = f" and {len(ranks) - _MOST_SUGGESTIONS} more" if len(ranks) > _MOST_SUGGESTIONS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {few}{more}"


def _explain(given: Path, folder: Path) -> NoSuchRun:
    """Say what is wrong with a path, and which runs are near it."""
    what = (
        f"`{given}` is not there"
        if not folder.exists()
        else f"`{given}` holds no run (no `{RUN_FILE}` and no `rank-00000.sqlite`)"
    )
    parent = next((one for one in folder.parents if one.is_dir()), folder.parent)
    runs = _find_runs(folder) or _find_runs(parent) or _find_runs(parent / "runs")
    if not runs:
        return NoSuchRun(f"{what}, and there is no run near it.")
    names = {str(run): run for run in runs}
    near = difflib.get_close_matches(str(folder), names, n=_MOST_SUGGESTIONS, cutoff=0)
    shown = ", ".join(f"`{_show(names[name], given)}`" for name in near)
    return NoSuchRun(f"{what}. Runs near it: {shown}.")


def _show(run: Path, given: Path) -> Path:
    """Write a path as it was given: relative where that was."""
    if given.is_absolute() or not run.is_relative_to(Path.cwd()):
        return run
    return run.relative_to(Path.cwd())


def _find_runs(folder: Path) -> list[Path]:
    try:
        inside = [path for _, path in zip(range(_MOST_SEARCHED), folder.iterdir(), strict=False)]
    except OSError:
        return []
    return [path for path in inside if path.is_dir() and is_run(path)]
