"""The lines of code around the one that a finding names."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from hookline._errors import NotRecorded
from hookline.rules import Finding
from hookline.runs import Run

_AROUND = 4


def find_snippet(run: Run, finding: Finding) -> dict[str, Any] | None:
    """Give the lines around a finding's source, as far as the run holds them.

    A run holds the forwards of the model. Of any other place a finding may hold the line itself.
    """
    file, _, number = finding.source.rpartition(":")
    if not file or not number.isdecimal():
        return None
    line = int(number)
    for where, code in _read_sources(run).items():
        first, lines = code.get("first_line"), code.get("lines")
        if not isinstance(first, int) or not isinstance(lines, list):
            continue
        own = where.rpartition(":")[0]
        if _is_same_file(own, file) and first <= line < first + len(lines):
            start = max(0, line - first - _AROUND)
            end = line - first + _AROUND + 1
            return {"first": first + start, "line": line, "lines": lines[start:end]}
    text = finding.more.get("line")
    return (
        {"first": line, "line": line, "lines": [text]} if isinstance(text, str) and text else None
    )


def _is_same_file(one: str, other: str) -> bool:
    """Compare paths that may be shortened at the front."""
    ours, theirs = PurePath(one).parts, PurePath(other).parts
    common = min(len(ours), len(theirs))
    return ours[-common:] == theirs[-common:]


def _read_sources(run: Run) -> dict[str, Any]:
    try:
        return run.document("sources")
    except NotRecorded:
        return {}
