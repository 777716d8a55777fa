"""The CPU kernel as compiled code: made on this machine by its C compiler, once, and kept.

Without a compiler, with one that fails, or with `HOOKLINE_COMPILE=0` there is none, and statistics
are measured by torch operations instead, several times slower and to the same accuracy. `status`
says which it is and why.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

KINDS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.uint8: 8,
    torch.bool: 9,
}
"""What the kernel calls the dtypes that it reads; the same numbers as in `elements.h`."""

_SOURCES = ("kernel.c", "elements.h")
# Never -ffast-math, -Ofast or -funsafe-math-optimizations, here or in linking: a library linked
# so switches subnormal numbers off for the whole process when it is loaded.
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fPIC",
    "-shared",
    "-pthread",
)
_FORBIDDEN = ("-Ofast", "-ffast-math", "-funsafe-math-optimizations")
_MOST_SECONDS = 60

_Function = Callable[..., int]


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of the compiled kernel; see `kernel.c` for what each does."""

    measure: _Function
    """Measure elements that lie side by side; other Python threads run meanwhile."""
    measure_small: _Function
    """The same without letting go of the interpreter, which a few elements are not worth."""
    measure_runs: _Function
    """Measure equally spaced runs of elements."""
    update: _Function
    """Measure the difference of two tensors."""
    count: _Function
    """Count zeros, tiny and huge elements and exponents."""


@dataclass(slots=True)
class _State:
    """What came of compiling, once it was tried."""

    library: Library | None = None
    status: str = "not compiled yet"
    is_tried: bool = False


_state = _State()
_lock = threading.Lock()


def load() -> Library | None:
    """Give the compiled kernel, compiling it if need be; None where there is none."""
    if not _state.is_tried:
        with _lock:
            if not _state.is_tried:
                _state.library, _state.status = _try()
                _state.is_tried = True
    return _state.library


def status() -> str:
    """Say whether the compiled kernel is in use, from where, or why not."""
    return _state.status


def _try() -> tuple[Library | None, str]:
    if os.environ.get("HOOKLINE_COMPILE") == "0":
        return None, "not compiled: HOOKLINE_COMPILE=0"
    command = find_compiler()
    if command is None:
        return None, "not compiled: there is no C compiler (cc, gcc, clang, or $CC)"
    try:
        return _load_or_build(command)
    # Whatever goes wrong, from a compiler that hangs to a disk that is full: the statistics are
    # there without it.
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return None, f"not compiled: {error}"


def find_compiler() -> list[str] | None:
    """Find the C compiler: `$CC`, else cc, gcc or clang."""
    named = os.environ.get("CC")
    if named:
        words = [word for word in shlex.split(named) if not word.startswith(_FORBIDDEN)]
        return words if words and shutil.which(words[0]) else None
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return [found] if found else None


def cache_folder() -> Path:
    """Give the folder of this user where the compiled kernel is kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "hookline"


def _load_or_build(command: list[str]) -> tuple[Library, str]:
    name = f"kernel-{_fingerprint(command)}.so"
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        if path.exists():
            # One that is cut short or of another system is made anew.
            with contextlib.suppress(OSError, RuntimeError):
                return _open(path), f"compiled: {path}"
        return _build(command, path), f"compiled: {path}"
    except (OSError, RuntimeError) as refused:
        if isinstance(refused, _CompilerError):
            raise
        # No home, a read-only one, or one whose files may not be executed.
        with tempfile.TemporaryDirectory(prefix="hookline-") as temporary:
            library = _build(command, Path(temporary) / name)
            return library, f"compiled for this process alone: {refused}"


class _CompilerError(RuntimeError):
    """Say what a compiler answered."""


def _build(command: list[str], path: Path) -> Library:
    """Compile to a name of this process, then rename: other processes see all of it or nothing."""
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        source = str(Path(__file__).with_name(_SOURCES[0]))
        for flags in ((*_FLAGS, "-march=native"), _FLAGS):
            done = subprocess.run(
                [*command, *flags, source, "-o", temporary, "-lm"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_MOST_SECONDS,
                check=False,
            )
            if done.returncode == 0:
                break
        else:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise _CompilerError(f"`{' '.join(command)}` failed: {lines[-1]}")
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return _open(path)


def _open(path: Path) -> Library:
    """Load a compiled kernel and see that it works."""
    pointer, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    free, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
    measured = [pointer, whole, number, number, pointer, pointer]
    library = Library(
        measure=_declare(free.hookline_measure, measured),
        measure_small=_declare(held.hookline_measure, measured),
        measure_runs=_declare(free.hookline_measure_runs, [*measured, whole, whole]),
        update=_declare(
            free.hookline_update,
            [pointer, pointer, pointer, whole, number, number, pointer, pointer],
        ),
        count=_declare(
            free.hookline_count,
            [pointer, whole, number, ctypes.c_double, ctypes.c_double, pointer, pointer],
        ),
    )
    x, row = np.array([1, 2, np.nan, 6], dtype=np.float32), np.empty(8)
    failed = library.measure(x.ctypes.data, 4, KINDS[torch.float32], 1, row.ctypes.data, None)
    if failed or row.tolist() != [3, 1, 0, 0, 1, 6, 3, 14]:
        raise RuntimeError(f"the kernel in {path} computes something else")
    return library


def _declare(function: ctypes._NamedFuncPointer, arguments: Sequence[type]) -> _Function:
    function.argtypes = list(arguments)
    function.restype = ctypes.c_int
    return function


def _fingerprint(command: list[str]) -> str:
    """Name what the compiled code depends on: source, flags, compiler, processor."""
    compiler = Path(shutil.which(command[0]) or command[0]).resolve()
    state = compiler.stat()
    parts = [
        *(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _SOURCES),
        *_FLAGS,
        *command,
        f"{compiler} {state.st_size} {state.st_mtime_ns}",
        _processor(),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Name the processor and what it can do; homes are shared between machines that differ."""
    parts = [platform.system(), platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        first = lines[: lines.index("")] if "" in lines else lines
        parts += [line for line in first if line.startswith(("model name", "flags", "Features"))]
    return "\n".join(parts)
