"""Small JSON documents: written whole or not at all, read as far as they are there."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How numbers are written that JSON does not have; other than the statistics `nan` and `inf`."""


def to_json(facts: Any, *, indent: int | None = None) -> str:
    """Write facts as JSON that any parser reads; what JSON does not know becomes its text.

    NaN and infinity become the texts `NaN`, `Infinity` and `-Infinity`, which `from_json` reads as
    numbers. Only ASCII, since a path or an argument may hold bytes that are no UTF-8.
    """
    return json.dumps(_to_plain(facts), indent=indent, allow_nan=False)


def from_json(text: str) -> dict[str, Any]:
    """Read facts; anything but a JSON object is a ValueError."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is expected, not {type(found).__name__}")
    is_finite = not any(f'"{name}"' in text for name in _NOT_FINITE)
    return found if is_finite else {key: _to_numbers(value) for key, value in found.items()}


def _to_plain(value: Any) -> Any:
    """Write a value with what JSON has; a number of NumPy or torch is a number."""
    if isinstance(value, np.floating) or getattr(value, "ndim", None) == 0:
        value = _to_number(value)
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _write_not_finite(value)
    if isinstance(value, Mapping):
        return {_to_key(key): _to_plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(one) for one in value]
    return str(value)


def _to_number(value: Any) -> Any:
    if isinstance(value, np.floating):
        return float(value)
    try:
        return value.item()
    except Exception:  # a tensor without data has no number
        return value


def _to_key(key: Any) -> str:
    plain = _to_plain(key)
    # JSON has text alone for keys; these are spelled as json.dumps does.
    return plain if isinstance(plain, str) else json.dumps(plain)


def _write_not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _to_numbers(value: Any) -> Any:
    """Read back what `_to_plain` has written of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _to_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_to_numbers(one) for one in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def write_document(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a JSON file so that a reader sees the old one or the new one."""
    replace_file(path, (to_json(facts, indent=2) + "\n").encode())


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
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
