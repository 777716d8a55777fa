"""One line on the terminal that says how far the training is, and what is worst so far."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

import numpy as np

from hookline.rules import Finding, fold
from hookline.runs import SiteFacts, StepRecord
from hookline.stats.rows import derive

_LEAST_SECONDS = 0.5
_LEAST_WIDTH = 20
_CLEAR = "\r\x1b[K"
"""Go to the beginning of the line, and leave nothing on it."""
_WIDTH = 100
"""How long the line may be where nobody knows how wide the terminal is."""


class ProgressLine:
    """Write the line anew as steps come in; on a file or a pipe, a line now and then."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._pause = _LEAST_SECONDS if self._is_terminal else 20 * _LEAST_SECONDS
        self._shown = 0.0
        self._began: tuple[float, int] | None = None
        self._latest: tuple[StepRecord, Sequence[SiteFacts], Sequence[Finding], float] | None = None

    def show(
        self, record: StepRecord, sites: Sequence[SiteFacts], findings: Sequence[Finding] = ()
    ) -> None:
        """Take a step that ended, and what was found so far."""
        now = time.monotonic()
        if self._began is None:
            self._began = (now, record.step)
        self._latest = record, sites, findings, now
        if now - self._shown >= self._pause:
            self._write(self._describe())
            self._shown = now

    def end(self, closing: str) -> None:
        """Write the last state and leave the line."""
        if self._latest is not None:
            self._write(self._describe() + (f" · {closing}" if closing else ""), is_last=True)
            if self._is_terminal:
                self._put("\n")

    def _describe(self) -> str:
        assert self._latest is not None
        assert self._began is not None
        record, sites, findings, now = self._latest
        elapsed, steps = now - self._began[0], record.step - self._began[1]
        parts = [f"hookline: step {record.step}"]
        if steps and elapsed > 0:
            parts.append(f"{steps / elapsed:.3g} steps/s")
        loss = record.scalars.get("loss")
        if loss is not None:
            parts.append(f"loss {loss:.4g}")
        parts.append(_say_worst(record, sites, findings) or f"{len(sites)} sites")
        return " · ".join(parts)

    def _write(self, text: str, *, is_last: bool = False) -> None:
        if not self._is_terminal:
            self._put(text + "\n")
            return
        room = max(self._measure() - 1, _LEAST_WIDTH)
        if len(text) > room and not is_last:
            text = text[: room - 1] + "…"
        # The cursor goes back to the beginning, where whatever the script prints next begins.
        self._put(_CLEAR + text + ("" if is_last else "\r"))

    def _measure(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(self._stream.fileno()).columns or _WIDTH
        return _WIDTH

    def _put(self, text: str) -> None:
        """Write, unless nobody reads any more: a line is no reason to end anything."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def _say_worst(
    record: StepRecord, sites: Sequence[SiteFacts], findings: Sequence[Finding]
) -> str | None:
    """Name the worst finding so far; without one, the weight that moves most for its size."""
    if findings:
        worst = fold(findings)[0].root
        return f"worst: {worst.site} {worst.rule}".replace("  ", " ")
    blocks = {block.kind: block for block in record.blocks}
    if "updates" not in blocks or "rows" not in blocks:
        return None
    updates, rows = blocks["updates"], blocks["rows"]
    place = np.searchsorted(rows.sites, updates.sites)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = derive(rows.values[place], "l2") / updates.values[:, 2]
    ratios = np.where(np.isfinite(ratios), ratios, -1)
    if not len(ratios) or ratios.max() <= 0:
        return None
    most = int(ratios.argmax())
    address = sites[int(updates.sites[most])].address.removesuffix(":update")
    return f"largest update: {address} {ratios[most]:.2g}"
