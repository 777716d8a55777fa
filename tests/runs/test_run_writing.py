"""The writer: what it accepts, what it refuses, and with which words."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from made_runs import finish, make_rows, make_sites, make_step, start, write_run

from hookline._errors import NewerRun, RunExists, RunWriteError, SessionError
from hookline.runs import Block, RunWriter, SiteFacts, StepRecord, open_run
from hookline.runs.schema import VERSION


def test_a_run_has_these_files(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "a"
    with RunWriter(folder) as writer:
        writer.describe("environment", {"python": "3"})
        writer.add_sites(make_sites())
        writer.write(make_step(0))
        writer.dump("alarm", {"x": torch.ones(2)}, {"step": 0})
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == [
        "environment.json",
        "rank-00000.sqlite",
        "run.json",
        "tensors/alarm.rank-00000.safetensors",
    ]
    facts = json.loads((folder / "run.json").read_text())
    assert (facts["format"], facts["version"]) == ("hookline.run", VERSION)
    assert (facts["status"], facts["last_step"], facts["world"]) == ("finished", 0, 1)
    assert str(folder) in facts["read_with"]


def test_same_command_again_is_refused_and_says_how_to_go_on(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 3)
    with pytest.raises(RunExists) as caught:
        RunWriter(tmp_path / "a")
    assert str(caught.value) == (
        f"`{tmp_path}/a` holds a run already: 3 steps of rank 0, finished. Choose another folder, "
        f"such as `{tmp_path}/a-2`, or go on in this one with `resume=True`."
    )
    assert len(open_run(tmp_path / "a").steps) == 3
    assert open_run(tmp_path / "a").status == "finished"


def test_run_that_is_being_written_is_refused_even_to_resume(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a") as writer:
        for resume in (False, True):
            with pytest.raises(RunExists, match=f"is being written by process {os.getpid()}"):
                RunWriter(tmp_path / "a", resume=resume)
        writer.add_sites(make_sites())
        writer.write(make_step(0))
    assert list(open_run(tmp_path / "a").steps) == [0]


def test_run_without_steps_is_taken_over(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 0)
    write_run(tmp_path / "a", 2)
    assert list(open_run(tmp_path / "a").steps) == [0, 1]


def test_run_of_another_size_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 1, world=2)
    with pytest.raises(RunExists, match="holds a run of 2 ranks, and this one has 4"):
        RunWriter(tmp_path / "a", rank=3, world=4)


def test_resume_goes_on_and_supersedes_what_was_after(tmp_path: Path) -> None:
    """The checkpoint was of step 3: the steps from there on come again, with other values."""
    write_run(tmp_path / "a", 6)
    with RunWriter(tmp_path / "a", resume=True) as writer:
        assert writer.last_step == 5
        # Another order of sites and a new one, as another process may meet them.
        first, second, *_ = make_sites()
        writer.add_sites(
            [
                SiteFacts(0, "new:output", "value"),
                SiteFacts(1, second.address, "value"),
                SiteFacts(2, first.address, "value", dtype="bfloat16"),
            ]
        )
        for step in (3, 4):
            rows = make_rows(step + 100, 3)
            writer.write(StepRecord(step, 0.0, None, {}, [Block("rows", np.arange(3), rows)]))
    run = open_run(tmp_path / "a")
    assert list(run.steps) == [0, 1, 2, 3, 4]
    nan = float("nan")
    np.testing.assert_array_equal(run.series("new", "mean").values, [nan, nan, nan, 103, 104])
    np.testing.assert_array_equal(
        run.series("layers.0.mlp", "mean").values, [0, 1, 2, 103.5, 104.5]
    )
    np.testing.assert_array_equal(
        run.series("layers.1.mlp", "mean").values, [0.25, 1.25, 2.25, 103.25, 104.25]
    )
    np.testing.assert_array_equal(
        run.series("layers.2.mlp", "mean").values, [0.5, 1.5, 2.5, nan, nan]
    )
    assert run.site("layers.0.mlp").dtype == "bfloat16"
    assert len(run.sites()) == 13


def test_step_written_again_replaces_the_first(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.add_sites(make_sites())
        writer.write(make_step(7))
        writer.write(make_step(7, rank=1))
    assert list(open_run(tmp_path).steps) == [7]
    assert open_run(tmp_path).series("layers.0.mlp", "mean").values == [1007]


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "finished"), (ValueError, "failed"), (KeyboardInterrupt, "interrupted")],
)
def test_the_way_out_of_the_block_is_the_ending(
    tmp_path: Path, error: type[BaseException] | None, status: str
) -> None:
    try:
        with RunWriter(tmp_path):
            assert open_run(tmp_path).status == "running"
            if error:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert open_run(tmp_path).status == status


def test_closed_writer_is_refused_and_may_be_closed_again(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.close()
    writer.close("failed")
    with pytest.raises(SessionError, match="is closed"):
        writer.write(make_step(0))
    assert open_run(tmp_path).status == "finished"
    with pytest.raises(ValueError, match="a run ends as one of"):
        writer.close("done")


def test_closed_run_is_one_plain_file(tmp_path: Path) -> None:
    """So that it can be copied, and read where nothing can be written."""
    write_run(tmp_path / "a")
    assert not list(tmp_path.glob("a/*-wal")) + list(tmp_path.glob("a/*-shm"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert len(open_run(tmp_path / "b").steps) == 5


def test_sites_and_blocks_are_checked(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="has the id 1; the next id is 0"):
            writer.add_sites(make_sites()[1:])
        with pytest.raises(ValueError, match="is of the kind 'activation'"):
            writer.add_sites([SiteFacts(0, "a:output", "activation")])
        writer.add_sites(make_sites()[:2])
        with pytest.raises(ValueError, match="`add_sites` was told of 2"):
            writer.write(make_step(0))
        writer.write(make_step(1, sites=2))
    with pytest.raises(ValueError, match="A block of 'rows' with 2 sites has the shape"):
        Block("rows", np.arange(2), np.zeros((2, 3)))
    with pytest.raises(ValueError, match="one block of each kind"):
        StepRecord(0, 0.0, blocks=[*make_step(0).blocks, *make_step(0).blocks])
    assert list(open_run(tmp_path).steps) == [1]
    assert [site["site"] for site in open_run(tmp_path).sites()] == [
        "layers.0.mlp:output",
        "layers.1.mlp:output",
    ]


def test_documents_are_replaced_and_their_names_checked(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for version in (1, 2):
            writer.describe(
                "environment", {"version": version, "odd": "\udcff ö", "path": tmp_path}
            )
        for name in ("run", "../x", "", "A b"):
            with pytest.raises(ValueError, match="cannot name a document"):
                writer.describe(name, {})
    run = open_run(tmp_path)
    assert run.environment == {"version": 2, "odd": "\udcff ö", "path": str(tmp_path)}
    assert json.loads((tmp_path / "environment.json").read_text()) == run.environment
    assert run.model == {}


def test_other_ranks_write_no_files_for_people(tmp_path: Path) -> None:
    with RunWriter(tmp_path, rank=1, world=2) as writer:
        writer.describe("environment", {"host": "b"})
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00001.sqlite"]
    assert open_run(tmp_path).document("environment", rank=1) == {"host": "b"}


def test_dumps_come_back_whatever_their_names(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    with RunWriter(tmp_path) as writer:
        first = writer.dump(
            "layers.3:output/x y", {"a": shared[:3], "b": shared, "c": shared.reshape(2, 3).T}
        )
        second = writer.dump("layers.3:output/x y", {"s": torch.eye(2).to_sparse()}, {"step": 4})
    assert first != second
    assert first.parent == second.parent == tmp_path / "tensors"
    found = open_run(tmp_path).tensors
    assert list(found) == ["layers.3:output/x y", f"layers.3:output/x y ({second.name})"]
    one, two = found.values()
    assert sorted(one.keys()) == sorted(one) == ["a", "b", "c"]
    assert (len(one), "a" in one, "z" in one) == (3, True, False)
    assert torch.equal(one["b"], shared)
    assert torch.equal(two.load()["s"], torch.eye(2))
    assert two.facts == {"step": 4}
    with pytest.raises(LookupError, match="holds no tensor 'z'; it holds 's'"):
        two["z"]
    second.unlink()
    with pytest.raises(LookupError, match="is gone"):
        two.load()


def test_paths_may_hold_anything(tmp_path: Path) -> None:
    for name in ("a b", "what?", "x#y", "50%25", "ünï/códe", "a&mode=rw", "'q'"):
        write_run(tmp_path / name, 2)
        assert len(open_run(tmp_path / name).steps) == 2
        assert open_run(str(tmp_path / name)).notes == ()


def test_folder_is_found_again_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with RunWriter("a") as writer:
        run = open_run("a")
        monkeypatch.chdir(tmp_path / "elsewhere")
        writer.describe("model", {"x": 1})
    assert run.model == {"x": 1}
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_children_that_were_forked_do_no_harm(tmp_path: Path) -> None:
    """One that ends while its parent writes, and one that ends when the run is closed."""
    early, late, before, after = json.loads(finish(start("fork", tmp_path)))
    assert (early, late) == (0, 0)
    assert before == after, "the child folded or deleted the log of its parent"
    for name in ("early.txt", "late.txt"):
        refusal = (tmp_path / name).read_text()
        assert re.search(r"is written by the process \d+, from which this one", refusal)
    run = open_run(tmp_path)
    assert (run.status, run.notes) == ("finished", ())
    np.testing.assert_array_equal(run.series("layers.0.mlp", "mean").values, range(100))
    with contextlib.closing(sqlite3.connect(tmp_path / "rank-00000.sqlite")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let files grow to 300 kB and no further, as on a full disk."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_full_disk_is_one_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    written: list[int] = []
    writer = RunWriter(tmp_path)
    writer.add_sites(make_sites())

    def write_many() -> None:
        for step in range(1000):
            writer.write(make_step(step, ("rows", "sketch")))
            written.append(step)

    with pytest.raises(RunWriteError) as caught:
        write_many()
    assert isinstance(caught.value, OSError)
    assert re.fullmatch(
        r"The run at `.*` cannot be written: disk I/O error \(`rank-00000.sqlite`\)\. Look whether "
        r"its disk is full or gone, or choose another folder\. What was written before stays "
        r"readable\.",
        str(caught.value),
    )
    run = open_run(tmp_path)
    assert len(written) > 5
    assert list(run.steps) == written
    np.testing.assert_array_equal(run.series("layers.0.mlp", "mean").values, written)
    with pytest.raises(RunWriteError):
        writer.dump("big", {"x": torch.zeros(200_000)})
    assert list((tmp_path / "tensors").iterdir()) == []
    with contextlib.suppress(RunWriteError):  # there may not even be room for the ending
        writer.close("failed")
    assert list(open_run(tmp_path).steps) == written


def test_writing_goes_on_when_there_is_room_again(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What a failed transaction had shared must not be referred to later."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with RunWriter(tmp_path) as writer:
        writer.add_sites(make_sites())
        writer.write(make_step(0))
        size = writer.path.with_name(f"{writer.path.name}-wal").stat().st_size
        request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        for _ in range(2):
            with pytest.raises(RunWriteError):
                writer.write(make_step(1, ("rows", "counts", "updates")))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        writer.write(make_step(1, ("rows", "counts", "updates")))
    run = open_run(tmp_path)
    assert list(run.steps) == [0, 1]
    assert run.series("layers.2.mlp", "zeros").values[1] == 7
    assert run.notes == ()


def test_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunWriteError, match="File exists"):
        RunWriter(tmp_path / "file")
    with pytest.raises(RunWriteError, match="Not a directory"):
        RunWriter(tmp_path / "file" / "run")


def test_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.sqlite"
    path.write_bytes(b"these are my notes " * 100)
    with pytest.raises(RunWriteError, match=r"not a database .*Move that file away"):
        RunWriter(tmp_path, resume=True)
    assert path.read_bytes() == b"these are my notes " * 100
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()
    with pytest.raises(RunWriteError, match="tables of somebody else"):
        RunWriter(tmp_path)


def test_run_of_a_newer_hookline_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path)
    with sqlite3.connect(tmp_path / "rank-00000.sqlite") as newer:
        newer.execute("PRAGMA user_version=99")
    newer.close()
    expected = (
        f"`{tmp_path}/rank-00000.sqlite` was written by a newer hookline: its schema is version "
        f"99, and this hookline reads up to version {VERSION}. Upgrade it: pip install --upgrade "
        "hookline."
    )
    for use in (lambda: RunWriter(tmp_path, resume=True), lambda: open_run(tmp_path)):
        with pytest.raises(NewerRun) as caught:
            use()
        assert str(caught.value) == expected
