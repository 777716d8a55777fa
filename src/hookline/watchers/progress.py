"""One line on the terminal that says how far the training is."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TextIO

from hookline.runs import StepRecord

_LEAST_SECONDS = 0.5


class ProgressLine:
    """Write the line anew as steps come in; on a file or a pipe, a line now and then."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._pause = _LEAST_SECONDS if self._is_terminal else 20 * _LEAST_SECONDS
        self._shown = 0.0
        self._began: tuple[float, int] | None = None
        self._latest: str | None = None
        self._width = 0

    def show(self, record: StepRecord, sites: int) -> None:
        """Take a step that ended."""
        now = time.monotonic()
        if self._began is None:
            self._began = (now, record.step)
        elapsed, steps = now - self._began[0], record.step - self._began[1]
        rate = f" · {steps / elapsed:.3g} steps/s" if steps and elapsed > 0 else ""
        loss = record.scalars.get("loss")
        known = f" · loss {loss:.4g}" if loss is not None else ""
        self._latest = f"hookline: step {record.step}{rate}{known} · {sites} sites"
        if now - self._shown >= self._pause:
            self._write()
            self._shown = now

    def end(self, closing: str) -> None:
        """Write the last state and leave the line."""
        if self._latest is not None:
            self._latest += f" · {closing}" if closing else ""
            self._write()
            if self._is_terminal:
                self._put("\n")

    def _write(self) -> None:
        assert self._latest is not None
        if self._is_terminal:
            self._put("\r" + self._latest.ljust(self._width))
            self._width = len(self._latest)
        else:
            self._put(self._latest + "\n")

    def _put(self, text: str) -> None:
        """Write, unless nobody reads any more: a line is no reason to end anything."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
