"""The files of a run folder, and the tables of a rank's database.

    run.json             what this folder is, for people
    environment.json     and other small documents, for people; the databases hold them too
    rank-00000.sqlite    everything that a rank measured
    tensors/             tensors dumped by it, as safetensors

A step is one row of `step` and one of each table `block_...`, under the same id, written in one
transaction. Ids grow in the order of writing. When a step's number is not greater than those
before it, training went back: what was written from that number on is superseded, and stays.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

from hookline._errors import NewerRun
from hookline.runs.records import WIDTHS

VERSION = 2
"""The version of the tables; grows with every change that an older reader would misread."""

RUN_FILE = "run.json"
TENSORS = "tensors"

_RANK_FILE = re.compile(r"rank-([0-9]{5,})\.sqlite")

_TABLES = """
CREATE TABLE attempt (id INTEGER PRIMARY KEY, facts TEXT NOT NULL);
CREATE TABLE document (name TEXT PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE site (
    id INTEGER PRIMARY KEY, address TEXT NOT NULL, kind TEXT NOT NULL, module TEXT NOT NULL,
    type TEXT NOT NULL, dtype TEXT NOT NULL, shape TEXT NOT NULL, source TEXT NOT NULL,
    more TEXT NOT NULL
);
CREATE INDEX site_by_address ON site (address);
CREATE TABLE shared (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE step (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, time REAL NOT NULL, seconds REAL,
    names INTEGER, scalars BLOB
);
CREATE TABLE finding (id INTEGER PRIMARY KEY, time REAL NOT NULL, text TEXT NOT NULL);
CREATE TABLE dump (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, name TEXT NOT NULL, file TEXT NOT NULL,
    facts TEXT NOT NULL
);
"""

LATER = {"units": 2}
"""The kinds of blocks that came later, with the version that they came with."""


def _block_table(kind: str) -> str:
    return (
        f"CREATE TABLE block_{kind} (id INTEGER PRIMARY KEY, layout INTEGER NOT NULL,"
        " shared INTEGER, data BLOB NOT NULL, rare BLOB);\n"
    )


def rank_file(folder: Path, rank: int) -> Path:
    """Name the database of a rank."""
    return folder / f"rank-{rank:05d}.sqlite"


def find_ranks(folder: Path) -> dict[int, Path]:
    """Find the databases in a folder, by rank."""
    found = {
        int(name[1]): path
        for path in folder.iterdir()
        if (name := _RANK_FILE.fullmatch(path.name)) and path.is_file()
    }
    return dict(sorted(found.items()))


def is_run(folder: Path) -> bool:
    """Tell whether a folder holds a run, or the beginning of one."""
    try:
        return (folder / RUN_FILE).is_file() or bool(find_ranks(folder))
    except OSError:
        return False


def create_tables(connection: sqlite3.Connection) -> None:
    """Make the tables of an empty database, all of them or none."""
    blocks = "".join(map(_block_table, WIDTHS))
    connection.executescript(f"BEGIN;{_TABLES}{blocks}PRAGMA user_version={VERSION};COMMIT;")


def upgrade_tables(connection: sqlite3.Connection, version: int) -> None:
    """Add to the tables of an older version what has come since; what is there stays."""
    new = "".join(_block_table(kind) for kind, since in LATER.items() if since > version)
    connection.executescript(f"BEGIN;{new}PRAGMA user_version={VERSION};COMMIT;")


def read_version(connection: sqlite3.Connection, path: Path) -> int:
    """Read the version of a database's tables, 0 where there are none; refuse a newer one."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise NewerRun(
            f"`{path}` was written by a newer hookline: its schema is version {version}, and this "
            f"hookline reads up to version {VERSION}. Upgrade it: pip install --upgrade hookline."
        )
    return version
