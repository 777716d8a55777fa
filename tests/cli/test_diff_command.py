"""`hookline diff`: what it prints, its exit codes, and what it says of bad input."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import hookline as hl
from hookline.cli import main
from hookline.diffs import ranking
from hookline.recordings import record


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a model, its copy, one with a bug, one of another kind."""
    folder = tmp_path_factory.mktemp("diffs")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    broken = copy.deepcopy(model)
    broken[1].approximate = "tanh"
    other = nn.Sequential(nn.Conv1d(3, 5, 3), nn.Tanh())
    x = torch.randn(16, 4)
    for name, one in (("a", model), ("same", copy.deepcopy(model)), ("b", broken)):
        record(one, folder / name, (x,), loss=lambda out: out.square().mean())
    record(other, folder / "other", (torch.randn(2, 3, 9),))
    (folder / "empty").mkdir()
    return folder


Run = Callable[..., Result]


@pytest.fixture
def run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(runs)

    def run(*args: str) -> Result:
        return CliRunner().invoke(main, ["diff", *args], prog_name="hookline")

    return run


def test_same_runs_give_code_0(run: Run) -> None:
    done = run("a", "same")
    assert done.exit_code == 0
    assert done.stdout.startswith("No difference:")


def test_runs_that_differ_give_code_1_and_the_sentence(run: Run) -> None:
    done = run("a", "b")
    assert done.exit_code == 1
    text = " ".join(done.stdout.split())
    assert "1 (GELU)" in text
    assert "approximate='none' here, 'tanh' there" in text


def test_json_has_the_keys_of_the_result(run: Run) -> None:
    done = run("a", "b", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["schema"] == 1
    assert (found["same"], found["first"], found["direction"]) == (False, "1", "forward")
    assert found["introduced"] > found["limit"]
    assert any(pair["verdict"] == "introduces" for pair in found["pairs"])


def test_json_of_the_same_is_json_too(run: Run) -> None:
    done = run("a", "same", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["first"] is None


def test_page_is_written_and_the_sentence_printed(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "new" / "diff.html"
    done = run("a", "b", "--html", str(page))
    assert done.exit_code == 1
    assert "GELU" in page.read_text(encoding="utf-8")
    assert "it introduces" in done.stdout
    assert f"page: {page}" in done.stderr


def test_allow_and_tolerance_widen_limits(run: Run) -> None:
    assert run("a", "b", "--tolerance", "0.5").exit_code == 0
    assert run("a", "b", "--allow", "**=0.5").exit_code == 0
    assert run("a", "b", "--allow", "0=0.5").exit_code == 1


def test_names_say_what_is_called_otherwise(run: Run) -> None:
    assert run("a", "same", "--names", "0=0").exit_code == 0
    done = run("a", "same", "--names", "nowhere=0")
    assert done.exit_code == 2
    assert "nowhere" in done.stderr


@pytest.mark.parametrize(
    "given",
    [
        ("a",),
        ("a", "missing"),
        ("a", "empty"),
        ("missing", "a"),
        ("a", "other"),
        ("a", "same", "--step", "7"),
        ("a", "same", "--allow", "x"),
        ("a", "same", "--allow", "x=much"),
        ("a", "same", "--tolerance", "much"),
        ("a", "same", "--update"),
    ],
)
def test_bad_input_gives_code_2_and_a_sentence(run: Run, given: tuple[str, ...]) -> None:
    done = run(*given)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.output
    assert done.stdout == ""


def test_runs_of_different_models_are_told_so(run: Run) -> None:
    done = run("a", "other")
    assert "`a` and `other` are of different models" in done.stderr


def test_truncated_file_gives_code_2(run: Run, runs: Path, tmp_path: Path) -> None:
    copied = tmp_path / "cut"
    shutil.copytree(runs / "b", copied)
    for path in copied.glob("*.sqlite*"):
        path.write_bytes(path.read_bytes()[:1000])
    done = run("a", str(copied))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.output


def test_baseline_is_kept_until_it_is_updated(run: Run, runs: Path, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline"
    shutil.copytree(runs / "a", baseline)
    done = run("--baseline", str(baseline), "b")
    assert done.exit_code == 1
    assert "hookline diff --baseline --update" in done.stderr
    assert run("--baseline", str(baseline), "a").exit_code == 0
    assert run("--baseline", "--update", str(baseline), "b").exit_code == 0
    assert run("--baseline", str(baseline), "b").exit_code == 0
    assert [one.name for one in tmp_path.iterdir()] == ["baseline"]


def test_update_does_not_touch_a_folder_that_is_no_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = run("--baseline", "--update", str(tmp_path), "b")
    assert done.exit_code == 2
    assert (tmp_path / "mine.txt").read_text() == "mine"
    done = run("--baseline", "--update", str(tmp_path / "new"), "empty")
    assert done.exit_code == 2
    assert not (tmp_path / "new").exists()


def test_page_that_cannot_be_written_gives_code_2(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("a", "b", "--html", str(tmp_path / "file" / "diff.html"))
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr


@pytest.mark.parametrize(
    "given",
    [
        ("a",),
        ("a", "missing"),
        ("a", "other"),
        ("a", "same", "--step", "7"),
        ("a", "same", "--allow", "0=-1"),
        ("a", "same", "--allow", "0=nan"),
        ("a", "same", "--allow", "zero=1"),
        ("a", "same", "--tolerance", "-1"),
        ("a", "same", "--tolerance", "inf"),
        ("a", "same", "--names", "nowhere=0"),
        ("a", "b", "--html", "a"),
    ],
)
def test_bad_input_is_told_in_json_too(run: Run, given: tuple[str, ...]) -> None:
    done = run(*given, "--json")
    assert done.exit_code == 2, done.output
    assert json.loads(done.stdout)["error"] in done.stderr
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "given",
    [("a", "same", "--names", "nowhere=0"), ("a", "same", "--allow", "zero=1")],
)
def test_only_what_is_no_run_is_told_to_be_recorded(run: Run, given: tuple[str, ...]) -> None:
    assert "hookline record" not in run(*given).stderr
    assert "hookline record" in run("a", "missing").stderr


def test_run_that_lacks_steps_or_died_is_no_baseline(runs: Path, run: Run, tmp_path: Path) -> None:
    """Steps that are missing are left out elsewhere; a baseline has promised them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)

    def train(folder: Path, steps: int, *, dies: bool = False) -> None:
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        with hl.record(trained, folder):
            for _ in range(steps):
                optimizer.zero_grad()
                trained(torch.ones(3, 4)).sum().backward()
                optimizer.step()
            if dies:
                raise RuntimeError("out of luck")

    train(tmp_path / "base", 3)
    train(tmp_path / "short", 2)
    with pytest.raises(RuntimeError, match="luck"):
        train(tmp_path / "dead", 3, dies=True)
    base, short, dead = (str(tmp_path / name) for name in ("base", "short", "dead"))
    assert run(base, short).exit_code == 0
    done = run("--baseline", base, short)
    assert done.exit_code == 1
    assert "lacks a step that the baseline has: 2" in done.stderr
    done = run("--baseline", base, dead, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["same"], len(found["lacking"])) == (False, 1)
    assert "did not come to its end: it failed" in done.stderr
    assert run("--baseline", base, base).exit_code == 0


def test_each_run_is_opened_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = ranking.open_trace
    monkeypatch.setattr(
        ranking, "open_trace", lambda *args, **given: opened.append(1) or real(*args, **given)
    )
    assert run("a", "same").exit_code == 0
    assert len(opened) == 2


def test_what_a_recording_says_of_itself_is_printed(run: Run, tmp_path: Path) -> None:
    model = nn.Linear(4, 2).requires_grad_(False)
    for name in ("one", "two"):
        record(model, tmp_path / name, (torch.ones(3, 4),), loss=torch.sum)
    done = run(str(tmp_path / "one"), str(tmp_path / "two"))
    assert done.exit_code == 0
    assert "the loss does not depend on a parameter" in " ".join(done.stdout.split())


def test_record_without_a_script_names_itself() -> None:
    done = CliRunner().invoke(main, ["record"], prog_name="hookline")
    assert done.exit_code == 2
    assert "`hookline record train.py`" in done.stderr
