"""Writers that are killed and begun again: every sample is there once, and every byte is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from crashing_writers import MOMENTS, POINTS, ROUNDS, STEP
from made_samples import check_folder

_SCRIPT = Path(__file__).with_name("crashing_writers.py")


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """Have writers die in every way; give how many samples were there after each."""
    folder = tmp_path_factory.mktemp("crashed")
    command = [sys.executable, str(_SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.parametrize("name", ["plain-moments", "direct-moments"])
def test_writers_killed_at_any_moment_lose_nothing(
    crashed: tuple[Path, dict[str, list[int]]], name: str
) -> None:
    folder, told = crashed
    counts = told[name]
    assert len(counts) == MOMENTS + 1
    assert counts == sorted(counts), "samples that were there are gone"
    assert len(set(counts)) > 5, "the writers were killed before they wrote anything"
    check_folder(folder / name, range(MOMENTS * STEP))


@pytest.mark.parametrize("point", POINTS)
def test_writers_killed_at_one_point_lose_nothing(
    crashed: tuple[Path, dict[str, list[int]]], point: str
) -> None:
    folder, told = crashed
    counts = told[f"direct-{point}"]
    assert counts == sorted(counts), "samples that were there are gone"
    assert len(set(counts)) == len(counts), "a writer that came after did not get further"
    check_folder(folder / f"direct-{point}", range(ROUNDS * STEP))
