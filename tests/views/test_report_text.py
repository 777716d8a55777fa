"""The report as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reported_runs import EVIL, NAN, SPIKE, write_broken, write_run

from hookline.rules import Finding
from hookline.views import format_findings, format_report


def test_text_begins_with_the_verdict_and_fits_eighty_columns(tmp_path: Path) -> None:
    lines = format_report(write_broken(tmp_path / "run"), width=80).splitlines()
    assert lines[0].startswith("blocks.1.attn/softmax made the first NaN at step 7")
    long = [line for line in lines if len(line) > 80 and str(tmp_path) not in line]
    assert long == []


def test_text_of_a_finding_has_all_its_parts(tmp_path: Path) -> None:
    text = format_report(write_broken(tmp_path), width=100)
    assert "1 error, 1 warning, 1 info" in text
    assert "error   non-finite  blocks.1.attn/softmax  step 7  +2 sites" in text
    for part in ("  - 3 of 32 elements are NaN", "  try: Look at rows", "  at   model.py:12"):
        assert part in text
    assert "  then lost-updates at head.weight:update, step 8" in text
    assert text.index("non-finite") < text.index("lost-updates") < text.index("info    spike")
    assert "cost  watched 10 of 10 steps; the run took 1.02x as long" in text


def test_text_says_the_verdict_once(tmp_path: Path) -> None:
    text = format_report(write_run(tmp_path, findings=[NAN]), width=100)
    assert text.count("made the first NaN at step 7") == 1


def test_text_names_a_run_from_the_current_folder_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_broken(tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    assert "run   runs/a (" in format_report(run, width=100)
    monkeypatch.chdir(tmp_path / "runs" / "a")
    assert "run   . (" in format_report(run, width=100)
    monkeypatch.chdir(Path(tmp_path.anchor))
    assert f"run   {str(tmp_path).lstrip('/')}/runs/a" in format_report(run, width=100)


def test_text_without_colour_is_plain(tmp_path: Path) -> None:
    text = format_report(write_broken(tmp_path), width=80)
    assert "\x1b" not in text
    assert not re.search("[─│┌┐└┘━┃]", text)


def test_colour_changes_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    run = write_broken(tmp_path)
    coloured = format_report(run, width=80, color=True)
    assert "\x1b[1;31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == format_report(run, width=80)


def test_no_color_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in format_report(write_run(tmp_path), color=True)


def test_text_without_rich_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("hookline.views.lines.find_spec", lambda name: None)
    assert "\x1b" not in format_findings([NAN], color=True)


def test_findings_alone_are_folded_and_none_is_nothing() -> None:
    assert format_findings([]) == ""
    text = format_findings([SPIKE, NAN], width=90)
    assert text.startswith("error   non-finite")
    assert "\n\ninfo    spike" in text


def test_escape_sequences_of_a_name_do_not_reach_the_terminal() -> None:
    name = f"\x1b[31m{EVIL}\nnext"
    evil = Finding("spike", "info", name, 0, None, None, name, source=f"{name}:1")
    text = format_findings([evil])
    assert "\x1b" not in text
    assert len(text.splitlines()) == 3


def test_long_names_are_not_broken() -> None:
    site = "model." + ".".join(f"layers{number}" for number in range(20))
    text = format_findings([Finding("spike", "info", site, 0, None, None, "words")], width=80)
    assert f"  {site}" in text.splitlines()
