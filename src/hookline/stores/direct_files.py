"""Write a large file past the page cache: aligned blocks, one on its way while the next is filled.

What the cache would hold nobody reads soon, and copying into it takes longer than the disk.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_BLOCK = 4096
"""What addresses, sizes and offsets are multiples of, for every disk."""

_STAGE = 16 << 20
"""Bytes that are gathered before they are written."""


class DirectFile:
    """Append bytes behind some room at the beginning, which is written last."""

    def __init__(self, path: Path, room: int) -> None:
        if room % _BLOCK:
            raise ValueError(f"room for {room} bytes is not a multiple of {_BLOCK}")
        self.path = path
        self.size = 0
        """Bytes so far, without the room."""
        self.crc = 0
        """Their checksum, since `crc` was last set to 0."""
        self._room = room
        self._stages = [mmap.mmap(-1, _STAGE), mmap.mmap(-1, _STAGE)]
        self._filled = 0
        self._at = room
        self._fd = -1
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    @property
    def is_small(self) -> bool:
        """Whether nothing is on the disk yet, so that any head fits before it."""
        return self._fd < 0

    def append(self, data: memoryview | bytes) -> None:
        """Add bytes."""
        view = memoryview(data)
        self.size += len(view)
        while len(view):
            part = view[: _STAGE - self._filled]
            # Piece by piece, so that the disk has something to do meanwhile.
            self.crc = zlib.crc32(part, self.crc)
            self._stages[0][self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == _STAGE:
                self._send()

    def finish(self, head: bytes) -> None:
        """Write what is left and the head before it, and have all of it on the disk."""
        if self.is_small:
            with self.path.open("xb") as file:
                file.write(head)
                file.write(memoryview(self._stages[0])[: self._filled])
                file.flush()
                os.fsync(file.fileno())
            return
        if len(head) != self._room:
            raise ValueError(f"a head of {len(head)} bytes does not fill the room of {self._room}")
        left = self._filled
        if left:
            self._filled += -left % _BLOCK
            self._send()
        self._wait()
        first = mmap.mmap(-1, self._room)
        first[:] = head
        self._write(first, self._room, 0)
        os.ftruncate(self._fd, self._room + self.size)
        os.fsync(self._fd)
        self._close()

    def discard(self) -> None:
        """Leave nothing behind; what went wrong before says more than what goes wrong here."""
        with contextlib.suppress(Exception):
            self._wait()
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _send(self) -> None:
        """Have the filled stage written while the other one is filled."""
        if self._fd < 0:
            self._fd = _open_direct(self.path)
            self._thread = ThreadPoolExecutor(1, "hookline-store")
        self._wait()
        assert self._thread is not None
        count, at = self._filled, self._at
        self._pending = self._thread.submit(self._write, self._stages[0], count, at)
        self._stages.reverse()
        self._at += count
        self._filled = 0

    def _wait(self) -> None:
        if self._pending is not None:
            # What failed stays: a file with a hole must not be finished by whoever tries again.
            self._pending.result()
            self._pending = None

    def _write(self, stage: mmap.mmap, count: int, at: int) -> None:
        view = memoryview(stage)[:count]
        while len(view):
            try:
                done = os.pwrite(self._fd, view, at)
            except OSError as error:
                # Some file systems take the flag when a file is opened, and no write after it.
                if error.errno != errno.EINVAL or not _leave_direct(self._fd):
                    raise
                continue
            if not done:
                raise OSError(errno.EIO, f"the disk took none of {len(view)} bytes")
            view, at = view[done:], at + done
            if at % _BLOCK and len(view):
                # A disk that is full or a signal stopped it inside a block. The next write says.
                _leave_direct(self._fd)

    def _close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._fd >= 0:
            # Closed it is also where that fails, and the number may be another file's next.
            handle, self._fd = self._fd, -1
            os.close(handle)


def _open_direct(path: Path) -> int:
    """Create a file that is written past the cache, where its file system can do that."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return os.open(path, flags | direct, 0o666)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            # Some file systems create the file before they refuse the flag.
            path.unlink(missing_ok=True)
    return os.open(path, flags, 0o666)


def _leave_direct(handle: int) -> bool:
    """Have the rest of a file written through the cache; tell whether it was not before."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return False
    import fcntl

    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    if flags & direct:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)


def sync_folder(path: Path) -> None:
    """Have a folder's list of names on the disk, where that can be asked for."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
