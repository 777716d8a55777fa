"""Samples of objects: data sets, sequences and streams."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_data import Counting, Squares
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hookline._errors import HooklineError
from hookline.extractions.sources import Broken, SampleError, Wanted, open_source

EVERYTHING = Wanted.everything()


def read(data: Any, wanted: Wanted = EVERYTHING, **options: Any) -> list[tuple[Any, Any]]:
    """Read the wanted samples of data."""
    return list(open_source(data, **options).samples(wanted))


SEQUENCES = {
    "list": [10, 11, 12, 13, 14],
    "tuple": (10, 11, 12, 13, 14),
    "range": range(10, 15),
    "deque": deque([10, 11, 12, 13, 14]),
    "tensor": torch.arange(10, 15),
    "array": np.arange(10, 15),
}


@pytest.mark.parametrize("kind", SEQUENCES)
def test_sequence_is_read_by_position(kind: str) -> None:
    source = open_source(SEQUENCES[kind])
    assert source.size == 5
    assert source.is_repeatable
    assert not source.is_batched
    assert list(source.samples(EVERYTHING)) == [(0, 10), (1, 11), (2, 12), (3, 13), (4, 14)]
    assert list(source.samples(Wanted.of_ranges([(3, 99), (1, 2)]))) == [(1, 11), (3, 13), (4, 14)]


def test_tensor_gives_rows() -> None:
    x = torch.randn(3, 2, 4)
    found = read(x)
    assert [number for number, _ in found] == [0, 1, 2]
    assert torch.equal(found[2][1], x[2])
    (tensors,) = [sample for number, sample in read(TensorDataset(x, x + 1)) if number == 1]
    assert torch.equal(tensors[1], x[1] + 1)


def test_data_set_is_touched_where_it_is_wanted_and_nowhere_else() -> None:
    data = Squares()
    source = open_source(data)
    assert data.taken == []
    wanted = Wanted.of_ranges([(2, 4), (7, 9)]).without(np.array([3]))
    assert list(source.samples(wanted)) == [(2, 4), (7, 49), (8, 64)]
    assert data.taken == [2, 7, 8]


def test_broken_sample_is_given_as_such_and_the_rest_is_read() -> None:
    found = dict(read(Squares(broken=4)))
    assert list(found) == list(range(10))
    assert found[5] == 25
    broken = found[4]
    assert isinstance(broken, Broken)
    assert str(broken.error) == "sample 4 cannot be read: OSError: the disk is gone"
    assert isinstance(broken.error, SampleError)
    assert isinstance(broken.error, HooklineError)
    assert broken.error.id == 4
    assert broken.error.__cause__ is broken.error.cause
    assert str(pickle.loads(pickle.dumps(broken.error))) == str(broken.error)


def test_column_picks_a_field() -> None:
    data: list[Any] = [{"text": "a", "n": 1}, {"n": 2}, 3]
    found = read(data, column="text")
    assert found[0] == (0, "a")
    assert "'text' is not among the fields: n" in str(found[1][1].error)
    assert "this one is a `int`" in str(found[2][1].error)


@given(
    st.integers(0, 40),
    st.lists(st.integers(0, 39), max_size=20),
    st.integers(1, 4),
    st.sampled_from(["rows", "stream"]),
)
def test_ranks_that_resume_read_every_sample_once(
    size: int, done: list[int], world: int, kind: str
) -> None:
    data = list(range(size)) if kind == "rows" else Counting(size)
    wanted = EVERYTHING.without(np.array(done, dtype=np.int64))
    found = [read(data, wanted.share(rank, world, block=4)) for rank in range(world)]
    assert all(number == sample for part in found for number, sample in part)
    assert all(part == sorted(part) for part in found)
    ids = sorted(number for part in found for number, _ in part)
    assert ids == sorted(set(range(size)) - set(done))


def test_stream_is_read_no_further_than_wanted() -> None:
    data = Counting(100)
    source = open_source(data)
    assert source.size is None
    assert list(source.samples(Wanted.of_ranges([(3, 5), (8, 9)]))) == [(3, 3), (4, 4), (8, 8)]
    assert data.taken == 9
    assert list(source.samples(Wanted.of_ranges([]))) == []
    assert len(list(source.samples(EVERYTHING))) == 100
    data.taken = 0
    nothing = EVERYTHING.share(0, 2).without(EVERYTHING.share(0, 2))
    assert list(source.samples(nothing)) == []


def test_long_stream_keeps_its_ids() -> None:
    wanted = Wanted.of_ranges([(16_380, 16_390), (40_000, None)])
    found = read(Counting(40_002), wanted)
    assert [number for number, _ in found] == [*range(16_380, 16_390), 40_000, 40_001]
    assert all(number == sample for number, sample in found)


def test_iterator_is_read_once() -> None:
    source = open_source(number**2 for number in range(4))
    assert not source.is_repeatable
    assert list(source.samples(Wanted.of_ranges([(2, None)]))) == [(2, 4), (3, 9)]
    with pytest.raises(RuntimeError, match="can be read once only"):
        list(source.samples(EVERYTHING))


def test_iterable_of_its_own_is_read_again() -> None:
    class Letters:
        def __iter__(self) -> Iterator[str]:
            yield from "abc"

    source = open_source(Letters())
    assert source.is_repeatable
    assert source.name == "Letters"
    for _ in range(2):
        assert list(source.samples(EVERYTHING)) == [(0, "a"), (1, "b"), (2, "c")]
    assert open_source({1: "a", 2: "b"}.values()).size == 2


def test_error_of_an_iterator_is_passed_on() -> None:
    def fail() -> Iterator[int]:
        yield 1
        raise OSError("the line is cut")

    found = open_source(fail()).samples(EVERYTHING)
    assert next(found) == (0, 1)
    with pytest.raises(OSError, match="the line is cut"):
        next(found)


def test_fingerprint_tells_other_data_apart() -> None:
    given: list[Any] = [
        [1, 2],
        [1, 2, 3],
        (1, 2),
        torch.zeros(2),
        torch.zeros(2, 3),
        torch.zeros(2).double(),
        np.zeros(2),
        Squares(),
        Counting(3),
        DataLoader(Squares()),
        DataLoader(Counting(3)),
        DataLoader(Counting(3), num_workers=2),
    ]
    texts = [open_source(data).fingerprint() for data in given]
    texts.append(open_source([1, 2], column="x").fingerprint())
    assert len(set(texts)) == len(texts)
    assert open_source([3, 4]).fingerprint() == open_source([1, 2]).fingerprint()


def test_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "import torch; from hookline.extractions.sources import open_source; "
        "print(open_source(torch.zeros(4, 2), column='x').fingerprint())"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == open_source(torch.zeros(4, 2), column="x").fingerprint()


class Frame:
    """A table in the manner of pandas."""

    iloc = None

    def __len__(self) -> int:
        return 2

    def __getitem__(self, name: str) -> str:
        return name


class Endless(Dataset[int]):
    """A data set without a length."""

    def __getitem__(self, number: int) -> int:
        return number


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (5, "no samples come from a `int`; give a data set, a list"),
        (None, "no samples come from a `NoneType`"),
        (lambda: [1], r"`function` \(call it first\)"),
        ({"train": [1], "test": [2]}, r"with 'train', 'test' .* data\[\"train\"\]"),
        ({1, 2}, r"give sorted\(data\)"),
        (b"abc", "no samples come from `bytes`"),
        (Frame(), r"data\.to_dict\('records'\)"),
        (Endless(), "`Endless` has no `__len__`"),
    ],
)
def test_what_holds_no_samples_is_refused(data: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        open_source(data)


def test_tensor_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no rows"):
        open_source(torch.tensor(1.0))


def test_hugging_face_rows_are_read_by_position() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": list("abcd"), "tokens": [[1], [1, 2], [], [3]]})
    source = open_source(data)
    assert source.size == 4
    found = list(source.samples(Wanted.of_ranges([(1, 3)])))
    assert found == [(1, {"text": "b", "tokens": [1, 2]}), (2, {"text": "c", "tokens": []})]
    assert read(data, column="text") == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert source.fingerprint() != open_source(data.rename_column("text", "t")).fingerprint()
    with pytest.raises(ValueError, match="not among the columns: text, tokens"):
        open_source(data, column="words")
    with pytest.raises(TypeError, match=r"data\[\"train\"\]"):
        open_source(datasets.DatasetDict(train=data))


def test_hugging_face_stream_is_read_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"n": list(range(9)), "m": list(range(9))})
    stream = data.to_iterable_dataset()
    source = open_source(stream, column="n")
    assert source.size is None
    assert source.is_repeatable
    for _ in range(2):
        found = list(source.samples(Wanted.of_ranges([(4, 6), (8, None)])))
        assert found == [(4, 4), (5, 5), (8, 8)]
    skipped = []
    skip = type(stream).skip

    def note(self: Any, count: int) -> Any:
        skipped.append(count)
        return skip(self, count)

    monkeypatch.setattr(type(stream), "skip", note)
    assert read(stream, Wanted.of_ranges([(8, None)])) == [(8, {"n": 8, "m": 8})]
    assert skipped == [8]
