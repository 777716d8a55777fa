"""The demo as a newcomer runs it: in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hookline as hl

SOURCE = Path(__file__).parent.parent / "src"
SCRIPT = SOURCE / "hookline" / "demo" / "train_gpt.py"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the demo in an empty folder; give what it printed, and the folder."""
    folder = tmp_path_factory.mktemp("empty")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    environment["COLUMNS"] = "300"
    done = subprocess.run(
        [sys.executable, "-m", "hookline.demo", "--out", "demo"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done, folder


def test_demo_says_what_is_wrong_and_where(
    demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    lines = SCRIPT.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if ".softmax(" in text)
    said = demo[0].stderr
    assert f"blocks.0.attn/softmax made the first NaN at step 62 (train_gpt.py:{line})" in said
    assert "report.html" in said


def test_demo_keeps_the_run_and_a_page(
    demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    folder = demo[1] / "demo"
    run = hl.open_run(folder)
    assert run.status == "finished"
    assert len(run.steps) == 100
    assert [one["rule"] for one in run.findings if one["severity"] == "error"] == ["non-finite"]
    assert (folder / "report.html").stat().st_size < 3_000_000


def test_demo_trains_until_the_bug_shows(
    demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    losses = [float(one) for one in re.findall(r"loss (\S+)", demo[0].stdout)]
    assert losses[0] > 3
    assert losses[6] < 1.2
    assert losses[7] != losses[7]
