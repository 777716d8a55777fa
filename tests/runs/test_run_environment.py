"""Where a run came from, without secrets and without touching anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hookline.runs import describe_environment
from hookline.runs.environment import read_command


def test_versions_machine_and_directory_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    facts = describe_environment()
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["cpus"] == os.cpu_count()
    assert facts["directory"] == str(tmp_path)
    assert facts["git"] is None
    assert json.loads(json.dumps(facts)) == facts


def test_no_device_is_claimed() -> None:
    was_initialized = torch.cuda.is_initialized()
    describe_environment()
    assert torch.cuda.is_initialized() == was_initialized


def test_git_state_is_told_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    try:
        git("init", "-b", "trunk")
    except OSError:
        pytest.skip("git is not installed")
    (tmp_path / "train.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.chdir(tmp_path)
    clean = describe_environment()["git"]
    assert len(clean["commit"]) == 40
    assert (clean["branch"], clean["dirty"]) == ("trunk", False)
    (tmp_path / "train.py").write_text("a = 2\n")
    before = (tmp_path / ".git" / "index").read_bytes()
    assert describe_environment()["git"] == {**clean, "dirty": True}
    assert (tmp_path / ".git" / "index").read_bytes() == before


def test_secrets_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hush-1")
    monkeypatch.setenv("RANK", "3")
    words = ["train.py", "--lr", "0.1", "--api-key", "hush-2", "--token=hush-3", "--seed", "4"]
    monkeypatch.setattr(sys, "argv", [*words, "https://me:hush-4@host/x", "--auth-token", "-v"])
    facts = describe_environment()
    assert "hush" not in json.dumps(facts)
    assert facts["variables"]["RANK"] == "3"
    assert facts["command"] == read_command()
    assert facts["command"][1:] == [
        *["train.py", "--lr", "0.1", "--api-key", "***", "--token=***", "--seed", "4"],
        *["https://***@host/x", "--auth-token", "-v"],
    ]


def test_git_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("hookline.runs.environment._GIT_SECONDS", 0.2)
    assert describe_environment()["git"] is None
