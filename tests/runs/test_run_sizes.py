"""What a run costs: bytes on disk, time to write a step, time to open a long run."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_sites

from hookline.runs import Block, RunWriter, StepRecord, open_run


def measure_step(generator: np.random.Generator, sites: int) -> np.ndarray:
    """Make rows as training gives them: other numbers at every step, the same counts."""
    rows = np.zeros((sites, 8))
    rows[:, 0] = 65536
    rows[:, 4:7] = np.sort(generator.standard_normal((sites, 3))).astype(np.float32)[:, [0, 2, 1]]
    rows[:, 7] = 65536 * generator.random(sites)
    return rows


def write_long(folder: Path, sites: int, steps: int, *, sketch: bool) -> list[float]:
    """Write a run; give the seconds that each step took."""
    generator = np.random.default_rng(0)
    ids = np.arange(sites, dtype=np.int32)
    seconds = []
    with RunWriter(folder) as writer:
        writer.add_sites(make_sites([f"layers.{number}.mlp:output" for number in range(sites)]))
        for step in range(steps):
            blocks = [Block("rows", ids, measure_step(generator, sites))]
            if sketch:
                numbers = generator.standard_normal((sites, 64), np.float32)
                blocks.append(Block("sketch", ids, numbers))
            record = StepRecord(step, 1e9 + step, 0.1, {"loss": 1.0, "lr": 0.1}, blocks)
            start = time.perf_counter()
            writer.write(record)
            seconds.append(time.perf_counter() - start)
    return seconds


@pytest.mark.parametrize(("sketch", "most"), [(False, 4_600), (True, 75_000)])
def test_250_sites_are_small_on_disk(tmp_path: Path, sketch: bool, most: int) -> None:
    write_long(tmp_path, 250, 100, sketch=sketch)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    # What is written once (the sites, mostly) is a part of it.
    assert size / 100 < most + 1_000


def test_batches_of_other_sizes_at_every_step_stay_small(tmp_path: Path) -> None:
    ids = np.arange(250, dtype=np.int32)
    generator = np.random.default_rng(0)
    with RunWriter(tmp_path) as writer:
        writer.add_sites(make_sites([f"layers.{number}.mlp:output" for number in ids]))
        for step in range(400):
            rows = measure_step(generator, 250)
            rows[:, 0] = 1000 + step * 7
            writer.write(StepRecord(step, 0.0, None, {}, [Block("rows", ids, rows)]))
        assert len(writer._shared) <= 256
    assert (tmp_path / "rank-00000.sqlite").stat().st_size / 400 < 6_000
    counts = open_run(tmp_path).series("layers.9.mlp", "count").values
    assert counts.tolist() == [1000 + step * 7 for step in range(400)]


def test_writing_500_sites_takes_less_than_a_millisecond(tmp_path: Path) -> None:
    seconds = write_long(tmp_path, 500, 200, sketch=False)
    assert np.median(seconds) < 0.001


@pytest.mark.slow
def test_long_run_opens_in_two_seconds(tmp_path: Path) -> None:
    """1000 sites, 10,000 steps."""
    write_long(tmp_path, 1000, 10_000, sketch=False)
    start = time.perf_counter()
    run = open_run(tmp_path)
    assert len(run.sites()) == 1000
    assert len(run.series("layers.500.mlp", "rms").values) == 10_000
    assert len(run.table()) == 1000
    assert time.perf_counter() - start < 2
