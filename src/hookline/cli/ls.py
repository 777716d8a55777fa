"""`hookline ls`: the runs that there are."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from hookline.cli.run_folders import RUNS, find_runs, read_time


@click.command("ls", short_help="List runs: how they stand, and what was found.")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for another program.")
def list_runs(folder: Path | None, as_json: bool) -> None:
    """List the runs below FOLDER, the newest first; without it those below `runs`.

    \b
    examples:
      hookline ls
      hookline ls experiments
      hookline ls --json | jq '.[] | select(.errors > 0) | .path'
    """
    from hookline._tables import Table
    from hookline.cli.failing import Failure

    place = folder if folder is not None else Path(RUNS)
    if folder is not None and not folder.is_dir():
        raise Failure(f"there is no folder `{folder}`", "`hookline ls` lists those below `runs`")
    found = sorted(find_runs(place), key=read_time, reverse=True)
    rows = [_describe(one) for one in found]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo(f"no runs below `{place}`; `hookline run train.py` makes one", err=True)
        return
    columns = ("path", "status", "steps", "findings", "when", "command")
    cells = [
        (row["path"], row["status"], row["steps"], _count(row), row["when"], row["command"])
        for row in rows
    ]
    click.echo(str(Table(columns, cells)))


def _describe(folder: Path) -> dict[str, Any]:
    """Describe a run in a row; one that cannot be read says so itself."""
    from hookline._errors import HooklineError
    from hookline.runs import open_run

    row: dict[str, Any] = {
        "path": str(folder),
        "status": "",
        "steps": 0,
        "errors": 0,
        "warnings": 0,
        "infos": 0,
        "when": time.strftime("%Y-%m-%d %H:%M", time.localtime(read_time(folder))),
        "command": "",
    }
    try:
        run = open_run(folder)
        severities = [one.get("severity") for one in run.findings]
        row.update(
            status=run.status,
            steps=len(run.steps),
            errors=severities.count("error"),
            warnings=severities.count("warning"),
            infos=severities.count("info"),
            command=" ".join(map(str, run.environment.get("command", ())[1:])),
        )
    except (HooklineError, OSError) as error:
        row["status"] = "newer" if type(error).__name__ == "NewerRun" else "unreadable"
    return row


def _count(row: dict[str, Any]) -> str:
    named = [(row["errors"], "error"), (row["warnings"], "warning"), (row["infos"], "info")]
    words = [f"{many} {name}{'s' * (many > 1 and name != 'info')}" for many, name in named if many]
    return ", ".join(words) or "none"
