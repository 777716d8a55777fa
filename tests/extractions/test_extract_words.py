"""Errors at a terminal name options as a command line does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from made_data import enter_folder

from hookline.cli import main
from hookline.cli.extract_options import name_options

CODE = """
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


rows = [torch.ones(4)] * 6
pairs = [{"x": torch.ones(4)}] * 6
uneven = [torch.ones(4, 4), torch.ones(3, 4)]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a model and data."""
    return enter_folder(tmp_path, monkeypatch, CODE)


BASIC = ["--model", "net.py:make", "--data", "net.py:rows", "--site", "**", "-o", "out"]


def fail(*words: str, data: str = "rows") -> str:
    """Run `hookline extract`; give what it says of its failure."""
    result = CliRunner().invoke(main, ["extract", *BASIC, "--data", f"net.py:{data}", *words])
    assert result.exit_code == 1, result.output
    return result.stderr


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("replace it with overwrite=True. A", "replace it with --overwrite. A"),
        ("column='text' is not among", "--column text is not among"),
        ("give column= one of: a", "give --column one of: a"),
        ("as collate=, or batch_size=1", "as collate=, or --batch-size 1"),
        ("(`reduce=`, `dtype=`, `limit=`, fewer", "(`--reduce`, `--dtype`, `--limit`, fewer"),
        # What others say stays.
        ("Pool(limit=3, reduce=4) failed", "Pool(limit=3, reduce=4) failed"),
        ("my_limit=3 x.limit=3 ?limit=3", "my_limit=3 x.limit=3 ?limit=3"),
        ("a limit of 3", "a limit of 3"),
    ],
)
def test_options_are_named_as_on_a_command_line(said: str, wanted: str) -> None:
    assert name_options(said) == wanted


def test_what_is_refused_names_flags(folder: Path) -> None:
    told = fail(data="uneven")
    assert "or --batch-size 1" in told
    assert "batch_size" not in told
    told = fail("--column", "text", data="pairs")
    assert "--column text is not among the fields: x" in told
    assert CliRunner().invoke(main, ["extract", *BASIC]).exit_code == 0
    told = fail("--dtype", "float16")
    assert "or replace it with --overwrite." in told
    assert "overwrite=" not in told


def test_a_damaged_store_names_flags_also_where_it_is_verified(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "store.json").write_text(json.dumps({"version": 1}))
    assert "an extraction begins anew with --overwrite" in fail()
    found = CliRunner().invoke(main, ["verify", "out"])
    assert found.exit_code == 1
    assert "an extraction begins anew with --overwrite" in found.stdout


def test_data_that_are_not_there_are_said_without_a_place_in_the_code() -> None:
    said = fail("--data", "nowhere.jsonl")
    assert said.startswith("error: `nowhere.jsonl` does not exist; give "), said
    assert ".py line" not in said


def test_a_failure_of_the_users_code_says_its_place(folder: Path) -> None:
    code = CODE + "\n\ndef broken():\n    raise ValueError('no rows today')\n"
    (folder / "net.py").write_text(code)
    said = fail(data="broken")
    assert "net.py line" in said, said
    assert "ValueError: no rows today" in said
