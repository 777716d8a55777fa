"""`hookline verify` as it is typed: what it prints, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from hookline.cli import main
from hookline.cli import verify as command
from hookline.stores import StoreWriter

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Stand in a folder with a store of two shards."""
    monkeypatch.chdir(tmp_path)
    with StoreWriter("features", group_bytes=1, shard_bytes=1) as writer:
        writer.add([0, 1], {"x": torch.zeros(2, 3)})
        writer.add([2], {"x": torch.zeros(1, 3)})

    def run(*args: str) -> Result:
        return CliRunner().invoke(main, ["verify", *args], prog_name="hookline")

    return run


def damage() -> None:
    path = Path("features/shards/writer-000001.safetensors")
    path.write_bytes(path.read_bytes()[:-1])


def test_good_store_ends_with_0(run: Run) -> None:
    done = run("features")
    assert done.exit_code == 0, done.output
    assert done.stdout == "all is as it was written: 2 shards, 3 samples, 0.0 MiB\n"
    assert done.stderr == ""
    assert run("features", "-q").output == ""


def test_damaged_store_ends_with_1_and_a_hint(run: Run) -> None:
    damage()
    done = run("features")
    assert done.exit_code == 1
    assert done.stdout == (
        "shards/writer-000001.safetensors: its head names bytes that it does not have\n"
    )
    assert done.stderr.splitlines() == [
        "1 problem; what is right: 1 shard, 2 samples, 0.0 MiB",
        "hint: `hookline verify features --repair` repairs what can be",
    ]
    quiet = run("features", "-q")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (1, done.stdout, "")


def test_repair_says_what_it_did(run: Run) -> None:
    damage()
    done = run("features", "--repair")
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "`shards/writer-000001.safetensors` moved to `damaged/writer-000001.safetensors`",
        "1 line of `index/writer.jsonl` dropped",
        "1 problem; what is right: 1 shard, 2 samples, 0.0 MiB",
        "hint: run the same extraction again, to make what is missing",
    ]
    assert run("features").exit_code == 0


def test_json_is_for_programs(run: Run) -> None:
    damage()
    done = run("features", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["is_good"], found["shards"], found["samples"]) == (False, 1, 2)
    assert found["problems"][0]["file"] == "shards/writer-000001.safetensors"
    assert run("features", "--json", "--repair").exit_code == 1
    assert json.loads(run("features", "--json").stdout)["is_good"]


@pytest.mark.parametrize("args", [[], ["features", "--nonsense"], ["features", "again"]])
def test_wrong_usage_ends_with_2(args: list[str], run: Run) -> None:
    done = run(*args)
    assert done.exit_code == 2
    assert "hint: `hookline verify --help` shows how it is used" in done.stderr


def test_folder_that_is_no_store_is_told_of(run: Run) -> None:
    done = run("nowhere")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: `nowhere` holds no tensor store")
    assert "Traceback" not in done.stderr


def test_names_that_a_terminal_would_obey_are_not_printed(run: Run) -> None:
    Path("features/shards/\x1b[31mred.safetensors").touch()
    done = run("features")
    assert done.exit_code == 1
    assert "\x1b" not in done.output
    assert "?[31mred.safetensors" in done.stdout


def test_help_has_examples(run: Run) -> None:
    text = run("--help").output
    assert "hookline verify features --repair" in text
    assert "exit codes:" in text


def test_bar_is_drawn_on_a_terminal_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with command._bar(is_quiet=False) as tell:
        assert tell is None
    monkeypatch.setattr(command.sys.stderr, "isatty", lambda: True, raising=False)
    with command._bar(is_quiet=True) as tell:
        assert tell is None
    with command._bar(is_quiet=False) as tell:
        assert tell is not None
        tell(5, 10)
        tell(10, 10)
