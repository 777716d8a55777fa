"""Where a store lies: a folder of this machine, or one that fsspec reaches.

A place knows names and bytes, nothing of what they mean. What is written is there whole or not.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hookline._errors import RunWriteError, StoreError
from hookline.runs.documents import replace_file
from hookline.stores.direct_files import sync_folder

_T = TypeVar("_T")

_TRIES = 6
_FIRST_PAUSE = 0.2
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, ImportError)
"""What another try does not change."""


class Place(ABC):
    """A folder."""

    name: str
    """How messages call it."""

    local: Path | None = None
    """The same as a path, where it is on this machine."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Give the names of the files in a folder, sorted; none where it is not there."""

    @abstractmethod
    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Read a file or a part of it."""

    @abstractmethod
    def read_many(self, parts: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Read parts of files: name, begin and end of each."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Give how many bytes a file has."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small file, in the place of one that is there."""

    @abstractmethod
    def append_line(self, name: str, line: str) -> None:
        """Add a line to a file that nobody else writes."""

    @abstractmethod
    def take(self, path: Path, name: str) -> None:
        """Put a finished file of this machine in its place; the path is gone then."""

    @abstractmethod
    def move(self, name: str, target: str) -> None:
        """Give a file another name."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def working_folder(self) -> Path:
        """Give a folder of this machine for files that are not finished."""

    def exists(self, name: str) -> bool:
        """Tell whether a file is there."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True


def open_place(where: str | os.PathLike[str]) -> Place:
    """Find the place that a path or an address such as `s3://bucket/name` means."""
    text = os.fspath(where)
    if "://" in text and not text.startswith("file://"):
        return RemotePlace(text)
    return LocalPlace(Path(text.removeprefix("file://")).expanduser())


class LocalPlace(Place):
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.local: Path = path.absolute()
        self.name = str(path)

    def names(self, folder: str) -> list[str]:
        try:
            found = os.scandir(self.local / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        with found:
            return sorted(one.name for one in found if not one.name.startswith("."))

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with (self.local / name).open("rb") as file:
            file.seek(begin)
            return file.read() if end is None else file.read(end - begin)

    def read_many(self, parts: Sequence[tuple[str, int, int]]) -> list[bytes]:
        found: list[bytes] = []
        # One file after the other is opened once.
        for name, mine in itertools.groupby(parts, key=lambda part: part[0]):
            with (self.local / name).open("rb") as file:
                for _, begin, end in mine:
                    file.seek(begin)
                    found.append(file.read(end - begin))
        return found

    def size(self, name: str) -> int:
        return (self.local / name).stat().st_size

    def write(self, name: str, data: bytes) -> None:
        path = self.local / name
        with telling_of(self.name):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, data)
            sync_folder(path.parent)

    def append_line(self, name: str, line: str) -> None:
        path = self.local / name
        with telling_of(self.name):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab+") as file:
                # A line that was cut off by a crash must not swallow this one.
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read(1) == b"\n" else f"\n{line}"
                file.write(f"{line}\n".encode())
                file.flush()
                os.fsync(file.fileno())

    def take(self, path: Path, name: str) -> None:
        target = self.local / name
        with telling_of(self.name):
            path.replace(target)
            sync_folder(target.parent)

    def move(self, name: str, target: str) -> None:
        path = self.local / target
        with telling_of(self.name):
            path.parent.mkdir(parents=True, exist_ok=True)
            (self.local / name).replace(path)
            sync_folder(path.parent)

    def remove(self, name: str) -> None:
        with telling_of(self.name):
            (self.local / name).unlink(missing_ok=True)

    def working_folder(self) -> Path:
        return self.local


class RemotePlace(Place):
    """A folder that fsspec reaches: `s3://`, `gs://`, `memory://` and others.

    Every request that fails is tried again a few times, each time after a longer pause.
    """

    def __init__(self, address: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        kind, _, rest = address.partition("://")
        self.name = f"{kind}://{rest.rstrip('/')}"
        try:
            self._found, root = fsspec.core.url_to_fs(self.name)
        except ImportError as error:
            raise ImportError(
                f"`{kind}://` needs a package of its own ({error}): "
                f'pip install "hookline[{kind}]", or the one that fsspec names'
            ) from error
        except ValueError as error:
            raise StoreError(f"`{address}` cannot be reached: {error}") from None
        self._root = str(root).rstrip("/")
        self._process = os.getpid()
        self._lines: dict[str, list[str]] = {}
        self._working: Path | None = None

    @property
    def _files(self) -> Any:
        """The file system; a process that was forked has its own, with connections of its own."""
        if self._process != os.getpid():
            import fsspec

            self._found, _ = fsspec.core.url_to_fs(self.name)
            self._process = os.getpid()
        return self._found

    def names(self, folder: str) -> list[str]:
        def ask() -> list[str]:
            # Others may have written since it was asked before.
            self._files.invalidate_cache()
            return [str(one) for one in self._files.ls(self._path(folder), detail=False)]

        try:
            found = self._try(ask)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(one.rsplit("/", 1)[-1] for one in found if not one.endswith("/"))

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        path = self._path(name)
        return bytes(self._try(lambda: self._files.cat_file(path, start=begin, end=end)))

    def read_many(self, parts: Sequence[tuple[str, int, int]]) -> list[bytes]:
        left = {number: part for number, part in enumerate(parts) if part[1] < part[2]}
        found: dict[int, bytes] = dict.fromkeys(range(len(parts)), b"")

        def ask() -> None:
            wanted = list(left.items())
            taken = self._files.cat_ranges(
                [self._path(name) for _, (name, _, _) in wanted],
                [begin for _, (_, begin, _) in wanted],
                [end for _, (_, _, end) in wanted],
                on_error="return",
            )
            failed: BaseException | None = None
            for (number, _), one in zip(wanted, taken, strict=True):
                if isinstance(one, BaseException):
                    failed = one
                else:
                    found[number] = bytes(one)
                    del left[number]
            if failed is not None:
                raise failed

        if left:
            self._try(ask)
        return [found[number] for number in range(len(parts))]

    def size(self, name: str) -> int:
        path = self._path(name)

        def ask() -> int:
            self._files.invalidate_cache()
            return int(self._files.size(path))

        return self._try(ask)

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with telling_of(self.name):
            self._try(lambda: self._files.pipe_file(path, data))

    def append_line(self, name: str, line: str) -> None:
        # An object is written whole; these are small, and each has one writer.
        lines = self._lines.get(name)
        if lines is None:
            try:
                lines = self.read(name).decode().splitlines()
            except FileNotFoundError:
                lines = []
            self._lines[name] = lines
        lines.append(line)
        self.write(name, "".join(f"{one}\n" for one in lines).encode())

    def take(self, path: Path, name: str) -> None:
        target = self._path(name)
        with telling_of(self.name):
            self._try(lambda: self._files.put_file(str(path), target))
        path.unlink(missing_ok=True)

    def move(self, name: str, target: str) -> None:
        def ask() -> None:
            try:
                self._files.mv(self._path(name), self._path(target))
            except FileNotFoundError:
                # Done at an earlier try, of which the answer did not come.
                if not self.exists(target):
                    raise

        with telling_of(self.name):
            self._try(ask)

    def remove(self, name: str) -> None:
        path = self._path(name)
        with telling_of(self.name), contextlib.suppress(FileNotFoundError):
            self._try(lambda: self._files.rm_file(path))

    def working_folder(self) -> Path:
        if self._working is None:
            with telling_of(tempfile.gettempdir()):
                self._working = Path(tempfile.mkdtemp(prefix="hookline-"))
            weakref.finalize(self, _remove_folder, self._working, os.getpid())
        return self._working

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _try(self, ask: Callable[[], _T]) -> _T:
        """Ask, and ask again where that failed for a reason that may pass."""
        pause = _FIRST_PAUSE
        for left in range(_TRIES - 1, -1, -1):
            try:
                return ask()
            except _FINAL:
                raise
            except Exception as error:
                if not left:
                    raise RunWriteError(
                        f"`{self.name}` failed {_TRIES} times: {type(error).__name__}: {error}. "
                        "Every finished shard stays readable; run the same again to go on once it "
                        "answers."
                    ) from error
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last try returns or raises")


def _remove_folder(path: Path, process: int) -> None:
    """Remove what was on its way, but not that of a parent when a forked child ends."""
    if process == os.getpid():
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def telling_of(name: str) -> Iterator[None]:
    """Say of a failed write where it was, what stays readable and what to do."""
    try:
        yield
    except RunWriteError:
        raise
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(name).free / 2**20:,.0f} MiB are free there)"
        raise RunWriteError(
            f"`{name}` cannot be written: {error.strerror or error}{free}. Every finished shard "
            "stays readable; make room or choose another folder, and run the same again to go on."
        ) from error
