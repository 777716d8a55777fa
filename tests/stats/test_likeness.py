"""Tensors that are like some that were seen, and those that are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hookline.stats.likeness import Likeness


def draw() -> list[Tensor]:
    """Make three tensors, the second of them twice."""
    first, second, third = torch.randn(3, 4), torch.randn(5), torch.randn(3, 4)
    return [first, second, second, third]


def test_tensors_in_other_memory_are_like() -> None:
    likeness = Likeness(draw())
    assert likeness.holds(draw())
    assert likeness.holds(tuple(draw()))
    assert Likeness([torch.ones(2)]).holds([torch.zeros(2)])


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one[:2],
        lambda one: one.t().contiguous().t(),
        lambda one: one.double(),
        lambda one: one.to("meta"),
        lambda one: one.clone().requires_grad_(),
        lambda one: one.as_subclass(type("Own", (Tensor,), {})),
        torch._neg_view,
        Tensor.to_sparse,
        lambda one: torch.nested.nested_tensor([one, one]),
        lambda one: None,
    ],
    ids=[
        "size",
        "strides",
        "dtype",
        "device",
        "grad",
        "class",
        "negated",
        "sparse",
        "nested",
        "none",
    ],
)
def test_what_differs_in_one_is_not_like(change: Callable[[Tensor], Tensor | None]) -> None:
    likeness = Likeness(draw())
    for number in (0, 3):
        others = draw()
        others[number] = change(others[number])  # type: ignore[call-overload]
        assert not likeness.holds(others)


def test_what_was_one_object_must_be_one_again_and_others_not() -> None:
    first, second, _, third = draw()
    likeness = Likeness([first, second, second, third])
    assert not likeness.holds([first, second, second.clone(), third])
    assert not likeness.holds([first, second, second, first])
    same = Likeness([first, first])
    assert same.holds([third, third])
    assert not same.holds([first, third])


def test_fewer_or_more_are_not_like() -> None:
    likeness = Likeness(draw())
    assert not likeness.holds(draw()[:3])
    assert not likeness.holds([*draw(), torch.ones(1)])
    assert not Likeness(draw()[:2]).holds(draw()[:1])


def test_it_holds_no_tensor() -> None:
    tensors = draw()
    likeness = Likeness(tensors)
    storage = torch.multiprocessing.reductions.StorageWeakRef(tensors[0].untyped_storage())
    del tensors
    assert storage.expired()
    assert likeness.holds(draw())
