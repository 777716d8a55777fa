"""Opening a store from afar: few requests, and many of them on their way at once."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from made_stores import change_head, fill, list_files, make_store

from hookline._errors import CorruptShard
from hookline.stores import StoreWriter, open_store, store, writing
from hookline.stores.places import LocalPlace

TOGETHER = 4
"""So many requests have to be under way before any of them is answered."""


class Afar(LocalPlace):
    """A folder as one that is not on this machine; counts what it is asked for."""

    local = None  # type: ignore[assignment]

    def __init__(self, where: Any, waits: bool) -> None:
        self._near = LocalPlace(Path(where))
        self.name = "afar://store"
        self.asked: Counter[str] = Counter()
        self.threads: set[str] = set()
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(TOGETHER) if waits else None

    def _note(self, what: str) -> None:
        with self._lock:
            self.asked[what] += 1
            self.threads.add(threading.current_thread().name)

    def names(self, folder: str) -> list[str]:
        return self._near.names(folder)

    def size(self, name: str) -> int:
        self._note("size")
        if self._barrier is not None:
            self._barrier.wait(10.0)  # raises, if nobody else comes
        return self._near.size(name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        self._note("read" if name.startswith("shards") else "about")
        return self._near.read(name, begin, end)

    def read_many(self, parts: Any) -> list[bytes]:
        self._note("many")
        return self._near.read_many(parts)


@pytest.fixture
def afar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Afar]:
    """Have a store of eight shards opened as if it were far away; give the places."""
    fill(tmp_path, range(8 * TOGETHER), shard_bytes=1, group_bytes=1, batch=4)
    assert len(list_files(tmp_path)) == 2 * TOGETHER
    places: list[Afar] = []

    def place(where: Any) -> Afar:
        places.append(Afar(where, waits=True))
        return places[-1]

    for module in (store, writing):
        monkeypatch.setattr(module, "open_place", place)
    return places


def test_heads_are_read_at_once_and_in_order(tmp_path: Path, afar: list[Afar]) -> None:
    found = open_store(tmp_path)
    assert [one.file for one in found.shards] == [one.name for one in list_files(tmp_path)]
    assert afar[0].asked == {"about": 1, "size": 2 * TOGETHER, "read": 2 * TOGETHER}
    assert len(afar[0].threads) > TOGETHER - 1
    assert found.ids.tolist() == list(range(8 * TOGETHER))
    assert afar[0].asked["many"] == 1


def test_shards_without_a_line_are_asked_at_once(tmp_path: Path, afar: list[Afar]) -> None:
    (tmp_path / "index" / "writer.jsonl").unlink()
    assert StoreWriter(tmp_path).find_done().tolist() == list(range(8 * TOGETHER))
    assert afar[0].asked["size"] == afar[0].asked["read"] == 2 * TOGETHER


def test_a_damaged_head_is_told(tmp_path: Path, afar: list[Afar]) -> None:
    damaged = list_files(tmp_path)[1]
    change_head(damaged, lambda head, told: told.pop("groups"))
    with pytest.raises(CorruptShard, match=f"`shards/{damaged.name}` in `afar://store`"):
        open_store(tmp_path)
    assert not [one for one in threading.enumerate() if one.name.startswith("hookline-heads")]


def test_a_store_on_this_machine_starts_no_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    assert len(make_store(tmp_path)) == 20
    assert threading.active_count() == before
