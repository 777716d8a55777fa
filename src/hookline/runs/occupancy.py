"""When a folder is taken: it holds another run, or somebody is writing one there."""

from __future__ import annotations

import os
from pathlib import Path

from hookline._errors import RunExists
from hookline.runs.database import Database, is_open_here
from hookline.runs.documents import from_json, read_document
from hookline.runs.processes import is_alive
from hookline.runs.schema import RUN_FILE


def refuse_other_run(
    database: Database, folder: Path, *, rank: int, world: int, resume: bool
) -> None:
    """Raise where writing would mix two runs; a run that never came to a step is taken over."""
    if database.read_version():
        _refuse_same_rank(database, folder, rank=rank, resume=resume)
    known = (read_document(folder / RUN_FILE) or {}).get("world", world)
    if known != world and not resume:
        raise RunExists(
            f"`{folder}` holds a run of {known} ranks, and this one has {world}. {_suggest(folder)}"
        )


def _refuse_same_rank(database: Database, folder: Path, *, rank: int, resume: bool) -> None:
    attempts = database.select("SELECT facts FROM attempt ORDER BY id DESC LIMIT 1")
    facts = from_json(attempts[0][0]) if attempts else {}
    status, mark = facts.get("status", "unknown"), facts.get("process", {})
    is_running = is_alive(mark) if status == "running" else False
    if is_running and mark.get("pid") == os.getpid():
        # A writer of this process that was forgotten, not closed, is no reason.
        is_running = is_open_here(database.path, besides=database)
    if is_running:
        raise RunExists(
            f"`{folder}` is being written by process {mark['pid']}, as rank {rank}. "
            f"{_suggest(folder, may_resume=False)}"
        )
    steps = database.select("SELECT coalesce(max(id), 0) FROM step")[0][0]
    # Where the writer is on another machine, only the user can know whether it lives.
    if not resume and (steps or is_running is None):
        ending = "cut off" if status == "running" else status
        raise RunExists(
            f"`{folder}` holds a run already: {steps} steps of rank {rank}, {ending}. "
            f"{_suggest(folder)}"
        )


def _suggest(folder: Path, *, may_resume: bool = True) -> str:
    number = 2
    while (free := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    resume = ", or go on in this one with `resume=True`" if may_resume else ""
    return f"Choose another folder, such as `{free}`{resume}."
