"""`hookline extract` as it is typed: options, files of options, mistakes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from made_data import enter_folder

import hookline
import hookline as hl
from hookline.cli import main
from hookline.cli.extract_options import read_config, read_engine
from hookline.cli.failing import Misused

CODE = """
import time

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1 = nn.Linear(4, 3)
        self.fc2 = nn.Linear(3, 2)

    def forward(self, x):
        if (x[:, 0] == 13).any():
            raise ValueError("an unlucky one")
        return self.fc2(self.fc1(x))


class Slow(Net):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)


make, slow = Net, Slow
rows = torch.arange(48).view(12, 4) + 100.0
many = torch.arange(800).view(200, 4) + 1000.0
unlucky = rows.clone()
unlucky[7, 0] = 13


def double(row):
    return row * 2


def largest(value, mask):
    return value.amax(1, keepdim=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a model and data."""
    return enter_folder(tmp_path, monkeypatch, CODE)


def run(*words: str) -> Result:
    """Run `hookline extract`."""
    return CliRunner().invoke(main, ["extract", *words])


BASIC = ["--model", "net.py:make", "--data", "net.py:rows", "--site", "fc1", "-o", "out"]


def test_the_result_is_printed_and_the_store_written(folder: Path) -> None:
    result = run(*BASIC)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("12 samples, 144 B, ")
    assert result.stdout.endswith(" samples/s: out\n")
    assert result.stderr == ""
    store = hl.open_store(folder / "out")
    assert list(store.columns) == ["fc1:output"]
    assert store["fc1"][:].shape == (12, 3)
    again = run(*BASIC)
    assert (again.exit_code, "12 were there before" in again.stdout) == (0, True)


def test_flags_say_what_the_options_of_the_function_say(folder: Path) -> None:
    words = ["--site", "fc*", "--reduce", "net.py:largest", "--prepare", "net.py:double"]
    words += ["--batch-size", "5", "--limit", "9", "--dtype", "float16", "--deterministic"]
    result = run(*BASIC, *words)
    assert result.exit_code == 0, result.output
    store = hl.open_store(folder / "out")
    assert sorted(store.columns) == ["fc1:output", "fc2:output"]
    assert store["fc2"][:].shape == (9, 1)
    assert store["fc2"].column.dtype == torch.float16
    assert store.facts["prepare"] == "net:double"
    assert store.facts["deterministic"] is True
    refused = run(*BASIC, *words[:-1])
    assert refused.exit_code == 1
    assert "holds another extraction (deterministic: True there, False now)" in refused.stderr
    assert run(*BASIC, "--overwrite").exit_code == 0


FILES = {
    "a.toml": """
        model = "net.py:make"
        data = "net.py:rows"
        out = "out"
        batch-size = 3
        [sites]
        fc1 = "net.py:largest"
        fc2 = ""
    """,
    "a.json": json.dumps(
        {
            "model": "net.py:make",
            "data": "net.py:rows",
            "out": "out",
            "batch_size": 3,
            "sites": {"fc1": "net.py:largest", "fc2": None},
        }
    ),
    "a.yaml": "model: net.py:make\ndata: net.py:rows\nout: out\nbatch_size: 3\n"
    "sites:\n  fc1: net.py:largest\n  fc2:\n",
}


@pytest.mark.parametrize("name", list(FILES))
def test_options_come_from_a_file(folder: Path, name: str) -> None:
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    (folder / name).write_text(FILES[name])
    result = run(name)
    assert result.exit_code == 0, result.output
    store = hl.open_store(folder / "out")
    assert store["fc1"][:].shape == (12, 1)
    assert store["fc2"][:].shape == (12, 2)
    other = run(name, "-o", "other", "--site", "fc2", "--limit", "2")  # flags count more
    assert other.exit_code == 0, other.output
    assert list(hl.open_store(folder / "other").columns) == ["fc2:output"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limt = 3", "has an unknown `limt`\nhint: did you mean `limit`? known are model, "),
        ("limit = 0", "`limit` in `a.toml` is a whole number from 1 on, not 0"),
        ("limit = true", "a whole number from 1 on, not True"),
        ('batch_size = "8"', "`batch_size` in `a.toml` is a whole number from 1 on, not '8'"),
        ("model = 3", "`model` in `a.toml` is a text, not 3"),
        ('on_error = "ignore"', "is stop or skip, not 'ignore'"),
        ('engine = "spark"', "is local or ray, not 'spark'"),
        ('overwrite = "no"', "is true or false, not 'no'"),
        ("sites = []", "is a text, a list of texts, or a table"),
        ("reduce = 1.5", "is a text or a whole number, not 1.5"),
        ("gpus = -1", "is a number, not -1"),
        ("[[", "`a.toml` cannot be understood"),
    ],
)
def test_mistakes_in_a_file_are_explained(folder: Path, text: str, message: str) -> None:
    (folder / "a.toml").write_text(text)
    result = run("a.toml", *BASIC)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "there is no --model\nhint: `hookline extract --help` has examples"),
        (BASIC[:2], 2, "there is no --data"),
        (BASIC[:4], 2, "there is no --site"),
        (BASIC[:6], 2, "there is no --out"),
        ([*BASIC, "--limit", "0"], 2, "--limit"),
        ([*BASIC, "--dtype", "float33"], 2, "there is no dtype `float33`\nhint: such as"),
        ([*BASIC, "--engine", "ray", "--actors", "4:2"], 2, "as in '4:64', not '4:2'"),
        ([*BASIC, "--engine", "ray", "--actors", "0"], 2, "--actors is a whole number from 1 on"),
        ([*BASIC, "--actors", "2"], 2, "--actors belongs to Ray\nhint: say `--engine ray` too"),
        ([*BASIC, "--prepare", "net.py:double", "--tokenizer", "x"], 2, "give one of them"),
        ([*BASIC, "--reduce", "middle"], 1, "'middle' is no way to reduce a value"),
        ([*BASIC, "--site", "fc11"], 1, "hint: `hookline sites net.py:make` lists"),
        (["missing.toml"], 1, "`missing.toml` cannot be read"),
        (["net.py"], 2, "ends neither in .toml, .json nor .yaml"),
        (["--model", "net.py:mkae", *BASIC[2:]], 1, "did you mean `make`"),
        ([*BASIC[:2], "--data", "rows.jsnl", *BASIC[4:]], 1, "`rows.jsnl` does not exist"),
        (["--help"], 0, "exit codes:"),
    ],
    ids=lambda one: " ".join(one)[-40:] if isinstance(one, list) else None,
)
def test_mistakes_are_explained(folder: Path, words: list[str], code: int, message: str) -> None:
    result = run(*words)
    assert result.exit_code == code, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("actors", "pool"), [(3, (3, 3)), ("3", (3, 3)), ("4:64", (4, 64)), (None, (1, 1))], ids=repr
)
def test_actors_are_a_number_or_the_fewest_and_the_most(actors: Any, pool: tuple[int, int]) -> None:
    assert read_engine({"engine": "ray", "actors": actors}).pool == pool


@pytest.mark.parametrize("value", ["3", "'4:64'"])
def test_a_file_of_options_says_how_many_actors(tmp_path: Path, value: str) -> None:
    (tmp_path / "options.toml").write_text(f"actors = {value}\n")
    assert str(read_config(tmp_path / "options.toml")["actors"]) == value.strip("'")
    for wrong in ("true", "0", "'4:'", "'a'"):
        (tmp_path / "options.toml").write_text(f"actors = {wrong}\n")
        with pytest.raises(Misused, match="the fewest and the most"):
            read_config(tmp_path / "options.toml")


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    before = sorted(folder.iterdir())
    result = run(*BASIC, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "fc1:output: 12 B a sample" in result.stdout
    assert "12 samples to do, 144 B to write" in result.stdout
    assert [one for one in sorted(folder.iterdir()) if one.name != "__pycache__"] == before


def test_a_dry_run_of_lines_knows_how_many_there_are(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("[1.0, 2.0, 3.0, 4.0]\n" * 500)
    words = ["--model", "net.py:make", "--data", "rows.jsonl", "--site", "fc1", "-o", "out"]
    result = run(*words, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "500 samples to do, 5.86 KiB to write" in result.stdout


def test_skipped_samples_are_named(folder: Path) -> None:
    words = ["--model", "net.py:make", "--data", "net.py:unlucky", "--site", "fc1", "-o", "out"]
    stopped = run(*words)
    assert stopped.exit_code == 1
    assert "error: sample 7 cannot go through the model: ValueError: an unlucky" in stopped.stderr
    skipped = run(*words, "--on-error", "skip")
    assert skipped.exit_code == 1
    assert "; 1 skipped: out" in skipped.stdout
    assert skipped.stderr == "  skipped sample 7: ValueError: an unlucky one\n"
    assert hl.open_store(folder / "out").ids.tolist() == [*range(7), *range(8, 12)]


def test_a_rank_that_skips_does_not_stop_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["--model", "net.py:make", "--data", "net.py:unlucky", "--site", "fc1", "-o", "out"]
    codes = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        codes.append(run(*words, "--on-error", "skip").exit_code)
    assert codes == [0, 0]
    assert len(hl.open_store(folder / "out")) == 11
    # Both ranks know it, and so does who verifies.
    assert hl.open_store(folder / "out").failed == {7: "ValueError: an unlucky one"}
    told = CliRunner().invoke(main, ["verify", "out"])
    assert told.exit_code == 0, told.output
    assert told.stdout.endswith(
        "1 sample skipped by the extraction:\n  7: ValueError: an unlucky one\n"
    )
    as_json = CliRunner().invoke(main, ["verify", "out", "--json"])
    assert json.loads(as_json.stdout)["skipped"] == {"7": "ValueError: an unlucky one"}


def test_ctrl_c_keeps_what_was_done(folder: Path) -> None:
    words = ["--model", "net.py:slow", "--data", "net.py:many", "--site", "fc1", "-o", "out"]
    words += ["--batch-size", "4"]
    command = [sys.executable, "-m", "hookline", "extract", *words]
    source = str(Path(hookline.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stderr=subprocess.PIPE
    )
    end = time.monotonic() + 60
    while not (folder / "out" / "store.json").exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130, told
    assert told == "stopped: what was done is kept in out; the same command goes on\n"
    kept = len(hl.open_store(folder / "out"))
    assert 8 <= kept < 200
    done = run(*words[:-2])
    assert done.exit_code == 0, done.output
    assert f"{200 - kept} samples, " in done.stdout
    assert f"{kept} were there before" in done.stdout
    assert hl.open_store(folder / "out").ids.tolist() == list(range(200))


@pytest.mark.slow
def test_ray_does_the_same_without_a_word(folder: Path) -> None:
    pytest.importorskip("ray")
    words = [*BASIC, "--prepare", "net.py:double", "--deterministic", "--quiet"]
    plain = run(*words)
    assert plain.exit_code == 0, plain.output
    source = str(Path(hookline.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    words[words.index("-o") + 1] = "ray"
    done = subprocess.run(
        [sys.executable, "-m", "hookline", "extract", *words, "--engine", "ray"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("12 samples, 144 B, ")
    one, other = hl.open_store(folder / "out"), hl.open_store(folder / "ray")
    assert torch.equal(one["fc1"][:], other["fc1"][:])
    assert one.facts == other.facts
