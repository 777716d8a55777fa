"""Which files of a folder are a run's; anything else there is somebody's, and is never removed."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from hookline._errors import RunExists
from hookline.runs.schema import RUN_FILE, TENSORS, find_ranks, is_run

_DOCUMENTS = frozenset(
    ["environment", "model", "sources", "watch", "cost", "notes", "modules", "recording", "floors"]
)
"""What runs say of themselves; others are listed in the database."""

_PASSING = re.compile(r"\.hookline-[0-9]+|\.[a-z][a-z0-9_-]*\.json\.[0-9]+\.tmp")
"""What is only there for a moment, also before there is a run."""

_OWN = re.compile(rf"rank-[0-9]{{5,}}\.sqlite(-wal|-shm|-journal)?|report\.html|{_PASSING.pattern}")
"""Databases, what SQLite puts beside them, and the report."""

_TENSORS = re.compile(r"\.?.+\.rank-[0-9]{5,}\.safetensors(\.[0-9]+\.(tmp|part))?")

_MOST_NAMED = 3


def find_own(folder: Path) -> list[Path]:
    """List the files that a run in a folder consists of."""
    return [path for path, is_own in _walk(folder) if is_own]


def find_others(folder: Path) -> list[Path]:
    """List what is in a folder and is no part of a run."""
    return [path for path, is_own in _walk(folder) if not is_own]


def refuse_others(folder: Path) -> None:
    """Raise where a folder that a run is to be written to is a file, or holds other things."""
    if folder.exists() and not folder.is_dir():
        raise RunExists(f"`{folder}` is a file: name a folder for the run")
    others = find_others(folder)
    if others:
        names = [f"`{one.relative_to(folder)}`" for one in others[:_MOST_NAMED]]
        more = f" and {len(others) - len(names)} more" if len(others) > len(names) else ""
        raise RunExists(
            f"`{folder}` holds other files: {', '.join(names)}{more}. A run has a folder of its "
            "own: name one that is new or empty"
        )


def prepare_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Refuse a folder that holds anything but a run; remove the run in it where that is asked."""
    try:
        refuse_others(folder)
    except RunExists:
        if overwrite or not is_run(folder):  # looked at now: another rank may have begun it
            raise
    if overwrite:
        remove_run(folder)


def remove_run(folder: Path) -> None:
    """Remove the files of a run, and the folder if nothing else is in it."""
    for path in find_own(folder):
        path.unlink(missing_ok=True)
    for place in (folder / TENSORS, folder):
        if place.is_dir() and not place.is_symlink() and not any(place.iterdir()):
            place.rmdir()


def copy_run(source: Path, target: Path) -> None:
    """Copy the files of a run, and nothing else that is there."""
    for path in find_own(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


def _walk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Give what is in a folder, and whether it is a run's."""
    if not folder.is_dir():
        return
    if not is_run(folder):
        yield from ((path, _PASSING.fullmatch(path.name) is not None) for path in folder.iterdir())
        return
    documents = {RUN_FILE, *(f"{name}.json" for name in _list_documents(folder))}
    for path in sorted(folder.iterdir()):
        if path.name == TENSORS and path.is_dir() and not path.is_symlink():
            for one in sorted(path.iterdir()):
                yield one, _is_file(one) and _TENSORS.fullmatch(one.name) is not None
        else:
            is_own = path.name in documents or _OWN.fullmatch(path.name) is not None
            yield path, is_own and _is_file(path)


def _is_file(path: Path) -> bool:
    return path.is_symlink() or not path.is_dir()


def _list_documents(folder: Path) -> set[str]:
    """List the documents of a run, as far as its databases can be read."""
    found = set(_DOCUMENTS)
    for path in find_ranks(folder).values():
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as open_:
                found |= {str(name) for (name,) in open_.execute("SELECT name FROM document")}
        except sqlite3.Error:
            continue
    return found
