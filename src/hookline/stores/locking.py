"""Who writes under a name: a lock that the kernel lets go when the process is gone, however.

The file of a lock is removed by whoever lets go of it. Where a file system has no locks, there are
none: everything is as if nobody else were there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline._errors import StoreError
from hookline.runs.processes import mark_process
from hookline.stores.layout import SUFFIX

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PART = re.compile(rf"\.(.+)-\d+{re.escape(SUFFIX)}\.\d+\.part")
"""A shard on its way, with the name of its writer."""

_DAY = 86400.0
"""What a writer on another machine has not touched for so long is nobody's, lock or not."""

_GLANCE = 0.5
"""So many seconds somebody may have a lock only to see whether it is free."""

_MISSING = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""What a file system says that has no locks."""


class Lock:
    """A name that this process has in a folder; let go at the latest when nobody has this."""

    def __init__(self, path: Path, handle: int | None) -> None:
        self._handle = handle
        self._end = weakref.finalize(self, _let_go, path, handle)
        _HELD.add(self)

    @property
    def is_real(self) -> bool:
        """Whether the file system has locks, so that nobody else can have the name."""
        return self._handle is not None

    def release(self) -> None:
        """Let others have the name."""
        self._end()

    def forget(self) -> None:
        """Be another process, which came about by a fork: the lock is its parent's."""
        if self._end.detach() is not None and self._handle is not None:
            os.close(self._handle)


def _let_go(path: Path, handle: int | None) -> None:
    if handle is not None:
        # First, while nobody else can have it: who waits for a file that is gone looks again.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(handle)


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_all() -> None:
    for one in list(_HELD):
        one.forget()


# A child that outlives its parent would hold its locks.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def take(folder: Path, name: str, place: str) -> Lock:
    """Have a name in a folder, or say who has it."""
    end = time.monotonic() + _GLANCE
    while not isinstance(found := _try(_path(folder, name)), Lock):
        if time.monotonic() > end:
            break
        time.sleep(_GLANCE / 10)
    else:
        return found
    raise StoreError(
        f"`{place}` is being written by {_name(found)}, under the same name `{name}`: wait until "
        "that has ended and run the same again, or name another folder"
    )


def refuse_writers(folder: Path, place: str, *, own: str = "", name: str = "*") -> None:
    """Raise where somebody writes to a store; sweep what those that are gone have left.

    `own` is who asks, and may. With a name, who writes under that one.
    """
    sweep_parts(folder)
    for path in sorted({*folder.glob(f".{name}.lock")} - {_path(folder, own)}):
        found = _try(path)
        if not isinstance(found, Lock):
            raise StoreError(
                f"`{place}` is being written by {_name(found)}: stop that first, or name another "
                "folder"
            )
        found.release()


def _name(mark: Mapping[str, Any]) -> str:
    """Name the process that has a lock."""
    if mark.get("pid") == os.getpid() and mark.get("host") == socket.gethostname():
        return "another writer of this process"
    return f"process {mark['pid']} on {mark['host']}" if "pid" in mark else "another process"


def is_held(folder: Path, name: str) -> bool:
    """Tell whether somebody has a name in a folder."""
    path = _path(folder, name)
    if not path.exists():
        return False
    try:
        found = _try(path)
    except OSError:
        return False
    if isinstance(found, Lock):
        found.release()
        return False
    return True


def find_writer(file: str) -> str | None:
    """Give the name of the writer of a shard that is on its way; None of other files."""
    found = _PART.fullmatch(file)
    return None if found is None else found[1]


def sweep_parts(folder: Path, own: str | None = None) -> None:
    """Remove shards that were never finished, but those of writers that may live.

    `own` is the name of a writer that nobody else is.
    """
    parts: dict[str, list[Path]] = {}
    for path in sorted(folder.glob(".*.part")):
        name = find_writer(path.name)
        if name is not None:
            parts.setdefault(name, []).append(path)
    for name, files in parts.items():
        # Locks of some file systems are each machine's own.
        host = _read(_path(folder, name)).get("host", socket.gethostname())
        if host != socket.gethostname() and not all(map(_is_old, files)):
            continue
        lock = _try(_path(folder, name))
        if isinstance(lock, Lock):
            # Where there are no locks, only one's own can be told from those of others.
            for path in files if lock.is_real or name == own else ():
                path.unlink(missing_ok=True)
            lock.release()


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _DAY
    except OSError:
        return False


def _path(folder: Path, name: str) -> Path:
    return folder / f".{name}.lock"


def _try(path: Path) -> Lock | dict[str, Any]:
    """Take a lock, or tell who has it."""
    if fcntl is None:
        return Lock(path, None)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), path.stat()):
                lock = Lock(path, handle)
                with contextlib.suppress(OSError):  # a full disk: it is who he is all the same
                    os.write(handle, f"{json.dumps(mark_process())}\n".encode())
                return lock
        except BlockingIOError:
            os.close(handle)
            return _read(path)
        except FileNotFoundError:
            pass  # who had it let go of it, and removed it
        except OSError as error:
            _let_go(path, handle)
            if error.errno not in _MISSING:
                raise
            return Lock(path, None)
        os.close(handle)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8").partition("\n")[0])
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
