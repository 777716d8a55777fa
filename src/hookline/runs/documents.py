"""Small JSON documents: written whole or not at all, read as far as they are there."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def to_json(facts: Any, *, indent: int | None = None) -> str:
    """Write facts as JSON; what JSON does not know becomes its text.

    Only ASCII, since a path or an argument may hold bytes that are no UTF-8.
    """
    return json.dumps(facts, default=str, indent=indent)


def from_json(text: str) -> dict[str, Any]:
    """Read facts; anything but a JSON object is a ValueError."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is expected, not {type(found).__name__}")
    return found


def write_document(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(to_json(facts, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_document(path: Path) -> dict[str, Any] | None:
    """Read a JSON file; None where it is missing or not whole."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
