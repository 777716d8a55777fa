"""Which run is meant: the folder that is named, or the newest one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hookline.cli.failing import Failure

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from hookline.runs import Run

RUNS = "runs"
_MOST_FOLDERS = 20_000
_DEEPEST = 4


def open_named(text: str | None) -> Run:
    """Open the run that is named, or the newest below `runs` and the current folder."""
    from hookline._errors import HooklineError
    from hookline.runs import open_run

    path = Path(text) if text is not None else find_newest()
    if path is None:
        raise Failure(
            f"there is no run below `{RUNS}` or here",
            "name a folder, or make one with `hookline run train.py`",
        )
    try:
        return open_run(path)
    except HooklineError as error:
        raise Failure(str(error), "`hookline ls` lists the runs that there are") from None


def find_newest() -> Path | None:
    """Find the run that was written to last."""
    found = list(find_runs(Path(RUNS))) or list(find_runs(Path()))
    return max(found, key=read_time, default=None)


def find_runs(folder: Path, *, depth: int = _DEEPEST) -> Iterator[Path]:
    """Find run folders at a place and below it; a run holds no other runs."""
    from hookline.runs.schema import is_run

    waiting = [(folder, 0)]
    seen = 0
    while waiting and seen < _MOST_FOLDERS:
        one, level = waiting.pop()
        seen += 1
        if is_run(one):
            yield one
        elif level < depth:
            try:
                with os.scandir(one) as inside:
                    names = [
                        entry.name
                        for entry in inside
                        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
                    ]
            except OSError:
                continue
            waiting += [(one / name, level + 1) for name in names]


def read_time(folder: Path) -> float:
    """Tell when a run was last written to."""
    times = [0.0]
    for path in folder.glob("rank-*.sqlite*"):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times)


def complete_runs(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the folder of a run: runs first, else any folder."""
    from click.shell_completion import CompletionItem

    found = sorted(find_runs(Path(RUNS)), key=read_time, reverse=True)
    names = [str(one) for one in found if str(one).startswith(incomplete)]
    return [CompletionItem(one) for one in names] or [CompletionItem(incomplete, type="dir")]
