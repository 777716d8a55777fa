"""Which process writes a run, and whether it still lives.

A process number alone says little: it is given again, and in containers it is often the same. So
the mark of a process also holds its machine and, where the system tells it, when it began.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def mark_process() -> dict[str, Any]:
    """Describe this process so that another one can look for it."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "begun": _read_begin(pid)}


def is_alive(mark: Mapping[str, Any]) -> bool | None:
    """Tell whether the marked process lives; None where this machine cannot know."""
    pid = mark.get("pid")
    # On Windows, os.kill with any signal ends the process.
    if os.name != "posix" or mark.get("host") != socket.gethostname() or not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it lives, and belongs to somebody else
    return _read_begin(pid) == mark.get("begun")


def _read_begin(pid: int) -> str:
    """Read when a process began, in ticks since a boot; empty where that cannot be read."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # The name of the program is in parentheses and may hold anything, so count behind it.
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = line.rpartition(")")[2].split()
        # A zombie has ended; only its parent has not asked yet.
        return f"{boot}/{fields[19]}" if fields[0] not in "ZX" else "ended"
    except (OSError, IndexError):
        return ""
