"""State that modules hold in attributes of their own is afterwards what it was."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookline.recordings import calibrate_floors, trace_step


class Remembering(nn.Module):
    """Keep something of each call, in one of many ways."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.held = held
        self.same = held
        self.weights = [self.linear.weight]
        self.flat = self.linear.weight.detach().view(-1)

    def forward(self, x: Tensor) -> Tensor:
        assert self.same is self.held
        assert self.weights[0] is self.linear.weight
        assert self.flat.data_ptr() == self.linear.weight.data_ptr()
        out: Tensor = self.linear(x)
        if isinstance(self.held, defaultdict):
            self.held["sum"].append(out)
            return out + sum(self.held["sum"])
        if isinstance(self.held, dict):
            self.held["inner"].append(out)
            return out + sum(self.held["inner"])
        if isinstance(self.held, set):
            self.held.add(len(self.held))
            return out * len(self.held)
        self.held.append(out)
        return out + sum(self.held)


def loss_of(out: Tensor) -> Tensor:
    """Make one number."""
    return out.square().mean()


def make_held() -> list[Any]:
    return [[], [torch.ones(3)], {"inner": []}, {1, 2}, deque(maxlen=2), defaultdict(list)]


@pytest.mark.parametrize("number", range(6))
def test_containers_are_put_back(number: int) -> None:
    held = make_held()[number]
    model = Remembering(held)
    x = torch.randn(2, 3)
    first = trace_step(model, (x,), loss=loss_of)
    calibrate_floors(model, (x,), loss=loss_of, trace=first)
    again = trace_step(model, (x,), loss=loss_of)
    assert first.loss == again.loss
    assert not first.unrepeated
    assert model.held is held
    assert model.same is held
    expected = make_held()[number]
    assert repr(held) == repr(expected)


def test_a_tensor_that_was_kept_of_training_can_still_run_backward() -> None:
    model = Remembering([])
    model(torch.ones(2, 3))
    kept = model.held[0]
    trace_step(model, (torch.ones(2, 3),), loss=loss_of)
    assert model.held == [kept]
    assert model.linear.weight.grad is None
    kept.sum().backward()
    assert model.linear.weight.grad is not None


class Noisy(nn.Module):
    """Draw from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.sources = {"noise": generator}

    def forward(self, x: Tensor) -> Tensor:
        source = self.sources["noise"]
        if isinstance(source, torch.Generator):
            noise = torch.randn(x.shape, generator=source)
        elif isinstance(source, random.Random):
            noise = torch.tensor(source.random())
        else:
            noise = torch.tensor(source.normal(size=tuple(x.shape)), dtype=x.dtype)
        out: Tensor = self.linear(x + noise)
        return out


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(3),
        lambda: random.Random(3),
        lambda: np.random.default_rng(3),
        lambda: np.random.RandomState(3),
    ],
    ids=["torch", "python", "numpy", "old numpy"],
)
def test_a_model_with_a_generator_of_its_own_repeats_itself(make: Any) -> None:
    model, other = Noisy(make()), Noisy(make())
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 3)
    first = trace_step(model, (x,), loss=loss_of)
    calibrate_floors(model, (x,), loss=loss_of, trace=first)
    assert not first.unrepeated
    assert trace_step(model, (x,), loss=loss_of).loss == first.loss
    assert torch.equal(model(x), other(x))


def test_a_tensor_among_the_attributes_is_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.count = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            out: Tensor = self.linear(x) * self.count
            return out

    model = Counting()
    count = model.count
    trace_step(model, (torch.ones(1, 3),), loss=loss_of)
    assert model.count is count
    assert count.item() == 0
