"""`hookline record`: what it keeps, what it prints, and its exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import hookline
import hookline as hl
from hookline.cli import main

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(approximate=sys.argv[1]), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(12):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
print("done", sys.argv[1:])
"""


def hookline_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run hookline in a process of its own."""
    source = str(Path(hookline.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-m", "hookline", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_script_is_recorded_and_compared(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = hookline_command(tmp_path, "record", "-o", "runs/a", "train.py", "none", "--x")
    assert (done.returncode, done.stdout) == (0, "done ['none', '--x']\n"), done.stderr
    assert done.stderr.startswith("hookline: recorded 10 steps of ")
    assert list(hl.open_run(tmp_path / "runs/a").steps) == list(range(10))
    result = CliRunner().invoke(main, ["diff", *[str(tmp_path / "runs/a")] * 2, "--json"])
    assert result.exit_code == 0
    assert '"same": true' in result.output


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    hl.watch(__import__("torch").nn.Linear(2, 2), tmp_path / "run").close()
    result = CliRunner().invoke(
        main, ["record", "-o", str(tmp_path / "run"), str(tmp_path / "train.py"), "none"]
    )
    assert result.exit_code == 1
    assert "holds a run already" in result.output
    assert "--overwrite" in result.output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["record"], 2, "there is no script to run"),
        (["record", "missing.py"], 1, "missing.py"),
        (["record", "--steps", "-1", "train.py"], 2, "--steps"),
        (["record", "--help"], 0, "keep what its models compute"),
    ],
    ids=str,
)
def test_mistakes_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    result = CliRunner().invoke(main, words)
    assert result.exit_code == code, result.output
    assert message in result.output


@pytest.mark.parametrize("words", [[], ["--overwrite"]])
def test_other_files_are_left_alone(tmp_path: Path, words: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for out in (tmp_path, script):
        result = CliRunner().invoke(main, ["record", *words, "-o", str(out), str(script), "none"])
        assert result.exit_code == 1
        assert "holds other files: `train.py`" in result.output or "is a file" in result.output
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]
    assert script.read_text() == SCRIPT


def test_a_full_disk_is_not_called_a_recording(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    wide = SCRIPT.replace("nn.Linear(8, 2))", "*[nn.Linear(8, 8) for _ in range(60)])")
    (tmp_path / "train.py").write_text(limit + wide)
    done = hookline_command(tmp_path, "record", "-o", "full", "train.py", "none")
    assert (done.returncode, done.stdout) == (0, "done ['none']\n"), done.stderr
    assert "cannot be written" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == "hookline: nothing was kept: no step is in full"
    assert "recorded 0 steps" not in done.stderr


def test_a_pattern_of_tensors_that_names_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--steps", "1", "--tensors", "0.wieght", "--tensors", "2"]
    done = hookline_command(tmp_path, "record", "-o", "a", *words, "train.py", "none")
    assert done.returncode == 0
    assert "no whole tensors are kept of `0.wieght`" in done.stderr
    assert "nearest: `0.weight`" in done.stderr
    assert "kept of `2`" not in done.stderr
    assert len(hl.open_run(tmp_path / "a").steps) == 1
