"""The database of one rank, open for its one writer.

Every change is a transaction: committed when the block ends, undone when it fails. What SQLite or
the system refuses becomes one `RunWriteError`. A child process that was forked inherits the open
database and must not touch it, not even by ending.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hookline._errors import RunWriteError, SessionError
from hookline.runs.schema import VERSION, create_tables, read_version, upgrade_tables

_WAIT = 10.0
"""Seconds to wait for a reader that holds the database up; readers hardly ever do."""

_open: weakref.WeakSet[Database] = weakref.WeakSet()


def is_open_here(path: Path, *, besides: Database) -> bool:
    """Tell whether this process has the database open for another writer."""
    others = [one for one in list(_open) if one is not besides]
    return any(one.path == path and one.is_usable for one in others)


class Database:
    """Hold the connection of the one who writes a rank's database."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        with self.reporting():
            self._connection = sqlite3.connect(
                path, timeout=_WAIT, isolation_level=None, check_same_thread=False
            )
        _open.add(self)

    @property
    def is_usable(self) -> bool:
        """Whether it is open, in the process that opened it."""
        return self._connection is not None and self._pid == os.getpid()

    def read_version(self) -> int:
        """Read the version of the tables, 0 for an empty database; refuse what is not ours."""
        with self.reporting():
            version = read_version(self.connection, self.path)
            if version == 0 and self.select("SELECT 1 FROM sqlite_master LIMIT 1"):
                raise sqlite3.DatabaseError("it holds tables of somebody else")
        return version

    def prepare(self) -> None:
        """Make the tables where there are none, and have commits survive the process."""
        with self.reporting():
            # Where shared memory is not to be had, SQLite stays with its other journal: slower,
            # and as safe.
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.connection.execute("PRAGMA synchronous=NORMAL")
            version = self.read_version()
            if not version:
                create_tables(self.connection)
            elif version < VERSION:
                upgrade_tables(self.connection, version)

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection, for the process and the time it is meant for."""
        if self._pid != os.getpid():
            raise SessionError(
                f"`{self.path}` is written by the process {self._pid}, from which this one "
                f"({os.getpid()}) was forked. Write a run in the process that opened it."
            )
        if self._connection is None:
            raise SessionError(f"`{self.path}` is closed: a run is written before it ends.")
        return self._connection

    def select(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Read rows."""
        return self.connection.execute(query, values).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what the block writes, or undo all of it."""
        connection = self.connection
        with self._lock, self.reporting():
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Turn what SQLite and the system refuse into one clear error."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, RunWriteError):
                raise
            raise explain_failure(self.path, error) from error

    def close(self, *, fold: bool = True) -> None:
        """Close it; with `fold`, make the log a part of it and leave one plain file."""
        if not self.is_usable:
            return
        connection, self._connection = self._connection, None
        assert connection is not None
        with self._lock, contextlib.closing(connection), contextlib.suppress(sqlite3.Error):
            if not fold:
                return
            # A reader may hold the log open; then it stays, and is as good.
            connection.execute("PRAGMA busy_timeout=200")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            # A file in WAL mode cannot be read on a medium that cannot be written.
            connection.execute("PRAGMA journal_mode=DELETE")

    def abandon(self) -> None:
        """Leave the connection to the parent process, for good."""
        if self._connection is not None:
            # SQLite forbids a child to use an inherited connection, and even to close it, which
            # Python does when the child ends. An object that is never freed is never closed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))


def explain_failure(path: Path, error: Exception) -> RunWriteError:
    """Say in one sentence why a run cannot be written, and in another what to do."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    name = getattr(error, "sqlite_errorname", "") or ""
    lower = reason.lower()
    if "full" in lower or "space" in lower or "quota" in lower or "too large" in lower:
        advice = "Free space on its disk or choose another folder."
    elif "not a database" in lower or "malformed" in lower or "somebody else" in lower:
        advice = "Move that file away or choose another folder."
    elif name.startswith("SQLITE_IOERR"):
        advice = "Look whether its disk is full or gone, or choose another folder."
    else:
        advice = "Choose a folder that can be written."
    return RunWriteError(
        f"The run at `{path.parent}` cannot be written: {reason} (`{path.name}`). {advice} "
        "What was written before stays readable."
    )


def _abandon_all() -> None:
    for one in list(_open):
        one.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
