"""Two writers of one name: the second is refused, and what the dead have begun is removed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_samples import check_folder, fork, make_values

from hookline._errors import StoreError
from hookline.stores import StoreWriter, locking, verify

SAID = r"is being written by process \d+ on .*, under the same name `writer`: wait until that has"


def write(folder: Path, ids: range, name: str = "writer") -> None:
    with StoreWriter(folder, name=name, group_bytes=1) as writer:
        writer.add(ids, make_values(ids))


def start(work: Callable[[], None]) -> int:
    """Do something in a process that waits for its end then; give its number."""
    ready, begun = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
            os.write(begun, b"!")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(ready, 1) == b"!"
    os.close(ready)
    os.close(begun)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_second_process_with_the_same_name_is_refused(tmp_path: Path) -> None:
    kept: list[StoreWriter] = []

    def hold() -> None:
        kept.append(StoreWriter(tmp_path, group_bytes=1))
        kept[0].add(range(4), make_values(range(4)))

    child = start(hold)
    try:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(StoreError, match=SAID):
            write(tmp_path, range(4, 8))
        with pytest.raises(StoreError, match=SAID):
            StoreWriter(tmp_path).claim()
        assert sorted(tmp_path.rglob("*")) == before
        write(tmp_path, range(8, 12), name="other")
    finally:
        kill(child)
    write(tmp_path, range(4, 8))  # nobody has to clean up after a kill
    check_folder(tmp_path, range(4, 12))
    assert not list((tmp_path / "shards").glob(".*"))


def test_second_writer_of_the_same_process_is_refused(tmp_path: Path) -> None:
    first = StoreWriter(tmp_path)
    first.add(range(4), make_values(range(4)))
    with pytest.raises(StoreError, match="is being written by another writer of this process"):
        write(tmp_path, range(4, 8))
    del first  # forgotten and not closed: what it had gathered is gone, and the name is free
    write(tmp_path, range(4, 8))
    check_folder(tmp_path, range(4, 8))


def test_child_that_outlives_a_writer_does_not_hold_its_name(tmp_path: Path) -> None:
    kept: list[Any] = []

    def hold() -> None:
        kept.append(StoreWriter(tmp_path, group_bytes=1))
        kept[0].add(range(4), make_values(range(4)))
        kept.append(start(lambda: (tmp_path / "child").write_text(str(os.getpid())) and None))

    kill(start(hold))
    grandchild = int((tmp_path / "child").read_text())
    try:
        write(tmp_path, range(4, 8))
    finally:
        os.kill(grandchild, signal.SIGKILL)
    check_folder(tmp_path, range(4, 8))


def test_child_that_ends_leaves_the_name_to_its_parent(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, group_bytes=1) as writer:
        writer.add(range(4), make_values(range(4)))
        assert fork(locking._HELD.clear) == 0

        def refuse() -> None:
            with pytest.raises(StoreError, match=SAID):
                write(tmp_path, range(4, 8))

        assert fork(refuse) == 0
    check_folder(tmp_path, range(4))


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_written_all_the_same(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    write(tmp_path, range(4))
    theirs = tmp_path / "shards" / ".other-000000.safetensors.1.part"
    mine = tmp_path / "shards" / ".writer-000007.safetensors.1.part"
    for path in (theirs, mine):
        path.touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    write(tmp_path, range(4, 8))
    assert list((tmp_path / "shards").glob(".*")) == [theirs]  # it may be on its way
    theirs.unlink()
    check_folder(tmp_path, range(8))


def test_writer_that_waited_uses_no_number_again(tmp_path: Path) -> None:
    """Both looked for the next number before either had written."""
    first, second = StoreWriter(tmp_path, group_bytes=1), StoreWriter(tmp_path, group_bytes=1)
    for writer, ids in ((first, range(4)), (second, range(4, 8))):
        with writer:
            writer.add(ids, make_values(ids))
    check_folder(tmp_path, range(8))


def begin_large(folder: Path, name: str) -> StoreWriter:
    """Begin a shard that is on the disk before it is finished."""
    writer = StoreWriter(folder, name=name, group_bytes=1)
    for number in range(5):
        writer.add([number], {"x": torch.zeros(1, 1 << 20)})
    return writer


def test_what_a_dead_writer_has_begun_is_removed_by_any_other(tmp_path: Path) -> None:
    kept: list[StoreWriter] = []
    children = [
        start(lambda name=name: kept.append(begin_large(tmp_path, name)))  # type: ignore[misc]
        for name in ("rank0", "rank-1")
    ]
    parts = {one.name.split("-0")[0] for one in (tmp_path / "shards").glob(".*.part")}
    assert parts == {".rank0", ".rank-1"}
    StoreWriter(tmp_path, name="rank2")
    assert len(list((tmp_path / "shards").glob(".*.part"))) == 2  # both live
    kill(children[0])
    StoreWriter(tmp_path, name="rank2")
    (left,) = (tmp_path / "shards").glob(".*.part")
    assert left.name.startswith(".rank-1-")
    kill(children[1])
    StoreWriter(tmp_path, name="rank2")
    assert not list((tmp_path / "shards").glob(".*"))


def test_what_another_machine_has_begun_is_left_for_a_day(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    part = tmp_path / "shards" / ".rank1-000000.safetensors.1.part"
    lock = tmp_path / "shards" / ".rank1.lock"
    part.touch()
    lock.write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    for _ in range(2):
        StoreWriter(tmp_path)
        assert part.exists()
    os.utime(part, (0, time.time() - 90_000))
    StoreWriter(tmp_path)
    assert not list((tmp_path / "shards").glob(".*"))


def test_verify_leaves_what_somebody_writes(tmp_path: Path) -> None:
    """Also where the number of the process says nothing: it may be another machine's."""
    with begin_large(tmp_path, "writer"):
        (part,) = (tmp_path / "shards").glob(".*.part")
        part.rename(part.with_name(".writer-000000.safetensors.999999999.part"))
        assert verify(tmp_path, repair=True).is_good
        part.with_name(".writer-000000.safetensors.999999999.part").rename(part)
    assert verify(tmp_path).samples == 5
