"""What hookline says while a script runs: on stderr, and never in the way of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookline.rules import Finding


def say(text: str, *, is_under_line: bool = False) -> None:
    """Write lines to stderr; one that nobody reads any more is no reason to end anything."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # A progress line may stand there: what is written next goes over it.
        clear = "\r\x1b[K" if is_under_line and sys.stderr.isatty() else ""
        sys.stderr.write(f"{clear}{text}\n")
        sys.stderr.flush()


def describe_finding(finding: Finding) -> str:
    """Write a finding as one line."""
    message = " ".join(finding.message.split())
    source = f" ({finding.source})" if finding.source and finding.source not in message else ""
    return f"hookline: {finding.severity}: {finding.rule}: {message}{source}"


class Announcer:
    """Say each finding once, the moment it is there."""

    def __init__(self, *, is_quiet: bool, is_under_line: bool) -> None:
        self._is_quiet = is_quiet
        self._is_under_line = is_under_line
        self._said: set[int] = set()

    def take(self, finding: Finding) -> None:
        """Say a finding, unless it was said."""
        if id(finding) not in self._said and not self._is_quiet:
            say(describe_finding(finding), is_under_line=self._is_under_line)
        self._said.add(id(finding))

    def look(self, findings: Iterable[Finding]) -> None:
        """Say those that were not said yet; whoever asks keeps them."""
        for finding in findings:
            self.take(finding)
