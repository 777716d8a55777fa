"""The demo as a newcomer runs it: in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_SECONDS = 60  # it takes about two; a loaded machine takes longer

ROW = re.compile(r"(blocks\.\d\S*:output) +(\w+) +4x8x16 +float32 +([\d.e-]+) +([\d.e-]+)")


def run_demo(folder: Path) -> str:
    """Run the demo in an empty folder and give what it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "hookline.demo"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=MOST_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(folder.iterdir()) == []
    return done.stdout


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_demo(tmp_path_factory.mktemp("empty"))


def test_table_has_a_row_with_both_norms_for_each_site(printed: str) -> None:
    rows = ROW.findall(printed)
    sites = [f"blocks.{n}{part}:output" for n in range(4) for part in (".mlp", "")]
    assert [site for site, *_ in rows] == sites
    assert {kind for _, kind, *_ in rows} == {"Block", "Sequential"}
    assert all(float(value) > 0 and float(grad) > 0 for *_, value, grad in rows)


def test_edit_changes_its_block_and_those_after_it(printed: str) -> None:
    found = re.findall(r"^(blocks\.\d): output changed by ([\d.]+)%$", printed, re.MULTILINE)
    changes = {path: float(percent) for path, percent in found}
    assert list(changes) == [f"blocks.{number}" for number in range(4)]
    assert changes["blocks.0"] == 0
    assert all(changes[f"blocks.{number}"] > 1 for number in (1, 2, 3))


def test_loss_changes_under_the_edit_and_comes_back(printed: str) -> None:
    first = re.search(r"^loss ([\d.]+)$", printed, re.MULTILINE)
    change = re.search(r"^loss ([\d.]+) -> ([\d.]+)$", printed, re.MULTILINE)
    last = re.search(r"^loss ([\d.]+); .* same bits as in 1: True$", printed, re.MULTILINE)
    assert first
    assert change
    assert last
    assert first[1] == change[1] == last[1] != change[2]


def test_no_hook_is_left(printed: str) -> None:
    assert re.findall(r"hooks on the model: (\d+)", printed) == ["0", "0"]


def test_watch_shows_the_updates_of_every_mlp(printed: str) -> None:
    found = re.findall(r"^(blocks\S+):update +Linear +(\S+) +(\S+) +(\S+)$", printed, re.MULTILINE)
    expected = [f"blocks.{n}.mlp.{layer}.weight" for n in range(4) for layer in (0, 2)]
    assert [site for site, *_ in found] == expected
    assert all(0 < float(rms) < 0.1 and 0 < float(ratio) < 0.1 for _, rms, ratio, _ in found)


def test_watch_shows_a_loss_that_falls_from_the_one_before(printed: str) -> None:
    told = re.search(
        r"^Series loss: 20 steps \(0 to 19\); first ([\d.]+), last ([\d.]+)", printed, re.MULTILINE
    )
    before = re.search(r"^loss ([\d.]+)$", printed, re.MULTILINE)
    assert told
    assert before
    assert float(told[1]) == pytest.approx(float(before[1]), abs=0.01)
    assert float(told[2]) < float(told[1]) / 2


def test_last_line_says_where_to_look_next(printed: str) -> None:
    last = printed.splitlines()[-1]
    named = re.findall(r"[\w/]+\.md", last)
    assert named == ["README.md", "docs/index.md"]
    assert all((ROOT / name).is_file() for name in named)


def test_demo_prints_the_same_each_time(printed: str, tmp_path: Path) -> None:
    assert run_demo(tmp_path) == printed


def test_demo_is_plain_text(printed: str) -> None:
    assert printed.isascii()
    assert all(character.isprintable() or character == "\n" for character in printed)
