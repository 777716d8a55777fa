"""Blocks of units: written and read, merged over ranks, and in a run that was begun without."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

import hookline as hl
from hookline.runs import Block, RunWriter, SiteFacts, StepRecord
from hookline.runs.schema import VERSION

SITES = [SiteFacts(0, "act:output", "value"), SiteFacts(1, "fc:output", "value")]


def block(*rows: tuple[float, ...], first: int = 0) -> Block:
    """Make a block of units, of sites in a row."""
    sites = np.arange(first, first + len(rows), dtype=np.int32)
    return Block("units", sites, np.array(rows, dtype=np.float64))


def write(
    folder: Path, *blocks: Block, rank: int = 0, world: int = 1, resume: bool = False
) -> None:
    """Write a step for each block."""
    with RunWriter(folder, rank=rank, world=world, resume=resume) as writer:
        writer.add_sites(SITES)
        first = 0 if writer.last_step is None else writer.last_step + 1
        for number, one in enumerate(blocks, first):
            writer.write(StepRecord(number, float(number), 0.1, {"loss": 1.0}, [one]))


def test_units_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path / "run", block((64, 16, 20, np.nan, -1), (8, 0, 0, 33.5, 0.25)))
    run = hl.open_run(tmp_path / "run")
    assert run.series("act", "units").values.tolist() == [64.0]
    assert run.series("act", "dead").values.tolist() == [16.0]
    assert run.series("act", "dead_share").values.tolist() == [0.25]
    assert run.series("act", "window").values.tolist() == [20.0]
    assert np.isnan(run.series("act", "outlier").values).all()
    assert np.isnan(run.series("act", "saturated").values).all()
    assert run.series("fc", "outlier").values.tolist() == [33.5]
    assert run.series("fc", "saturated").values.tolist() == [0.25]
    assert np.isnan(run.series("fc", "dead_share").values).all()
    table = run.table(stats=("units", "dead"))
    assert [tuple(row.values()) for row in table] == [
        ("act:output", "", 64, 16),
        ("fc:output", "", 8, 0),
    ]


def test_ranks_merge_as_far_as_they_agree(tmp_path: Path) -> None:
    write(tmp_path / "run", block((8, 4, 20, 5.0, 0.25)), rank=0, world=2)
    write(tmp_path / "run", block((8, 2, 18, 7.0, 0.75), (4, 1, 3, np.nan, -1)), rank=1, world=2)
    run = hl.open_run(tmp_path / "run")
    found = {name: run.series("act", name).values[0] for name in ("units", "dead", "window")}
    assert found == {"units": 8.0, "dead": 2.0, "window": 18.0}
    assert run.series("act", "outlier").values.tolist() == [7.0]
    assert run.series("act", "saturated").values.tolist() == [0.5]
    assert run.series("fc", "dead").values.tolist() == [1.0]
    assert np.isnan(run.series("fc", "outlier").values).all()
    assert run.series("act", "dead", rank=0).values.tolist() == [4.0]


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    """Make a run as the first version wrote it."""
    folder = tmp_path / "run"
    rows = Block("counts", np.array([0], np.int32), np.array([[1.0, 2.0, 3.0]]))
    write(folder, rows)
    with sqlite3.connect(folder / "rank-00000.sqlite") as connection:
        connection.execute("DROP TABLE block_units")
        connection.execute("PRAGMA user_version=1")
    connection.close()
    return folder


def test_an_older_run_has_no_units_and_is_whole(old_run: Path) -> None:
    run = hl.open_run(old_run)
    assert np.isnan(run.series("act", "dead").values).all()
    assert run.series("act", "tiny").values.tolist() == [2.0]
    assert run.notes == ()


def test_an_older_run_can_be_gone_on_with(old_run: Path) -> None:
    write(old_run, block((4, 1, 2, 3.0, -1)), resume=True)
    run = hl.open_run(old_run)
    assert run.series("act", "dead").values[1:].tolist() == [1.0]
    assert run.series("act", "tiny").values[:1].tolist() == [2.0]
    with sqlite3.connect(old_run / "rank-00000.sqlite") as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == VERSION
    connection.close()


def test_what_is_known_besides_is_not_stored(tmp_path: Path) -> None:
    step = StepRecord(0, 0.0, more={"origin": {"site": "fc/log"}})
    with RunWriter(tmp_path / "run") as writer:
        writer.write(step)
    assert b"fc/log" not in (tmp_path / "run" / "rank-00000.sqlite").read_bytes()
