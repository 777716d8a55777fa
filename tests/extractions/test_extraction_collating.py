"""Batches: stacked, padded, cut in two, moved, and turned into arguments."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookline.extractions.collating import Padded, call_with, collate, move, size_of, split

Pair = namedtuple("Pair", ["image", "label"])


def test_tensors_of_one_shape_are_stacked() -> None:
    tensors = [torch.randn(3, 4) for _ in range(5)]
    assert torch.equal(collate(tensors), torch.stack(tensors))
    halves = [torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()]
    assert collate(halves).dtype == torch.bfloat16


def test_arrays_and_numbers_become_tensors() -> None:
    arrays = [np.arange(6, dtype=np.int16).reshape(2, 3) + number for number in range(2)]
    assert collate(arrays).dtype == torch.int16
    assert torch.equal(collate(arrays), torch.from_numpy(np.stack(arrays)))
    assert torch.equal(collate([3, 1, 2]), torch.tensor([3, 1, 2]))
    assert torch.equal(collate([1, 0.5]), torch.tensor([1, 0.5]))
    assert torch.equal(collate([True, False]), torch.tensor([True, False]))
    assert collate([np.float64(1), np.float64(2)]).dtype == torch.float64


def test_arrays_that_torch_does_not_take_as_they_lie_are_copied() -> None:
    array = np.arange(4, dtype=np.int32)
    array.flags.writeable = False
    assert collate([array, array[::-1]]).tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert collate([array.astype(">i4")]).tolist() == [[0, 1, 2, 3]]
    assert np.arange(3)[::-1].flags.writeable
    assert collate([np.arange(3)[::-1]]).tolist() == [[2, 1, 0]]


def test_nests_are_collated_by_element() -> None:
    samples = [
        {"x": (torch.full((2,), float(number)), number), "text": str(number), "pair": [[1], "a"]}
        for number in range(3)
    ]
    batch = collate(samples)
    assert torch.equal(batch["x"][0], torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))
    assert torch.equal(batch["x"][1], torch.tensor([0, 1, 2]))
    assert batch["text"] == ["0", "1", "2"]
    assert torch.equal(batch["pair"][0], torch.ones(3, 1, dtype=torch.int64))
    assert batch["pair"][1] == ["a", "a", "a"]


def test_named_tuples_stay_what_they_are() -> None:
    batch = collate([Pair(torch.zeros(2), 1), Pair(torch.ones(2), 2)])
    assert type(batch) is Pair
    assert torch.equal(batch.label, torch.tensor([1, 2]))


def test_tokens_are_padded_at_the_right_and_masked() -> None:
    batch = collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": []}], pad=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9], [9, 9, 9]]
    assert batch["input_ids"].dtype == torch.int64
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert batch["attention_mask"].dtype == torch.int64


def test_each_field_is_padded_with_its_own_number() -> None:
    def sample(length: int) -> dict[str, Any]:
        names = ["input_ids", "attention_mask", "labels", "token_type_ids"]
        return {name: torch.ones(length, dtype=torch.int64) for name in names}

    batch = collate([sample(1), sample(2)], pad=7)
    assert batch["input_ids"].tolist() == [[1, 7], [1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch["labels"].tolist() == [[1, -100], [1, 1]]
    assert batch["token_type_ids"].tolist() == [[1, 0], [1, 1]]


def test_tokens_of_one_length_are_masked_too() -> None:
    """So that what is kept of a text does not depend on the others in its batch."""
    batch = collate([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}])
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 1]]


def test_rows_without_a_key_are_padded_and_masked_too() -> None:
    batch = collate([torch.tensor([1]), np.array([2, 3])], pad=9)
    assert type(batch) is Padded
    assert batch.rows.tolist() == [[1, 9], [2, 3]]
    assert batch.attention_mask.tolist() == [[1, 0], [1, 1]]
    args, kwargs = call_with(batch)
    assert args == (batch.rows,)
    assert kwargs == {"attention_mask": batch.attention_mask}
    assert torch.equal(collate([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]]))


def test_tokens_by_another_name_are_masked_and_what_is_beside_them_filled_up() -> None:
    batch = collate([{"ids": [5, 6], "weight": [0.5, 0.5]}, {"ids": [7], "weight": [1.0]}])
    assert batch["ids"].tolist() == [[5, 6], [7, 0]]
    assert batch["weight"].tolist() == [[0.5, 0.5], [1.0, 0.0]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(8), torch.ones(3)],
        [{"x": torch.ones(8)}, {"x": torch.ones(3)}],
        [(torch.ones(8, dtype=torch.int64), 1), (torch.ones(3, dtype=torch.int64), 0)],
    ],
    ids=["features", "named features", "arguments"],
)
def test_rows_are_not_filled_up_where_nobody_could_tell(samples: list[Any]) -> None:
    with pytest.raises(ValueError, match="has 3 numbers in one sample and 8 in another") as caught:
        collate(samples)
    for part in ("attention_mask", "collate=", "batch_size=1"):
        assert part in str(caught.value)


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=6))
def test_padded_rows_begin_with_the_samples(rows: list[list[int]]) -> None:
    batch = collate([{"input_ids": row} for row in rows])
    assert batch["input_ids"].shape == (len(rows), max(map(len, rows)))
    for row, padded in zip(rows, batch["input_ids"].tolist(), strict=True):
        assert padded[: len(row)] == row
        assert not any(padded[len(row) :])
    if "attention_mask" in batch:
        assert batch["attention_mask"].sum(1).tolist() == [len(row) for row in rows]


def test_images_of_different_shapes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="only rows of one dimension") as caught:
        collate([{"pixels": torch.zeros(3, 4, 4)}, {"pixels": torch.zeros(3, 5, 4)}])
    for part in ("`pixels`", "(3, 4, 4)", "(3, 5, 4)", "collate=", "batch_size=1"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"a": 1}, {"b": 1}], "does not always have the keys a, b"),
        ([{"a": 1}, {"a": None}], "`a` is a NoneType and a int in one batch"),
        ([("a",), ("a", "b")], "the sample is a tuple of 1 in one sample and of 2 in another"),
        ([torch.zeros(2), torch.zeros(2, 2)], r"\(2,\) in one sample and \(2, 2\) in another"),
        ([], "at least one sample"),
    ],
)
def test_samples_that_do_not_fit_together_are_refused(samples: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collate(samples)


def test_size_is_that_of_the_first_tensor() -> None:
    assert size_of(torch.zeros(4, 2)) == 4
    assert size_of({"text": ["a"], "scale": torch.tensor(1.0), "x": [torch.zeros(3)]}) == 3
    assert size_of(["a", "b"]) == 2
    assert size_of((["a", "b", "c"], 1)) == 3
    assert size_of({"x": np.zeros((5, 2))}) == 5
    assert size_of(UserDict(x=torch.zeros(6))) == 6
    with pytest.raises(ValueError, match="cannot be told from this `dict`"):
        size_of({"x": torch.tensor(1.0)})


def test_batch_is_cut_in_two() -> None:
    x, scale = torch.arange(12).reshape(4, 3), torch.tensor([1.0, 2.0])
    batch = {"x": x, "text": list("abcd"), "scale": scale, "pair": (x + 1, 5), "y": x.numpy()}
    left, right = split(batch, 4, 1)
    assert torch.equal(left["x"], x[:1])
    assert torch.equal(right["x"], x[1:])
    assert (left["text"], right["text"]) == (["a"], ["b", "c", "d"])
    assert left["scale"] is scale
    assert right["scale"] is scale
    assert torch.equal(right["pair"][0], x[1:] + 1)
    assert right["pair"][1] == 5
    assert right["y"].tolist() == x[1:].tolist()
    assert (size_of(left), size_of(right)) == (1, 3)
    with pytest.raises(ValueError, match="cannot be cut at 4"):
        split(batch, 4, 4)


def test_containers_as_long_as_the_batch_are_not_mistaken_for_it() -> None:
    x, y = torch.zeros(2, 3), torch.ones(2)
    left, right = split((x, torch.tensor(7.0)), 2, 1)
    assert torch.equal(left[0], x[:1])
    assert right[1] == 7
    left, right = split([x, y], 2, 1)
    assert torch.equal(right[1], y[1:])
    boxes = [torch.zeros(2, 4), torch.zeros(1, 4)]
    left, right = split({"x": x, "boxes": boxes}, 2, 1)
    assert left["boxes"][0] is boxes[0]
    assert right["boxes"][0] is boxes[1]


@given(st.integers(2, 6), st.data())
def test_halves_are_what_the_halves_of_the_samples_give(count: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, count - 1))
    samples = [{"x": torch.full((3,), n), "n": (n, str(n)), "l": [str(n), n]} for n in range(count)]
    parts = split(collate(samples), count, at)
    for part, chosen in zip(parts, (samples[:at], samples[at:]), strict=True):
        expected = collate(chosen)
        assert torch.equal(part["x"], expected["x"])
        assert torch.equal(part["n"][0], expected["n"][0])
        assert part["n"][1] == expected["n"][1] == part["l"][0]


def test_tensors_are_moved_and_nothing_else() -> None:
    moved = move({"x": (torch.zeros(2), "a")}, "meta")
    assert moved["x"][0].device.type == "meta"
    assert moved["x"][1] == "a"
    here = torch.zeros(2)
    assert move([here], torch.device("cpu"))[0] is here


def test_batch_becomes_the_arguments_of_a_call() -> None:
    x = torch.zeros(2)
    assert call_with({"x": x}) == ((), {"x": x})
    assert call_with(UserDict(x=x)) == ((), {"x": x})
    assert call_with((x, 1)) == ((x, 1), {})
    assert call_with([x, 1]) == ((x, 1), {})
    assert call_with(x) == ((x,), {})
    assert call_with(["a", "b"]) == ((["a", "b"],), {})
    assert call_with({1: x}) == (({1: x},), {})
