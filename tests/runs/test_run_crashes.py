"""Runs that were cut off, are damaged, or are being written: the reader gives what is there."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from made_runs import SITES, finish, make_rows, make_sites, make_step, start, write_run

from hookline._errors import RunWriteError
from hookline.runs import Run, RunWriter, open_run
from hookline.stats.rows import derive, merge_rows


def test_killed_writers_lose_nothing_they_acknowledged(tmp_path: Path) -> None:
    acknowledged = [int(line) for line in finish(start("kill", tmp_path, 7)).split()]
    assert len(acknowledged) == 10
    assert max(acknowledged) > 20
    for number, count in enumerate(acknowledged):
        folder = tmp_path / str(number)
        if not (folder / "rank-00000.sqlite").exists():
            assert count == 0
            continue
        run = open_run(folder)
        assert run.status in ("killed", "empty")
        assert len(run.steps) - count in (0, 1)  # one may be written and not yet acknowledged
        assert list(run.steps) == list(range(len(run.steps)))
        if len(run.steps):
            check_values(run)
            assert run.sketch("layers.11.mlp").shape == (64,)
            assert run.notes == ("rank 0 was killed: its last steps are all there is",)
        with contextlib.closing(sqlite3.connect(folder / "rank-00000.sqlite")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        # Going on in it is as good as if it had ended well.
        with RunWriter(folder, resume=True) as writer:
            writer.add_sites(make_sites())
            writer.write(make_step(count))
        assert list(open_run(folder).steps) == list(range(count + 1))


def check_values(run: Run, ranks: int = 1) -> None:
    """Compare every mean and deviation with what the steps were made of."""
    steps, addresses, means = run.map("mean")
    assert addresses == [site.address for site in make_sites()]
    deviations = run.map("std").values
    for place, step in enumerate(steps):
        rows = [make_rows(int(step), rank=rank) for rank in range(ranks)]
        merged = merge_rows(np.concatenate(rows), np.tile(np.arange(SITES), ranks), SITES)
        np.testing.assert_allclose(means[:, place], derive(merged, "mean"), rtol=1e-7)
        np.testing.assert_allclose(deviations[:, place], derive(merged, "std"), rtol=1e-7)


def test_readers_see_whole_steps_while_two_ranks_write(tmp_path: Path) -> None:
    processes = [start("rank", tmp_path, rank, 2, 400) for rank in range(2)]
    polls = 0
    seen: set[int] = set()
    while any(process.poll() is None for process in processes):
        if not (tmp_path / "rank-00000.sqlite").exists():
            continue
        run = open_run(tmp_path)
        polls += 1
        for rank in run.ranks:
            steps, _, means = run.map("mean", rank=rank)
            zeros = run.map("zeros", rank=rank)
            assert list(steps) == list(range(len(steps)))
            if not len(steps):
                continue  # the sites may not be there either
            expected = np.array([make_rows(int(step), rank=rank)[:, 6] for step in steps])
            np.testing.assert_array_equal(means, expected.T)
            assert not np.isnan(zeros.values).any()
            assert list(zeros.steps[: len(steps)]) == list(steps)
            seen.add(len(steps))
    for process in processes:
        finish(process)
    assert polls > 5
    assert len(seen) > 5, "the readers came too late to see the run grow"
    run = open_run(tmp_path)
    assert (run.status, run.ranks, run.notes, len(run.steps)) == ("finished", (0, 1), (), 400)
    check_values(run, ranks=2)


def test_ranks_that_are_missing_or_empty_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path, 3, rank=1, world=8)
    (tmp_path / "rank-00002.sqlite").touch()
    run = open_run(tmp_path)
    assert list(run.steps) == [0, 1, 2]
    assert run.series("layers.0.mlp", "mean").values[0] == 1000
    assert run.notes == (
        "`rank-00002.sqlite` is empty: its writer was cut off before the first step, or has just "
        "begun",
        "nothing was written by ranks 0, 3, 4, 5, 6 and 1 more of 8",
        "`run.json` is missing or not whole; it is for people and not needed",
    )


def test_folder_with_nothing_but_a_beginning_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"format": "hookl')
    run = open_run(tmp_path)
    assert (run.status, len(run.steps), len(run.sites()), run.ranks) == ("empty", 0, 0, ())
    assert "no rank has written anything yet" in run.notes
    assert (run.findings, run.tensors, run.environment) == ([], {}, {})
    with pytest.raises(LookupError, match="there are no steps yet"):
        run.table()


@pytest.mark.parametrize("size", [0, 1, 100, 512, 4096, 5000, 20_000, 60_000, 100_000])
def test_database_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path, size: int) -> None:
    write_run(tmp_path, 100, kinds=("rows", "sketch"))
    path = tmp_path / "rank-00000.sqlite"
    whole = path.read_bytes()
    assert len(whole) > 100_000
    path.write_bytes(whole[:size])
    assert_is_readable(open_run(tmp_path))
    assert any("rank-00000.sqlite" in note for note in open_run(tmp_path).notes)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_database_is_read_as_far_as_it_goes(tmp_path: Path, seed: int) -> None:
    write_run(tmp_path, 50, kinds=("rows", "counts", "histogram", "updates"))
    path = tmp_path / "rank-00000.sqlite"
    data = bytearray(path.read_bytes())
    generator = np.random.default_rng(seed)
    if seed == 0:
        data[:] = generator.bytes(len(data))
    for at in generator.integers(100, len(data), 40):
        data[at : at + 8] = generator.bytes(8)
    path.write_bytes(data)
    assert_is_readable(open_run(tmp_path))


def assert_is_readable(run: Run) -> None:
    """Ask everything; the answers may be short, but are answers."""
    steps = run.steps
    assert run.map("mean").values.shape == (len(run.sites()), len(steps))
    assert len(run.notes) <= 40
    assert isinstance(repr(run), str)
    assert (run.findings, dict(run.tensors), run.environment) == ([], {}, {})
    for name in run.scalars:
        assert len(run.scalar(name).values) == len(steps)
    for stat in ("rms", "zeros", "ratio"):
        if len(steps):
            run.table(stats=[stat])


def test_half_written_json_does_not_matter(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.describe("model", {"layers": 3})
        writer.add_finding({"step": 4, "what": "b"})
        writer.add_finding({"what": "no step"})
        writer.add_finding({"step": 2, "what": "a"})
    for name in ("run.json", "model.json"):
        (tmp_path / name).write_text('{"layers": ')
    run = open_run(tmp_path)
    assert run.model == {"layers": 3}
    assert [finding["what"] for finding in run.findings] == ["a", "b", "no step"]
    assert run.findings[0] == {"rank": 0, "step": 2, "what": "a"}
    assert len(run.notes) == 1


def test_documents_survive_a_lost_database(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.describe("model", {"layers": 3})
    (tmp_path / "rank-00000.sqlite").write_bytes(b"no database" * 100)
    run = open_run(tmp_path)
    assert run.model == {"layers": 3}
    assert run.notes == ("`rank-00000.sqlite` cannot be read in full: file is not a database",)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of this machine may enter, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(folder)


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Take the right to write away; as the superuser, be somebody else meanwhile."""
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_folder_that_cannot_be_written_is_one_clear_error(open_folder: Path) -> None:
    write_run(open_folder / "old", 2)
    with unwritable(open_folder):
        with pytest.raises(RunWriteError, match=r"Permission denied .*Choose a folder that can be"):
            RunWriter(open_folder / "new")
        with pytest.raises(RunWriteError, match=r"readonly database .*Choose a folder that can be"):
            RunWriter(open_folder / "old", resume=True)
        assert len(open_run(open_folder / "old").steps) == 2
    assert not (open_folder / "new").exists()


def test_folder_that_cannot_be_written_is_read(open_folder: Path) -> None:
    """A run that ended, and one that was killed and left its log behind."""
    write_run(open_folder / "ended", 3)
    writer = RunWriter(open_folder / "live")
    writer.add_sites(make_sites())
    for step in range(4):
        writer.write(make_step(step))
    for name in ("killed", "killed and booted"):
        shutil.copytree(open_folder / "live", open_folder / name)
        assert (open_folder / name / "rank-00000.sqlite-wal").stat().st_size
    writer.close()
    (open_folder / "killed and booted" / "rank-00000.sqlite-shm").unlink()
    before = sorted(open_folder.rglob("*"))
    with unwritable(open_folder):
        counts = {"ended": 3, "killed": 4, "killed and booted": 4, "live": 4}
        for name, count in counts.items():
            run = open_run(open_folder / name)
            assert run.steps.tolist() == list(range(count))
            check_values(run)
            assert not [note for note in run.notes if "sqlite" in note]
    assert sorted(open_folder.rglob("*")) == before


def test_one_damaged_block_costs_one_step(tmp_path: Path) -> None:
    write_run(tmp_path, 20)
    with contextlib.closing(sqlite3.connect(tmp_path / "rank-00000.sqlite")) as connection:
        connection.execute("UPDATE block_rows SET data=x'0102' WHERE id=5")
        connection.execute("UPDATE block_rows SET layout=999 WHERE id=7")
        connection.execute("UPDATE step SET step='x' WHERE id=9")
        connection.commit()
    run = open_run(tmp_path)
    steps, values = run.series("layers.0.mlp", "mean")
    assert steps.tolist() == [*range(8), *range(9, 20)]
    assert np.flatnonzero(np.isnan(values)).tolist() == [4, 6]
    assert len([note for note in run.notes if "holds something that cannot be read" in note]) == 3
