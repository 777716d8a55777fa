"""Samples that were left out of a store: noted by each writer, and read over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hookline as hl
from hookline.stores.failures import FailureLog
from hookline.stores.places import open_place


@pytest.fixture(params=["folder", "memory"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Give a place for a store."""
    if request.param == "folder":
        yield str(tmp_path / "store")
        return
    fsspec = pytest.importorskip("fsspec")
    yield "memory://failures"
    fsspec.filesystem("memory").rm("/failures", recursive=True)


def test_failures_of_all_writers_are_read_but_for_samples_that_are_there(where: str) -> None:
    first = FailureLog(open_place(where), "rank0")
    first.write({7: "no store yet"})
    with hl.StoreWriter(where) as writer:
        writer.add([0, 1, 2], {"x": torch.zeros(3, 2)})
    first.write({7: "ValueError: a\nb", 2: "it was read later"})
    first.write({7: "ValueError: a\nb", 5: "x" * 5000})
    FailureLog(open_place(where), "rank1").write({4: "OSError: gone"})
    found = hl.open_store(where).failed
    assert list(found) == [4, 5, 7]
    assert found[7] == "ValueError: a\nb"
    assert len(found[5]) == 1000
    place = open_place(where)
    assert place.names("failed") == ["rank0.jsonl", "rank1.jsonl"]
    assert len(place.read("failed/rank0.jsonl").splitlines()) == 2  # 7 once
    verdict = hl.stores.verify(where)
    assert verdict.is_good
    assert verdict.failed == found


def test_lines_that_are_none_are_left_out(tmp_path: Path) -> None:
    with hl.StoreWriter(tmp_path) as writer:
        writer.add([0], {"x": torch.zeros(1, 2)})
    FailureLog(open_place(tmp_path), "a").write({4: "OSError: gone"})
    with (tmp_path / "failed" / "a.jsonl").open("a") as file:
        file.write('[1]\n{"failed": 3}\n{"failed": [["x", 1]]}\n{"failed": [[5, "cut of')
    assert hl.open_store(tmp_path).failed == {4: "OSError: gone"}
