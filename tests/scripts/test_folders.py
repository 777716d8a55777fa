"""Where runs go: a folder of their own, and the same for all ranks of a launch."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hookline.scripts import folders
from hookline.scripts.folders import choose_folder, claim_folder, read_rank


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_single_process_gets_a_folder_of_its_own(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    first = choose_folder("train", environment={})
    assert first.parent == here / "runs"
    assert first.name.startswith("train-2023111")
    # Two that start in the same second.
    assert claim_folder(first) == first
    assert claim_folder(first) == first.with_name(f"{first.name}-2")
    assert claim_folder(first) == first.with_name(f"{first.name}-3")


def test_odd_names_become_fit_for_a_folder() -> None:
    assert choose_folder("a b/ü.c", environment={}).name.startswith("a-b-.c-")
    assert choose_folder("..", environment={}).name.startswith("script-")


RANKS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}


def test_ranks_of_one_machine_agree_by_their_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """They start at different moments, of the same parent."""
    names = []
    for rank in ("0", "1"):
        monkeypatch.setattr(time, "time", lambda rank=rank: 1e9 + 100 * int(rank))
        names.append(choose_folder("train", environment={**RANKS, "RANK": rank}))
    assert names[0] == names[1]
    assert names[0].name.count("-") == 2
    again = choose_folder("train", environment={**RANKS, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.name == f"{names[0].name}-restart-1"


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}, "train-job-77-0"),
        ({"TORCHELASTIC_RUN_ID": "mine"}, "train-mine"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "train-h-29500"),
    ],
)
def test_ranks_of_several_machines_agree_by_their_job(more: dict[str, str], name: str) -> None:
    spread = {**RANKS, "LOCAL_WORLD_SIZE": "1", **more}
    assert choose_folder("train", environment=spread).name == name


def test_launcher_that_cannot_be_read_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_read_start", lambda process: None)
    assert choose_folder("train", environment=RANKS).name == "train-h-29500"


def test_rank_is_that_of_the_launcher() -> None:
    assert read_rank({}) == (0, 1)
    assert read_rank({"RANK": "3", "WORLD_SIZE": "4"}) == (3, 4)
    assert read_rank({"RANK": "x"}) == (0, 1)
