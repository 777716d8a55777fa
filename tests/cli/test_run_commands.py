"""`hookline run` and `hookline check` as they are typed: options, mistakes, what comes out."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hookline.cli import main
from hookline.cli.run import run_script
from hookline.scripts.running import ScriptRun

SCRIPT = """
import sys

import click
import torch
from torch import nn

torch.manual_seed(0)
batch = torch.randn(32, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def loss_of(output):
    return output.square().mean()


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x):
        return torch.log(self.inner(x) * 0 - 1)


@click.command()
@click.option("--steps", default=5)
def main(steps):
    assert click.get_current_context().parent is None
    print("printed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    print("done", steps)


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand in a folder with a script, and leave the interpreter as it was."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    gc.freeze()  # so that models of other tests are not taken for those of the script
    yield tmp_path
    gc.unfreeze()
    sys.modules.pop("train", None)


Run = Callable[..., Result]


@pytest.fixture
def run(folder: Path) -> Run:
    def run(*args: str) -> Result:
        return CliRunner().invoke(main, list(args), prog_name="hookline")

    return run


def test_script_runs_outside_of_the_command_line(run: Run, folder: Path) -> None:
    done = run("run", "--out", "run", "train.py", "--steps", "3")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "printed\ndone 3\n"
    assert "No findings in 3 steps of 20 sites." in done.stderr
    assert (folder / "run" / "report.html").is_file()


def test_options_reach_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ScriptRun] = []
    monkeypatch.setattr(ScriptRun, "run", lambda self: seen.append(self) or 7)
    done = run(
        "run",
        *("--watch", "0", "--watch", "2", "--every", "5", "--budget", "2.5"),
        *("--on-finding", "raise", "--no-replay", "--rules", "non-finite,spike"),
        "--local-gradients",
        *("--without-rule", "spike", "--fail-on", "warning", "--strict", "-q", "--no-html"),
        *("train.py", "--every", "9", "-m", "x"),
    )
    assert done.exit_code == 7, done.stderr
    (found,) = seen
    options = found.options
    assert (found.launch.target, found.launch.args) == ("train.py", ("--every", "9", "-m", "x"))
    assert (options.sites, options.every, options.budget) == (("0", "2"), 5, 0.025)
    assert (options.rules, options.without) == (("non-finite", "spike"), ("spike",))
    assert options.has_local_gradients
    assert (options.on_finding, options.is_replayed, options.fail_on) == ("raise", False, "warning")
    assert (options.is_strict, options.is_quiet, options.has_page) == (True, True, False)
    assert options.folder is not None
    assert options.folder.parent.name == "runs"


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "package.module", "-m", "x", "--quiet"],
        ["--module=package.module", "-m", "x", "--quiet"],
        ["--every", "3", "-m", "package.module", "-m", "x", "--quiet"],
    ],
)
def test_what_follows_a_module_is_its_own(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    seen: list[ScriptRun] = []
    monkeypatch.setattr(ScriptRun, "run", lambda self: seen.append(self) or 0)
    assert run("run", *words).exit_code == 0
    assert seen[0].launch.target == "package.module"
    assert seen[0].launch.args == ("-m", "x", "--quiet")
    assert not seen[0].options.is_quiet


@pytest.mark.parametrize(
    ("command", "code", "error", "hint"),
    [
        (["run"], 2, "there is no script to run", "name one: `hookline run train.py`"),
        (["run", "tran.py"], 1, "there is no file `tran.py`", "did you mean `train.py`?"),
        (["run", "."], 1, "`.` is a folder", "name a Python file; is it `train.py`?"),
        (["run", "-m", "no.such"], 1, "there is no module `no.such`", "run where it can"),
        (["run", "--every", "0", "train.py"], 2, "Invalid value for '--every'", "`hookline run --"),
        (["run", "--on-finding", "x", "train.py"], 2, "Invalid value for '--on-find", "`hookline"),
        (
            ["run", "--rules", "nonfinite", "train.py"],
            2,
            "there is no rule `nonfinite`. Nearest: `non-finite`",
            "`hookline run --help` shows",
        ),
        (["run", "-"], 2, "a script is read from a file", "name one: `hookline run train.py`"),
        (["check"], 2, "there is no script to run", "name one"),
        (
            ["check", "train.py:model"],
            2,
            "there is no batch to call `train.py:model` with",
            "`hookline check train.py:model --batch train.py:batch`",
        ),
        (
            ["check", "--batch", "train.py:batch", "train.py"],
            2,
            "--batch and --loss belong to a model",
            "name one: `hookline check train.py:model --batch train.py:batch`",
        ),
        (
            ["check", "train.py:modle", "--batch", "train.py:batch"],
            1,
            "`train.py` has no `modle`",
            "did you mean `model`",
        ),
    ],
)
def test_mistakes_get_an_error_and_a_hint(
    run: Run, command: list[str], code: int, error: str, hint: str
) -> None:
    done = run(*command)
    assert done.exit_code == code
    assert f"error: {error}" in done.stderr
    assert f"hint: {hint}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_folder_with_a_run_is_not_overwritten(run: Run, folder: Path) -> None:
    assert run("run", "--no-html", "--out", "run", "train.py").exit_code == 0
    before = sorted((folder / "run").iterdir())
    done = run("run", "--out", "run", "train.py")
    assert done.exit_code == 1
    assert "error: `run` holds a run already, and nothing is overwritten" in done.stderr
    assert sorted((folder / "run").iterdir()) == before


def test_check_stops_a_script_after_its_first_steps(run: Run, folder: Path) -> None:
    done = run("check", "--steps", "4", "train.py", "--steps", "100000")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "No findings in 4 steps of 20 sites.\n"
    assert done.stderr == "printed\n"
    assert sorted(one.name for one in folder.iterdir()) == ["train.py"]
    kept = run("check", "--steps", "4", "--out", "kept", "--json", "train.py")
    assert json.loads(kept.stdout)["findings"] == []
    assert (folder / "kept" / "rank-00000.sqlite").is_file()


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_check_of_a_script_without_a_training_says_so(
    run: Run, folder: Path, words: list[str]
) -> None:
    (folder / "train.py").write_text("import torch\n")
    done = run("check", *words, "train.py")
    assert done.exit_code == 0
    said = json.loads(done.stdout)["verdict"] if words else done.stdout
    assert said.startswith("nothing was watched: no module with trainable parameters was called")


def test_check_of_a_script_that_raises_shows_that(run: Run, folder: Path) -> None:
    (folder / "bad.py").write_text("raise ValueError('no')\n")
    done = run("check", "bad.py")
    assert done.exit_code == 1
    assert "ValueError: no" in done.stderr


@pytest.mark.parametrize("words", [["train.py:model", "--batch", "train.py:batch"]])
def test_check_of_a_model_takes_options_on_both_sides(run: Run, words: list[str]) -> None:
    done = run("check", "--loss", "train.py:loss_of", *words)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("No findings in 1 step of 20 sites.")
    assert "backward from the loss `loss_of`" in done.stdout


def test_check_of_a_broken_model_is_1(run: Run) -> None:
    done = run("check", "train.py:Broken", "--batch", "train.py:batch", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert {"rule", "severity", "site", "step", "value", "threshold", "message", "source"} <= set(
        found["findings"][0]
    )
    assert found["findings"][0]["rule"] == "non-finite"
    calm = run("check", "train.py:Broken", "--batch", "train.py:batch", "--fail-on", "never")
    assert calm.exit_code == 0


def test_help_needs_no_torch() -> None:
    probe = (
        "import sys, hookline.cli\n"
        "for words in (['--help'], ['run', '--help'], ['check', '--help'], ['report', '--help'],\n"
        "              ['show', '--help'], ['ls', '--help'], ['ls'], ['completion', 'bash']):\n"
        "    try: hookline.cli.main(words)\n"
        "    except SystemExit as done: assert done.code == 0, words\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True)


def test_help_says_what_the_exit_codes_are(run: Run) -> None:
    text = run("run", "--help").stdout
    assert "hookline run train.py --lr 3e-4" in text
    assert "torchrun --nproc-per-node 2 -m hookline run train.py" in text
    assert "130  Ctrl-C" in text
    assert run_script.get_short_help_str() in run("--help").stdout
