"""`hookline report`, `show`, `ls` and `completion`: what they print of runs on disk."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from torch import nn

import hookline as hl
from hookline.cli import main
from hookline.cli.sparklines import draw


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a healthy run and a newer one with NaN in it."""
    folder = tmp_path_factory.mktemp("place")
    for name, bad in (("healthy", None), ("broken", 3)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with hl.watch(model, folder / "runs" / name):
            for step in range(30):
                x = torch.randn(16, 4)
                if step == bad:
                    x[0, 0] = float("nan")
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        for path in (folder / "runs" / name).glob("*.sqlite*"):
            os.utime(path, (1e9 + (bad or 0), 1e9 + (bad or 0)))
    return folder


Run = Callable[..., Result]


@pytest.fixture
def run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(runs)

    def run(*args: str) -> Result:
        return CliRunner().invoke(main, list(args), prog_name="hookline")

    return run


def test_report_says_the_verdict_first(run: Run) -> None:
    done = run("report", "runs/healthy")
    assert done.exit_code == 0
    assert done.stdout.startswith("No findings in 30 steps of 20 sites.")


def test_report_without_a_name_is_of_the_newest(run: Run) -> None:
    done = run("report", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert found["run"]["path"].endswith("broken")
    assert found["findings"][0]["rule"] == "non-finite"
    assert found["findings"][0]["step"] == 3
    assert run("report", "--fail-on", "error").exit_code == 1
    assert run("report", "runs/healthy", "--fail-on", "warning").exit_code == 0


def test_report_writes_a_page(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    done = run("report", "runs/broken", "--html", str(page))
    assert done.exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert done.stderr == f"page: {page}\n"
    (tmp_path / "file").touch()
    done = run("report", "runs/broken", "--html", str(tmp_path / "file" / "page.html"))
    assert done.exit_code == 1
    assert "cannot be written" in done.stderr
    done = run("report", "runs/broken", "--html", "/proc/page.html")
    error = "error: `/proc/page.html` cannot be written: No such file or directory"
    assert done.stderr.splitlines() == [error]


@pytest.mark.parametrize(
    ("command", "error", "hint"),
    [
        (["report", "runs/helthy"], "`runs/helthy` is not there. Runs near it: ", "`hookline ls`"),
        (["show", "runs/healthy"], "there is no site to show", "name one: `hookline show RUN"),
        (["show", "runs/healthy", "9"], "`9` matches no site", "`hookline show runs/healthy '**'`"),
        (["show", "runs/healthy", "0", "--stat", "rmss"], "`rmss` is no statistic", "`hookline sh"),
        (["show", "runs/healthy", "0", "--rank", "7"], "there is no rank 7", "`hookline show"),
        (["ls", "nowhere"], "there is no folder `nowhere`", "`hookline ls` lists"),
    ],
)
def test_mistakes_of_readers_get_a_hint(
    run: Run, command: list[str], error: str, hint: str
) -> None:
    done = run(*command)
    assert done.exit_code in (1, 2)
    assert f"error: {error}" in done.stderr
    assert f"hint: {hint}" in done.stderr
    assert "Traceback" not in done.stderr


def test_show_gives_facts_findings_and_numbers(run: Run, runs: Path) -> None:
    done = run("show", "runs/broken", "0", "--stat", "rms", "--stat", "nan")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "0:output  Linear  value  16x8  float32"
    assert any("non-finite" in line for line in lines)
    assert any(line.startswith("nan") for line in lines)
    assert "20 of 30 steps; all of them with --json" in lines
    found = json.loads(run("show", "runs/broken", "0", "--stat", "rms", "--json").stdout)
    series = hl.open_run(runs / "runs" / "broken").series("0", "rms")
    assert found["steps"] == list(range(30))
    assert found["stats"]["rms"][0] == series.values[0]
    assert found["site"]["shape"] == [16, 8]


def test_show_of_a_pattern_is_a_list(run: Run) -> None:
    done = run("show", "runs/healthy", "*:output.grad")
    lines = done.stdout.splitlines()
    assert lines[0] == "rms of 3 sites over 30 steps"
    assert [line.split()[0] for line in lines[3:]] == [
        "2:output.grad",
        "1:output.grad",
        "0:output.grad",
    ]
    found = json.loads(run("show", "runs/healthy", "*.weight:update", "--json").stdout)
    assert [site["address"] for site in found["sites"]] == ["0.weight:update", "2.weight:update"]
    assert "of 20 sites" in run("show", "**").stdout


def test_show_takes_the_newest_run(run: Run) -> None:
    done = run("show", "0.weight:update", "--stat", "ratio")
    assert done.stdout.startswith("0.weight:update  Linear  update")


def test_show_takes_numbers_of_the_steps_too(run: Run) -> None:
    done = run("show", "runs/healthy", "loss")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("loss  ")
    assert "20 of 30 steps; all of them with --json" in done.stdout
    found = json.loads(run("show", "runs/healthy", "lr", "--json").stdout)
    assert (found["scalar"], found["values"]) == ("lr", [0.01] * 30)
    assert run("show", "runs/healthy", "loss", "--stat", "rms").exit_code == 1


def test_ls_tells_how_runs_stand(run: Run) -> None:
    lines = run("ls").stdout.splitlines()
    assert lines[0].split() == ["path", "status", "steps", "findings", "when", "command"]
    assert [line.split()[0] for line in lines[2:]] == ["runs/broken", "runs/healthy"]
    rows = json.loads(run("ls", "--json").stdout)
    assert [(row["status"], row["steps"], row["errors"] > 0) for row in rows] == [
        ("finished", 30, True),
        ("finished", 30, False),
    ]
    assert json.loads(run("ls", "--json", "runs/healthy").stdout)[0]["path"] == "runs/healthy"


def test_ls_where_there_is_nothing(run: Run, tmp_path: Path) -> None:
    done = run("ls", str(tmp_path))
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no runs below" in done.stderr


def test_newer_run_is_refused_and_listed(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    with hl.watch(model, tmp_path / "new"):
        model(torch.ones(1, 2)).sum().backward()
    with sqlite3.connect(tmp_path / "new" / "rank-00000.sqlite") as database:
        database.execute("PRAGMA user_version=99")
    database.close()
    done = run("report", str(tmp_path / "new"))
    assert done.exit_code == 1
    assert "was written by a newer hookline" in done.stderr
    assert "Upgrade it" in done.stderr
    assert json.loads(run("ls", "--json", str(tmp_path)).stdout)[0]["status"] == "newer"


def test_damaged_run_is_no_obstacle(run: Run, tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "rank-00000.sqlite").write_bytes(b"not a database at all" * 100)
    assert run("ls", str(tmp_path)).exit_code == 0
    assert "Traceback" not in run("report", str(tmp_path / "damaged")).stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_line_to_source(run: Run, shell: str) -> None:
    done = run("completion", shell)
    assert f"_HOOKLINE_COMPLETE={shell}_source hookline" in done.stdout
    assert done.stdout.count("\n") == 1


def test_runs_and_sites_are_completed(run: Run) -> None:
    def complete(args: list[str], incomplete: str) -> list[str]:
        shell = ShellComplete(main, {}, "hookline", "_HOOKLINE_COMPLETE")
        return [item.value for item in shell.get_completions(args, incomplete)]

    assert complete(["report"], "") == ["runs/broken", "runs/healthy"]
    assert complete(["show"], "runs/h") == ["runs/healthy"]
    assert complete(["show", "runs/healthy"], "0.w") == [
        "0.weight",
        "0.weight:grad",
        "0.weight:update",
    ]
    assert "report" in complete([], "re")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▅"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "▁▂▃▄▅▆▇█"),
        ([1.0, float("nan"), float("inf"), 2.0], "▁ !█"),
        ([1e-6, 1e-3, 1.0], "▁▅█"),
        ([float("nan")] * 3, "   "),
    ],
)
def test_sparkline_is_drawn_by_size(values: list[float], line: str) -> None:
    assert draw(values, 40) == line


def test_sparkline_keeps_what_is_not_finite_in_many_steps() -> None:
    values = [1.0] * 500
    values[300] = float("inf")
    line = draw(values, 40)
    assert len(line) == 40
    assert line.count("!") == 1


def test_line_of_zeros_lies_on_the_ground_and_one_of_a_constant_above_it() -> None:
    assert draw([0.0, 0.0, 0.0], 3) == "▁▁▁"
    assert draw([2.0, 2.0], 2) == "▅▅"
    assert draw([0.0, float("inf"), 8.0], 3) == "▁!█"
