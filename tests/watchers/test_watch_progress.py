"""The line on the terminal: the loss, what is worst, and no wider than there is room."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest

from hookline.rules import Finding
from hookline.runs import Block, SiteFacts, StepRecord
from hookline.stats.rows import empty_rows
from hookline.watchers.progress import ProgressLine

SITES = [SiteFacts(number, f"{name}.weight:update", "update") for number, name in enumerate("ab")]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


def record(*ratios: float) -> StepRecord:
    """Make a step in which weights of norm 1 changed by so much."""
    rows = empty_rows(len(ratios))
    rows[:, 0] = 1
    rows[:, 4] = rows[:, 5] = rows[:, 6] = ratios
    sites = np.arange(len(ratios), dtype=np.int32)
    updates = np.tile([1.0, 0.0, 1.0], (len(ratios), 1))
    blocks = [Block("rows", sites, rows), Block("updates", sites, updates)]
    return StepRecord(7, 0.0, 0.1, {"loss": 0.25}, blocks if ratios else [])


def find(severity: str, rule: str, site: str) -> Finding:
    return Finding(rule, severity, site, 3, None, None, "something.")


def show(step: StepRecord, *findings: Finding, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the line as it stands on a terminal of some width."""
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((width, 24)))
    stream = Screen()
    ProgressLine(stream).show(step, SITES, findings)
    written = stream.getvalue()
    assert written.startswith("\r\x1b[K"), "what stood there is not cleared"
    assert written.endswith("\r"), "the next print begins behind the line"
    return written[4:-1]


def test_the_weight_that_moves_most_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    line = show(record(0.001, 0.25), width=80, monkeypatch=monkeypatch)
    assert line == "hookline: step 7 · loss 0.25 · largest update: b.weight 0.25"


def test_the_worst_finding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [find("info", "spike", "a"), find("error", "non-finite", "blocks.5.attn/softmax")]
    line = show(record(0.1), *findings, width=80, monkeypatch=monkeypatch)
    assert line == "hookline: step 7 · loss 0.25 · worst: blocks.5.attn/softmax non-finite"


def test_a_finding_of_the_whole_training_has_no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    line = show(record(), find("error", "exploding", ""), width=80, monkeypatch=monkeypatch)
    assert line.endswith("worst: exploding")


@pytest.mark.parametrize("ratio", [0.0, np.nan, np.inf])
def test_updates_that_say_nothing_are_not_named(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = show(record(ratio), width=80, monkeypatch=monkeypatch)
    assert line == "hookline: step 7 · loss 0.25 · 2 sites"


def test_the_line_is_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    line = show(record(), find("error", "rule", "x" * 100), width=60, monkeypatch=monkeypatch)
    assert len(line) == 59
    assert line.endswith("xx…")


def test_the_last_line_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Screen()
    line = ProgressLine(stream)
    line.show(record(), SITES)
    line.end("cheap")
    assert stream.getvalue().endswith("2 sites · cheap\n")
