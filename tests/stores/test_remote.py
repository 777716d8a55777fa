"""Stores that are not on this machine: in the memory of fsspec, and on a server of S3."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import pickle
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from made_samples import check_samples, make_row, make_values, make_words, write_samples

from hookline._errors import NoSuchRun, RunWriteError
from hookline.stores import StoreWriter, open_store, places
from hookline.stores.indexing import read_index
from hookline.stores.places import RemotePlace, open_place

_buckets = (f"bucket-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    from s3_server import run_server

    with run_server() as found:
        yield found


@pytest.fixture
def bucket(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the address of an empty bucket, and who is to find it."""
    import s3fs

    settings = {
        "AWS_ENDPOINT_URL": server.address,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_MAX_ATTEMPTS": "1",  # so that it is the store that tries again
        "NO_PROXY": "127.0.0.1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = next(_buckets)
    server.make_bucket(name)
    yield f"s3://{name}"
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def memory() -> Iterator[str]:
    """Give the address of an empty folder in memory."""
    files = fsspec.filesystem("memory")
    yield "memory://made"
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "bucket"])
def where(request: pytest.FixtureRequest) -> str:
    """Give the address of a store that is not there yet."""
    return f"{request.getfixturevalue(request.param)}/some/features"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have nobody wait between two tries; give how long they would have."""
    found: list[float] = []
    monkeypatch.setattr("hookline.stores.places.time.sleep", found.append)
    return found


def test_remote_store_is_written_and_read(where: str) -> None:
    assert write_samples(where, range(40)) == 40
    store = check_samples(where, range(40))
    assert len(store.shards) == 10
    ids = random.Random(0).choices(range(40), k=100)
    assert torch.equal(store["mlp"][ids], torch.stack([make_row(one) for one in ids]))
    words = store["words"].of(ids)
    assert all(torch.equal(a, make_words(b)) for a, b in zip(words, ids, strict=True))
    assert torch.equal(
        store["mlp"][5:31:3], torch.stack([make_row(one) for one in range(5, 31, 3)])
    )
    assert torch.equal(store["mlp"][-1], make_row(39))
    assert store["mlp"][3:3].shape == (0, 8)
    assert [len(one) for one in store["words"][7:12]] == [3, 0, 1, 2, 3]
    assert [len(one) for one in store["mlp"].batches(16)] == [16, 16, 8]


def test_remote_store_is_resumed(where: str) -> None:
    assert write_samples(where, range(0, 40, 2)) == 20
    assert write_samples(where, range(40)) == 20
    assert write_samples(where, range(40)) == 0
    check_samples(where, range(40))
    place = open_place(where)
    assert sorted(read_index(place)) == place.names("shards")
    lines = place.read("index/writer.jsonl").decode().splitlines()
    assert sum(json.loads(one)["samples"] for one in lines) == 40


def test_remote_store_has_several_writers(where: str) -> None:
    first, second = StoreWriter(where, name="rank-0"), StoreWriter(where, name="rank-1")
    for begin in range(0, 40, 4):
        writer = second if begin % 8 else first
        writer.add(range(begin, begin + 4), make_values(range(begin, begin + 4)))
        writer.finish_shard()
    first.close()
    second.close()
    check_samples(where, range(40))
    assert open_place(where).names("index") == ["rank-0.jsonl", "rank-1.jsonl"]


def test_shard_without_a_line_counts_as_done(where: str) -> None:
    write_samples(where, range(8))
    open_place(where).remove("index/writer.jsonl")
    assert write_samples(where, range(12)) == 4
    check_samples(where, range(12))


def test_large_shard_goes_where_it_belongs(memory: str) -> None:
    rows = torch.randn(5, 1 << 20)  # 20 MiB: more than is kept in memory before it is complete
    with StoreWriter(memory) as writer:
        writer.add(range(5), {"rows": rows})
        folder = writer.place.working_folder()
        writer.finish_shard()
        assert list(folder.iterdir()) == []
    assert torch.equal(open_store(memory)["rows"][:], rows)


def test_store_that_is_not_there_is_said(where: str) -> None:
    with pytest.raises(NoSuchRun, match=f"`{where}` holds no tensor store"):
        open_store(where)


def test_bucket_that_is_not_there_is_said_at_once(bucket: str, pauses: list[float]) -> None:
    with pytest.raises(RunWriteError, match=r"`s3://nobodys-bucket/x` cannot be written: .*exist"):
        write_samples("s3://nobodys-bucket/x", range(4))
    assert pauses == []


def test_root_of_a_place_can_be_a_store(memory: str, tmp_path: Path) -> None:
    write_samples("memory://", range(8))
    assert check_samples("memory:///", range(8)).place.name == "memory://"
    assert fsspec.filesystem("memory").exists("/store.json")


def test_folders_that_are_objects_are_no_files(server: Any, bucket: str) -> None:
    """Some programs put an empty object where a folder is."""
    write_samples(f"{bucket}/x", range(8))
    for name in ("x/", "x/shards/", "x/index/"):
        server.put(f"{bucket.removeprefix('s3://')}/{name}", b"")
    assert write_samples(f"{bucket}/x", range(12)) == 4
    check_samples(f"{bucket}/x", range(12))


def _read_in_child(store: Any, out: Any) -> None:
    out.put(store["mlp"][[3, 30, 7]].tolist())


def test_forked_process_reads_through_connections_of_its_own(bucket: str) -> None:
    write_samples(f"{bucket}/x", range(40))
    store = check_samples(f"{bucket}/x", range(40))
    context = multiprocessing.get_context("fork")
    out = context.SimpleQueue()
    child = context.Process(target=_read_in_child, args=(store, out))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert out.get() == [make_row(one).tolist() for one in (3, 30, 7)]
    assert torch.equal(store["mlp"][39], make_row(39))


def test_store_travels_to_another_process(where: str) -> None:
    write_samples(where, range(12))
    store = pickle.loads(pickle.dumps(open_store(where)))
    assert torch.equal(store["mlp"][[11, 0]], torch.stack([make_row(11), make_row(0)]))


def test_one_request_in_ten_fails_and_nothing_is_lost(
    server: Any, bucket: str, pauses: list[float]
) -> None:
    with server.fail(0.1):
        write_samples(f"{bucket}/x", range(100))
        assert write_samples(f"{bucket}/x", range(200)) == 100
        store = check_samples(f"{bucket}/x", range(200))
        ids = random.Random(0).choices(range(200), k=400)
        assert torch.equal(store["mlp"][ids], torch.stack([make_row(one) for one in ids]))
    assert len(store.shards) == 50
    assert len(server.failed) > 20
    assert set(server.failed) == {"refuse", "lose", "cut"}
    check_samples(f"{bucket}/x", range(200))


def test_server_that_always_fails_is_given_up(
    server: Any, bucket: str, pauses: list[float]
) -> None:
    where = f"{bucket}/x"
    write_samples(where, range(8))
    writer = StoreWriter(where)
    writer.add(range(8, 12), make_values(range(8, 12)))
    folder = writer.place.working_folder()
    with server.fail(1.0, "refuse"), pytest.raises(RunWriteError) as caught:
        writer.close()
    text = str(caught.value)
    assert text.startswith(f"`{where}` failed 6 times: ")
    assert text.endswith("run the same again to go on once it answers.")
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2]
    assert server.failed == ["refuse"] * server.requests
    assert server.requests >= 6
    assert list(folder.iterdir()) == []
    check_samples(where, range(8))
    assert write_samples(where, range(16)) == 8
    check_samples(where, range(16))


def test_server_that_always_fails_cannot_be_read(
    server: Any, bucket: str, pauses: list[float]
) -> None:
    write_samples(f"{bucket}/x", range(8))
    store = open_store(f"{bucket}/x")
    with server.fail(1.0):
        with pytest.raises(RunWriteError, match="failed 6 times"):
            store["mlp"][[0, 7]]
        with pytest.raises(RunWriteError, match="failed 6 times"):
            open_store(f"{bucket}/x")
    check_samples(f"{bucket}/x", range(8))


class Failing:
    """Fail the first times that a method of a file system is called, before its work or after."""

    def __init__(self, method: Callable[..., Any], times: int, *, is_late: bool) -> None:
        self._method, self._is_late = method, is_late
        self.left = times

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            return self._method(*args, **options)
        if self._is_late:
            self._method(*args, **options)
        raise TimeoutError("no answer")


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "method", ["ls", "cat_file", "cat_ranges", "info", "pipe_file", "put_file", "rm_file", "mv"]
)
def test_every_request_is_tried_again(
    memory: str, method: str, is_late: bool, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(memory, range(12))
    files = fsspec.filesystem("memory")
    failing = Failing(getattr(files, method), 2, is_late=is_late)
    monkeypatch.setattr(files, method, failing)
    assert write_samples(memory, range(16)) == 4
    store = check_samples(memory, range(16))
    assert torch.equal(store["mlp"][[15, 1]], torch.stack([make_row(15), make_row(1)]))
    place = open_place(memory)
    assert place.exists("store.json")
    place.move("store.json", "aside/store.json")
    place.remove("index/writer.jsonl")
    place.remove("index/writer.jsonl")
    assert failing.left < 2
    assert pauses
    assert place.names("aside") == ["store.json"]
    assert not place.exists("store.json")
    assert not place.exists("index/writer.jsonl")


def test_file_that_is_not_there_cannot_be_moved(memory: str, pauses: list[float]) -> None:
    write_samples(memory, range(4))
    with pytest.raises(RunWriteError):
        open_place(memory).move("nothing", "aside/nothing")
    assert pauses == []


def test_pieces_that_came_are_not_asked_for_again(
    memory: str, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(memory, range(40))
    store = open_store(memory)
    files = fsspec.filesystem("memory")
    cat_ranges, asked = files.cat_ranges, []

    def answer_some(paths: list[str], *args: Any, **options: Any) -> list[Any]:
        asked.append(len(paths))
        found = cat_ranges(paths, *args, **options)
        if len(asked) < 3:
            found[1::2] = [TimeoutError("no answer")] * len(found[1::2])
        return list(found)

    assert len(store) == 40
    monkeypatch.setattr(files, "cat_ranges", answer_some)
    ids = list(range(0, 40, 5))
    assert torch.equal(store["mlp"][ids], torch.stack([make_row(one) for one in ids]))
    assert asked == [8, 4, 2]


def test_working_folder_goes_with_the_writer(memory: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer = StoreWriter(memory)
        writer.add(range(4), make_values(range(4)))
        writer.close()
        folder = writer.place.working_folder()
        assert folder.is_dir()
        del writer
        gc.collect()
    assert not folder.exists()


def test_full_disk_of_this_machine_is_not_blamed_on_the_server(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hookline.stores.direct_files.os.fsync", refuse)
    with pytest.raises(
        RunWriteError, match=f"`{tmp_path}/hookline-.*` cannot be written: No space"
    ):
        write_samples(memory, range(4))


def test_pauses_grow(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_FIRST_PAUSE", 0.001)
    place = RemotePlace(memory)
    files = fsspec.filesystem("memory")
    monkeypatch.setattr(files, "pipe_file", Failing(files.pipe_file, 5, is_late=False))
    begun = time.monotonic()
    place.write("some", b"bytes")
    assert time.monotonic() - begun >= 0.031
    assert place.read("some") == b"bytes"
