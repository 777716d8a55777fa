"""A replay in a process of its own: nothing that it does reaches the training."""

from __future__ import annotations

import os
import queue
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from hookline.replays import apart, find_origin_apart, keep_call
from hookline.replays.origins import Origin


class Logs(nn.Module):
    """Does something with the world, then takes a logarithm of zero."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self.act = act
        self.scale = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.act()
        return (x * self.scale).log().sum().exp() * torch.nan


def replay(model: nn.Module) -> Origin | None:
    call = keep_call(model, (torch.ones(3),), {})
    return find_origin_apart([call], backward=False)


def test_replay_apart_finds_what_a_replay_here_finds() -> None:
    model = Logs(lambda: None)
    call = keep_call(model, (torch.ones(3),), {})
    found = find_origin_apart([call], backward=False)
    assert found is not None
    assert found == apart.find_origin([call], backward=False)


def test_replay_apart_leaves_lists_iterators_and_queues_alone() -> None:
    seen: list[int] = []
    numbers: Iterator[int] = iter(range(100))
    waiting: queue.Queue[int] = queue.Queue()
    waiting.put(1)

    def act() -> None:
        seen.append(next(numbers))
        waiting.get(timeout=5)

    origin = replay(Logs(act))
    assert origin is not None
    assert origin.cause == "operation"
    assert seen == []
    assert next(numbers) == 0
    assert waiting.qsize() == 1


def test_replay_apart_draws_from_no_generator() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    assert replay(Logs(lambda: torch.rand(2, generator=generator))) is not None
    assert torch.equal(generator.get_state(), before)


def children() -> set[int]:
    """Give the processes that this one has; other tests may have left some."""
    return {one.pid for one in psutil.Process().children()}


def test_replay_apart_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    def act() -> None:
        print("forward")
        os.write(1, b"written\n")

    assert replay(Logs(act)) is not None
    assert capfd.readouterr() == ("", "")


def test_replay_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "LEAST_SECONDS", 1.0)
    before = children()
    began = time.monotonic()
    origin = replay(Logs(queue.Queue().get))
    assert time.monotonic() - began < 30
    assert origin is not None
    assert origin.cause == "not reproduced"
    assert re.fullmatch(r"the replay did not end within \d+ seconds", origin.why)
    assert children() == before


def test_replay_that_dies_says_so() -> None:
    origin = replay(Logs(lambda: os._exit(7)))
    assert origin is not None
    assert origin.why == "the replay ended without an answer"


def test_interrupt_ends_a_replay_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(apart.select, "select", interrupt)
    before = children()
    with pytest.raises(KeyboardInterrupt):
        replay(Logs(lambda: time.sleep(60)))
    assert children() == before


def test_replay_where_no_fork_can_be_is_silent_and_restores_generators(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(apart, "_can_fork", lambda calls: False)
    model = Logs(lambda: print("forward", torch.rand(1, generator=model.generator)))
    model.generator = torch.Generator().manual_seed(3)
    before = model.generator.get_state()
    assert replay(model) is not None
    assert torch.equal(model.generator.get_state(), before)
    assert capsys.readouterr() == ("", "")
