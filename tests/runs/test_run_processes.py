"""Whether the writer of a run still lives, and what follows for one who wants its folder."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_sites, make_step, write_run

from hookline._errors import RunExists
from hookline.runs import RunWriter, open_run
from hookline.runs.processes import _read_begin, is_alive, mark_process


def test_this_process_lives_and_others_with_its_number_do_not() -> None:
    mark = mark_process()
    assert is_alive(mark) is True
    assert is_alive({**mark, "host": "another"}) is None
    assert is_alive({}) is None
    if mark["begun"]:
        assert is_alive({**mark, "begun": "another boot/1"}) is False


def test_process_that_ended_is_dead_even_before_its_parent_asks() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = {**mark_process(), "pid": child.pid}
    mark["begun"] = _read_begin(child.pid)
    assert is_alive(mark) is True
    child.kill()
    if mark["begun"]:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now
        assert is_alive(mark) is False
    child.communicate()
    assert is_alive(mark) is False


def leave_running(folder: Path, steps: int, **changes: Any) -> None:
    """Make a run look as one whose writer has not closed it."""
    write_run(folder, steps)
    facts = {"status": "running", "world": 1, "process": {**mark_process(), **changes}}
    with contextlib.closing(sqlite3.connect(folder / "rank-00000.sqlite")) as connection:
        connection.execute("UPDATE attempt SET facts=?", (json.dumps(facts),))
        connection.commit()


def test_run_of_a_dead_writer_may_be_resumed(tmp_path: Path) -> None:
    leave_running(tmp_path, 2, begun="an earlier boot/7")
    assert open_run(tmp_path).status == "killed"
    with pytest.raises(RunExists, match=r"2 steps of rank 0, cut off\. .*resume=True"):
        RunWriter(tmp_path)
    with RunWriter(tmp_path, resume=True) as writer:
        writer.add_sites(make_sites())
        writer.write(make_step(2))
    assert open_run(tmp_path).steps.tolist() == [0, 1, 2]


def test_run_of_another_machine_is_taken_over_only_when_told(tmp_path: Path) -> None:
    leave_running(tmp_path, 0, host="another")
    assert open_run(tmp_path).status == "running"
    with pytest.raises(RunExists, match="0 steps of rank 0"):
        RunWriter(tmp_path)
    RunWriter(tmp_path, resume=True).close()


def test_writer_that_was_forgotten_is_no_reason(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.add_sites(make_sites())
    writer.write(make_step(0))
    del writer
    RunWriter(tmp_path, resume=True).close()
    assert open_run(tmp_path).steps.tolist() == [0]
