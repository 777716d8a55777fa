"""What an extraction shows of itself: a bar on a terminal, lines in a log, else nothing."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from extracted_models import Layers, numbered

import hookline as hl
from hookline.extractions import showing as module


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Have the standard error be a terminal."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("RANK", raising=False)
    return found


def extract(out: Path, **options: Any) -> None:
    """Extract a few samples."""
    hl.extract(Layers(), numbered(20), "first", out, **options)


def test_a_bar_is_on_a_terminal_and_nothing_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(tmp_path / "pipe")
    assert capsys.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    extract(tmp_path / "terminal")
    assert "20/20" in terminal.getvalue()
    assert "640 B" in terminal.getvalue()


@pytest.mark.parametrize(
    "options",
    [{"progress": False}, {"dry_run": True}, {"on_progress": lambda _: None}],
    ids=["not asked for", "dry run", "callback"],
)
def test_no_bar_is_where_none_is_wanted(
    tmp_path: Path, terminal: Terminal, options: dict[str, Any]
) -> None:
    extract(tmp_path / "out", **options)
    assert terminal.getvalue() == ""


def test_ranks_but_the_first_leave_the_terminal_alone(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    extract(tmp_path / "out", progress=True)
    assert terminal.getvalue() == ""


def test_who_asks_is_told_beside_the_lines_of_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EVERY", 0.0)
    told: list[int] = []
    extract(
        tmp_path / "out", progress=True, on_progress=lambda advance: told.append(advance.samples)
    )
    assert told[-1] == 20
    assert "20 of 20 samples, " in capsys.readouterr().err
