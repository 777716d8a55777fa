"""The share of page-locked memory, and the thread that copies out of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hookline.captures.pinning import Emptying, PinnedShare, block_size, default_limit
from hookline.captures.transfers import Transfer


class Arrival:
    """Stands where a CUDA event stands: something to wait for."""

    def __init__(self, *, is_over: bool = True) -> None:
        self._over = threading.Event()
        if is_over:
            self._over.set()

    def end(self) -> None:
        self._over.set()

    def synchronize(self) -> None:
        assert self._over.wait(10)


def test_block_is_the_next_power_of_two() -> None:
    assert [block_size(size) for size in (0, 1, 3, 4, 5, 2**20 + 1)] == [0, 1, 4, 4, 8, 2**21]


def test_share_is_part_of_the_memory() -> None:
    assert 2**20 < default_limit() <= 8 * 2**30


def test_share_is_given_back_with_the_memory_and_not_before() -> None:
    share = PinnedShare(100)
    tensor = torch.zeros(20)
    assert share.reserve(80)
    share.follow(tensor, 80)
    assert not share.reserve(21)
    assert share.reserve(20)
    assert share.held == 100
    view = tensor[3:]
    del tensor
    assert share.held == 100
    del view
    assert share.held == 20


def test_memory_that_could_not_be_made_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    share = PinnedShare(1000)
    monkeypatch.setattr(torch, "empty_like", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        share.allocate_like(torch.zeros(4), torch.float32)
    assert share.held == 0


def test_value_larger_than_the_share_gets_none() -> None:
    share = PinnedShare(15)
    assert share.allocate_like(torch.zeros(4), torch.float32) is None
    assert share.held == 0


def test_what_arrived_is_copied_out_and_counts_as_unchanged() -> None:
    arrived: Any = Arrival(is_over=False)
    pinned, ordinary = torch.arange(6.0), torch.zeros(6)
    job = Emptying().submit(pinned, ordinary, arrived)
    assert not job.done()
    version = ordinary._version
    arrived.end()
    Transfer(arrived, [job]).wait()
    assert torch.equal(ordinary, pinned)
    assert ordinary._version == version


def test_copying_out_that_fails_is_raised_to_who_reads() -> None:
    arrived: Any = Arrival()
    job = Emptying().submit(torch.zeros(3), torch.zeros(2), arrived)
    with pytest.raises(RuntimeError, match="size"):
        Transfer(arrived, [job]).wait()


def test_no_more_waits_to_be_copied_than_allowed() -> None:
    emptying = Emptying(most_waiting=100)
    late: Any = Arrival(is_over=False)
    first = emptying.submit(torch.ones(20), torch.zeros(20), late)  # 80 bytes
    second = emptying.submit(torch.ones(5), torch.zeros(5), late)  # 20 more
    assert not first.done()
    assert not second.done()
    threading.Timer(0.05, late.end).start()
    third = emptying.submit(torch.ones(1), torch.zeros(1), late)
    assert first.done()
    third.result(10)
