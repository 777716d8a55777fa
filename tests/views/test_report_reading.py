"""What a report says of a run, before it has any form."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from reported_runs import NAN, SPIKE, write_broken, write_run

from hookline.runs import RunWriter, open_run
from hookline.views import read_report
from hookline.views.extremes import find_extremes
from hookline.views.snippets import find_snippet


def test_report_of_a_broken_run_puts_the_cause_first(tmp_path: Path) -> None:
    report = read_report(write_broken(tmp_path))
    assert report.verdict.startswith("blocks.1.attn/softmax made the first NaN at step 7")
    assert report.severity == "error"
    assert [group.root.rule for group in report.groups] == ["non-finite", "spike"]
    assert [one.rule for one in report.groups[0].follows] == ["lost-updates"]


def test_report_of_a_healthy_run_says_so(tmp_path: Path) -> None:
    report = read_report(write_run(tmp_path))
    assert report.verdict == "No findings in 10 steps of 25 sites."
    assert report.severity == ""


def test_report_as_json_has_the_fields_that_programs_read(tmp_path: Path) -> None:
    facts = json.loads(json.dumps(read_report(write_broken(tmp_path)).to_dict()))
    assert set(facts) == {"verdict", "findings", "run", "cost", "notes"}
    wanted = {"rule", "severity", "site", "step", "value", "threshold", "message", "source"}
    assert all(wanted <= set(finding) for finding in facts["findings"])
    assert facts["run"] == {
        "path": str(tmp_path),
        "status": "finished",
        "first_step": 0,
        "last_step": 9,
        "steps": 10,
        "sites": 25,
        "ranks": 1,
    }
    assert facts["cost"]["watched"] == 10


def test_what_several_ranks_found_is_said_once(tmp_path: Path) -> None:
    for rank in range(2):
        seen = dataclasses.replace(NAN, rank=rank)
        write_run(tmp_path, findings=[seen, SPIKE] if rank else [seen], rank=rank, world=2)
    report = read_report(open_run(tmp_path))
    assert [one.rule for one in report.findings] == ["non-finite", "spike"]
    assert report.findings[0].evidence[-1] == "seen by ranks 0, 1"
    assert "statistics are of all 2 ranks together" in report.notes


def test_ranks_that_disagree_are_found_in_the_report(tmp_path: Path) -> None:
    write_run(tmp_path, rank=0, world=2)
    write_run(tmp_path, scale=lambda step: 1 if step < 4 else 2, rank=1, world=2)
    report = read_report(open_run(tmp_path))
    assert [(one.rule, one.step) for one in report.findings] == [("rank-disagreement", 4)]


def test_a_run_that_no_rule_has_seen_is_judged_now(tmp_path: Path) -> None:
    run = write_run(tmp_path, bad=lambda step: (2, 3, 4) if step >= 7 else ())
    assert read_report(run).findings == ()
    with RunWriter(tmp_path, resume=True) as writer:
        writer.describe("watch", {"rules": False})
    report = read_report(run)
    assert report.findings[0].rule == "non-finite"
    assert (report.findings[0].site, report.findings[0].step) == ("blocks.1.attn", 7)
    assert any("no rules ran" in note for note in report.notes)


def test_a_run_without_steps_has_a_report(tmp_path: Path) -> None:
    report = read_report(write_run(tmp_path, steps=0))
    assert report.run["first_step"] is None
    assert report.verdict == "No findings in 0 steps of 25 sites."


def test_extremes_name_site_step_and_value(tmp_path: Path) -> None:
    table = list(find_extremes(write_run(tmp_path)))
    assert table[0] == {
        "": "largest value",
        "site": "head:output",
        "step": 9,
        "value": pytest.approx(2 * 2 * 1.09, rel=1e-5),
    }
    assert [row[""] for row in table] == [
        "largest value",
        "most zeros",
        "largest gradient",
        "largest weight",
        "largest update/weight",
    ]


def test_snippet_shows_the_lines_around_the_source(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    snippet = find_snippet(run, NAN)
    assert snippet is not None
    assert snippet["lines"][snippet["line"] - snippet["first"]] == "    return scores.softmax(-1)"


def test_snippet_of_another_file_is_the_line_that_the_finding_holds(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    other = dataclasses.replace(NAN, source="train.py:3", more={"line": "loss.log()"})
    assert find_snippet(run, other) == {"first": 3, "line": 3, "lines": ["loss.log()"]}
    assert find_snippet(run, dataclasses.replace(NAN, source="train.py:3", more={})) is None
    assert find_snippet(run, dataclasses.replace(NAN, source="")) is None


def test_notes_of_the_watch_are_in_the_report(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with RunWriter(tmp_path, resume=True) as writer:
        writer.describe("notes", {"notes": ["`head`: a sparse tensor was not measured"]})
    assert read_report(run).notes == ("`head`: a sparse tensor was not measured",)
