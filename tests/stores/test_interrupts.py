"""Ctrl-C and forks while a store is written: what came is there, once."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import made_samples
import pytest
from made_samples import (
    add_groups,
    check_folder,
    fork,
    make_row,
    make_values,
    use_small_stages,
    write_groups,
)

from hookline._errors import StoreError
from hookline.stores import StoreWriter, open_store
from hookline.stores.places import LocalPlace
from hookline.stores.writing import Rows


@pytest.fixture
def small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small shards too grow on the disk, by a thread."""
    use_small_stages(monkeypatch)


def interrupt() -> None:
    """Press Ctrl-C."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_interrupt_keeps_what_came_until_then(tmp_path: Path) -> None:
    def work() -> None:
        with StoreWriter(tmp_path) as writer:
            add_groups(writer, 0, 44, each=4)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    check_folder(tmp_path, range(44))


@pytest.mark.parametrize(
    ("owner", "function"),
    [(os, "pwrite"), (os, "fsync"), (LocalPlace, "take"), (LocalPlace, "append_line")],
)
@pytest.mark.usefixtures("small_stages")
def test_interrupt_while_a_shard_is_written_keeps_what_came_until_then(
    tmp_path: Path, owner: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C finds the process waiting for its disk, most of the time."""
    wanted, calls = getattr(owner, function), []

    def work(*given: Any) -> Any:
        calls.append(given)
        if len(calls) in (4, 9):
            interrupt()
            time.sleep(0.1)
        return wanted(*given)

    monkeypatch.setattr(owner, function, work)
    given: list[int] = []

    def make(ids: range) -> dict[str, Rows]:
        given.extend(ids)
        return make_values(ids)

    monkeypatch.setattr(made_samples, "make_values", make)
    with pytest.raises(KeyboardInterrupt):
        write_groups(tmp_path, 0, 96_000)
    assert 0 < len(given) < 96_000
    monkeypatch.undo()
    # The signal may have come before the last group was taken, or after.
    held = open_store(tmp_path).ids.tolist()
    assert held in (given, given[:-160])
    check_folder(tmp_path, held)


# One that comes after a file was opened and before it is held leaves it to be closed by itself.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_random_moments_keep_what_came(tmp_path: Path) -> None:
    done = 0

    def work(folder: Path, timer: threading.Timer) -> None:
        nonlocal done
        with StoreWriter(folder, group_bytes=1) as writer:
            timer.start()
            for done in range(100_000):
                writer.add([done], {"mlp": make_row(done)[None]})
                if not done % 5:
                    writer.finish_shard()

    for number in range(20):
        folder, done = tmp_path / str(number), 0
        timer = threading.Timer(0.002 * (number + 1), interrupt)
        with pytest.raises(KeyboardInterrupt):
            work(folder, timer)
        timer.join()
        held = open_store(folder).ids.tolist() if (folder / "store.json").exists() else []
        # The signal may have come before the last one was taken, or after.
        assert held in (list(range(done)), list(range(done + 1)))
        assert not list(folder.glob("shards/.*"))


def test_forked_child_leaves_the_writer_to_its_parent(tmp_path: Path) -> None:
    told = tmp_path / "told"

    class Leaving(Exception):
        pass

    with StoreWriter(tmp_path / "store", group_bytes=1) as writer:
        writer.add(range(4), make_values(range(4)))

        def leave() -> None:
            try:
                with writer:
                    try:
                        writer.add(range(4, 8), make_values(range(4, 8)))
                    except StoreError as error:
                        told.write_text(str(error))
                    raise Leaving
            except Leaving:
                pass

        assert fork(leave) == 0
        assert "belongs to the process that this one was forked from" in told.read_text()
        assert not (tmp_path / "store" / "index").exists()
        writer.add(range(8, 12), make_values(range(8, 12)))
    check_folder(tmp_path / "store", [*range(4), *range(8, 12)])
