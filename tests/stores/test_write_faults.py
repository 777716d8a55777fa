"""Disks that are full, read-only, slow, or cannot do what was asked; and nothing is left open."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_samples import (
    BLOCK,
    add_groups,
    check_folder,
    fork,
    make_values,
    use_small_stages,
    write_groups,
    write_samples,
)

from hookline._errors import RunWriteError
from hookline.stores import StoreWriter, direct_files, open_store
from hookline.stores.direct_files import DirectFile


@pytest.fixture
def small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small shards too grow on the disk, by a thread."""
    use_small_stages(monkeypatch)


def find_missing(where: Path, end: int) -> list[int]:
    """Give the samples that are not in a store yet."""
    done = set(StoreWriter(where).find_done().tolist())
    return [one for one in range(end) if one not in done]


def refuse(number: int, wanted: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Give a function that fails from the nth call on, as often as said."""
    calls = 0

    def work(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if count <= calls:
            raise OSError(number, os.strerror(number))
        return wanted(*given, **options)

    return work


@pytest.mark.parametrize("function", ["pwrite", "fsync", "ftruncate", "open", "replace"])
@pytest.mark.parametrize("at", [1, 2, 3, 7])
@pytest.mark.usefixtures("small_stages")
def test_full_disk_is_said_and_the_same_is_run_again(
    tmp_path: Path, function: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_groups(tmp_path, 0, 960)
    with monkeypatch.context() as patch:
        if function == "replace":
            patch.setattr(Path, "replace", refuse(errno.ENOSPC, Path.replace, at))
        else:
            target = refuse(errno.ENOSPC, getattr(os, function), at)
            patch.setattr(os, function, target)
        with pytest.raises(RunWriteError) as caught:
            write_groups(tmp_path, 960, 9600)
    assert re.fullmatch(
        rf"`{tmp_path}` cannot be written: No space left on device \([\d,]+ MiB are free there\)\. "
        "Every finished shard stays readable; make room or choose another folder, and run the same "
        r"again to go on\.",
        str(caught.value),
    )
    assert isinstance(caught.value.__cause__, OSError)
    missing = find_missing(tmp_path, 9600)
    assert len(missing) >= 480
    check_folder(tmp_path, set(range(9600)) - set(missing))
    write_samples(tmp_path, range(9600), each=960)
    check_folder(tmp_path, range(9600))


@pytest.mark.parametrize("function", ["open", "fsync"])
def test_full_disk_is_said_of_small_shards(
    tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(tmp_path, range(20))
    with monkeypatch.context() as patch:
        if function == "open":
            patch.setattr(Path, "open", refuse(errno.EDQUOT, Path.open, 6))
        else:
            patch.setattr(os, "fsync", refuse(errno.EDQUOT, os.fsync, 5))
        with pytest.raises(RunWriteError, match="cannot be written: Disk quota exceeded"):
            write_samples(tmp_path, range(60))
    missing = find_missing(tmp_path, 60)
    assert missing
    check_folder(tmp_path, set(range(60)) - set(missing))
    write_samples(tmp_path, range(60))
    check_folder(tmp_path, range(60))


@pytest.mark.usefixtures("small_stages")
def test_writer_that_goes_on_after_a_full_disk_says_nothing_untrue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was lost is not in the lines of the shards that came after."""
    writer = StoreWriter(tmp_path, group_bytes=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse(errno.ENOSPC, os.pwrite, 2))
        with pytest.raises(RunWriteError):
            add_groups(writer, 0, 9600)
    writer.add(range(9600, 9616), make_values(range(9600, 9616)))
    writer.close()
    assert writer.find_done().tolist() == list(range(9600, 9616))
    assert writer.samples == 16
    check_folder(tmp_path, range(9600, 9616))


def test_index_that_cannot_be_written_costs_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = StoreWriter(tmp_path)
    writer.add(range(4), make_values(range(4)))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse(errno.ENOSPC, Path.open, 2))
        with pytest.raises(RunWriteError, match="No space"):
            writer.finish_shard()
    assert writer.samples == 4
    assert writer.find_done().tolist() == [0, 1, 2, 3]
    writer.add(range(4, 8), make_values(range(4, 8)))
    writer.close()
    check_folder(tmp_path, range(8))


@pytest.mark.parametrize("limit", [3 * BLOCK, 5 * BLOCK + 1000, 8 * BLOCK - 8])
@pytest.mark.usefixtures("small_stages")
def test_file_that_may_not_grow_is_discarded(tmp_path: Path, limit: int) -> None:
    """The limit of the process is what comes closest to a full disk: writes end inside of it."""
    write_groups(tmp_path, 0, 16)
    message = tmp_path / "message"

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            write_groups(tmp_path, 16, 9600)
        except RunWriteError as error:
            message.write_text(str(error))

    assert fork(write) == 0
    assert f"`{tmp_path}` cannot be written: File too large" in message.read_text()
    check_folder(tmp_path, range(16))
    write_samples(tmp_path, range(9600), each=960)
    check_folder(tmp_path, range(9600))


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_folder_that_is_read_only_is_said(tmp_path: Path) -> None:
    write_samples(tmp_path, range(4))
    (tmp_path / "shards" / ".writer-000001.safetensors.1.part").touch()
    (tmp_path / "shards").chmod(0o555)
    try:
        with pytest.raises(RunWriteError, match=r"cannot be written: Permission denied"):
            write_samples(tmp_path, range(8))
    finally:
        (tmp_path / "shards").chmod(0o755)
    write_samples(tmp_path, range(8))
    check_folder(tmp_path, range(8))


@pytest.mark.parametrize("function", ["mkdir", "open", "unlink"])
def test_file_system_that_is_read_only_is_said(
    tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(tmp_path, range(4))
    (tmp_path / "shards" / ".writer-000001.safetensors.1.part").touch()
    wanted = getattr(Path, function)

    def work(path: Path, *given: Any, **options: Any) -> Any:
        is_reading = function == "open" and given[:1] in ((), ("rb",))
        if is_reading or not path.is_relative_to(tmp_path):
            return wanted(path, *given, **options)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, function, work)
        with pytest.raises(RunWriteError, match=f"`{tmp_path}` .*: Read-only file system"):
            write_samples(tmp_path, range(8))
    write_samples(tmp_path, range(8))
    check_folder(tmp_path, range(8))


def test_file_in_the_place_of_the_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("something")
    with pytest.raises(RunWriteError, match=f"`{tmp_path}/file` cannot be written"):
        write_samples(tmp_path / "file", range(4))


SIZES = [1, 63, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK, 9 * BLOCK + 77, 100_000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("small_stages")
def test_file_holds_what_was_appended(tmp_path: Path, size: int) -> None:
    check_direct_file(tmp_path / "file", size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("small_stages")
def test_file_system_without_direct_writes_is_written_through_its_cache(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, flags_seen = os.open, []

    def work(path: Any, flags: int, *given: Any) -> int:
        flags_seen.append(flags)
        if flags & os.O_DIRECT:
            os.close(wanted(path, flags & ~os.O_DIRECT, *given))  # as some do before they refuse
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return wanted(path, flags, *given)

    monkeypatch.setattr(os, "open", work)
    check_direct_file(tmp_path / "file", size)
    assert len(flags_seen) == (2 if size >= 2 * BLOCK else 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("small_stages")
def test_file_system_that_refuses_direct_writes_late_is_written_through_its_cache(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    wanted = os.pwrite

    def work(handle: int, data: Any, at: int) -> int:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return wanted(handle, data, at)

    monkeypatch.setattr(os, "pwrite", work)
    check_direct_file(tmp_path / "file", size)


@pytest.mark.parametrize("most", [1000, BLOCK, BLOCK + 1])
@pytest.mark.usefixtures("small_stages")
def test_writes_that_end_early_are_gone_on_with(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    wanted = os.pwrite

    def work(handle: int, data: Any, at: int) -> int:
        if most % BLOCK:
            flags = fcntl.fcntl(handle, fcntl.F_GETFL)
            assert not (flags & os.O_DIRECT) or not at % BLOCK
            fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return wanted(handle, data[:most], at)

    monkeypatch.setattr(os, "pwrite", work)
    check_direct_file(tmp_path / "file", 100_000)


@pytest.mark.usefixtures("small_stages")
def test_disk_that_takes_nothing_is_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(RunWriteError, match="the disk took none of"):
        write_groups(tmp_path, 0, 9600)


@pytest.mark.usefixtures("small_stages")
def test_stage_is_not_filled_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = os.pwrite

    def work(handle: int, data: Any, at: int) -> int:
        time.sleep(0.02)
        return wanted(handle, data, at)

    monkeypatch.setattr(os, "pwrite", work)
    check_direct_file(tmp_path / "file", 100_000)


def check_direct_file(path: Path, size: int) -> None:
    """Write a file in odd pieces, and compare it with what went in."""
    data = torch.randint(256, (size,), dtype=torch.uint8).numpy().tobytes()
    file = DirectFile(path, 2 * BLOCK)
    step = max(size // 7, 1)
    for at in range(0, size, step):
        file.append(data[at : at + step])
    assert file.size == size
    head = (b"a short head" if file.is_small else b"head").ljust(64 if file.is_small else 2 * BLOCK)
    file.finish(head)
    assert path.read_bytes() == head + data


@pytest.mark.usefixtures("small_stages")
def test_file_that_failed_is_never_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that did not reach the disk would be a hole in it."""
    wanted, calls = os.pwrite, []

    def work(*given: Any) -> int:
        calls.append(given)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return wanted(*given)

    monkeypatch.setattr(os, "pwrite", work)
    before = count_open()
    file = DirectFile(tmp_path / "file", 2 * BLOCK)
    with pytest.raises(OSError, match="No space"):
        file.append(bytes(10 * BLOCK))
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            file.append(bytes(10 * BLOCK))
        with pytest.raises(OSError, match="No space"):
            file.finish(bytes(2 * BLOCK))
    file.discard()
    file.discard()
    assert count_open() == before
    assert list(tmp_path.iterdir()) == []


def test_file_of_somebody_else_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("something")
    with pytest.raises(FileExistsError):
        direct_files._open_direct(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "something"


def count_open() -> tuple[int, int]:
    """Give how many descriptors this process has open, and how many of its threads write."""
    names = [one.name for one in threading.enumerate()]
    writing = [one for one in names if one.startswith(("hookline-write", "hookline-store"))]
    return len(list(Path("/proc/self/fd").iterdir())), len(writing)


def count_maps() -> int:
    """Give how many stages this process has in its memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/dev/zero" in line or "zero (deleted)" in line for line in lines)


@pytest.mark.usefixtures("small_stages")
def test_many_shards_leave_nothing_open(tmp_path: Path) -> None:
    write_groups(tmp_path, 0, 480)
    gc.collect()
    before, maps = count_open(), count_maps()
    write_groups(tmp_path, 480, 480 + 200 * 160, groups=1, name="many")
    assert count_open() == before
    assert count_maps() == maps
    assert len(list((tmp_path / "shards").iterdir())) == 201
    check_folder(tmp_path, range(480 + 200 * 160))


@pytest.mark.parametrize("function", ["pwrite", "fsync", "ftruncate"])
@pytest.mark.usefixtures("small_stages")
def test_shards_that_fail_leave_nothing_open(
    tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_groups(tmp_path, 0, 480)
    gc.collect()
    before, maps = count_open(), count_maps()
    target = refuse(errno.ENOSPC, getattr(os, function), 1)
    for _ in range(20):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, target)
            with pytest.raises(RunWriteError):
                write_groups(tmp_path, 480, 1440)
    assert count_open() == before
    gc.collect()  # an error holds frames that hold a stage
    assert count_maps() == maps
    check_folder(tmp_path, range(480))


def test_error_that_cannot_be_helped_keeps_the_groups_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that fails gives nothing more; what it gave before is kept."""
    writer = StoreWriter(tmp_path, group_bytes=1)
    writer.add(range(4), make_values(range(4)))

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(torch.Tensor, "cpu", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        writer.add(range(4, 8), make_values(range(4, 8)))
    monkeypatch.undo()
    monkeypatch.setattr("hookline.stores.writing._join", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        writer.close()
    monkeypatch.undo()
    check_folder(tmp_path, range(4))


def test_failure_at_the_end_is_noted_at_the_error_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refuse(errno.ENOSPC, os.fsync, 2))

    def work() -> None:
        with StoreWriter(tmp_path) as writer:
            writer.add(range(4), make_values(range(4)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        work()
    (note,) = caught.value.__notes__
    assert note.startswith(f"What came last is not in `{tmp_path}`: `{tmp_path}` cannot be written")


def test_slow_small_samples_do_not_wait_for_a_whole_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash costs no more than `shard_seconds` of work, however few bytes that was."""
    now = 0.0
    monkeypatch.setattr("hookline.stores.writing.time.monotonic", lambda: now)
    writer = StoreWriter(tmp_path, shard_seconds=60.0)
    for second in range(0, 150, 10):
        now = float(second)
        writer.add([second], make_values([second]))
    assert writer.find_done().tolist() == list(range(0, 140, 10))
    assert len(open_store(tmp_path).shards) == 2
    writer.close()
    check_folder(tmp_path, range(0, 150, 10))


def test_writers_with_names_alike_leave_each_other_alone(tmp_path: Path) -> None:
    first = StoreWriter(tmp_path, name="w-2", group_bytes=1)
    first.add(range(4), make_values(range(4)))
    (tmp_path / "shards" / ".w-2-000000.safetensors.1.part").touch()
    write_samples(tmp_path, range(8, 12), name="w")
    assert (tmp_path / "shards" / ".w-2-000000.safetensors.1.part").exists()
    first.close()
    write_samples(tmp_path, range(12, 16), name="w-2")
    check_folder(tmp_path, [*range(4), *range(8, 16)])


def test_writer_with_dots_in_its_name_is_resumed(tmp_path: Path) -> None:
    write_samples(tmp_path, range(8), name="node.7")
    write_samples(tmp_path, range(16), name="node.7")
    check_folder(tmp_path, range(16))


def test_values_of_inference_mode_are_written(tmp_path: Path) -> None:
    with torch.inference_mode(), StoreWriter(tmp_path, group_bytes=1) as writer:
        writer.add(range(8), make_values(range(8)))
    check_folder(tmp_path, range(8))
