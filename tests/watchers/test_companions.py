"""Values that come together again: which kinds of them are known, and what is measured anew."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from pretended_device import PretendedDevice, pretend_device
from torch import Tensor

from hookline.stats import Log
from hookline.watchers.companions import Companions

SITES = (4, 7)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedDevice]:
    """Pretend that there is a GPU."""
    with pretend_device(monkeypatch) as device:
        yield device


class Counting:
    """A log that counts how often it is asked for what measures more of the same."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.asked = 0

    def repeat(self, tensors: list[Tensor]) -> object:
        self.asked += 1
        return self.log.repeat(tensors)

    def measure(self, companions: Companions, length: int, kind: torch.dtype) -> bool:
        """Measure values of a length, as a step would; tell whether their kind was known."""
        values = [torch.randn(length, 3).to(kind), torch.randn(length).to(kind)]
        events = companions.measure(values)
        if events is None:
            self.log.add_together(values)
            companions.meet(self, values)  # type: ignore[arg-type]
        else:
            (first, row, _), (last, after, _) = events
            assert (first, last) == SITES
            rows = self.log.take().wait().rows
            assert rows[row, 6] == pytest.approx(values[0].double().mean().item())
            assert rows[after, 6] == pytest.approx(values[1].double().mean().item())
            self.log.add_together(values)  # so that the stream is known
        return events is not None


@pytest.fixture
def log(device: PretendedDevice) -> Counting:
    """Give the log of the device, on a stream that it knows."""
    opened = device.open_log()
    opened.add_together([torch.randn(3), torch.randn(4)])
    return Counting(opened)


def count_known(log: Counting, lengths: list[int]) -> int:
    companions = Companions(SITES)
    return sum(log.measure(companions, one, torch.float32) for one in lengths)


def test_each_kind_is_met_once(log: Counting) -> None:
    companions = Companions(SITES)
    kinds = [(5, torch.float32), (6, torch.float32), (5, torch.bfloat16)]
    assert [log.measure(companions, *kind) for kind in 3 * kinds] == [False] * 3 + [True] * 6
    assert log.asked == 3


def test_a_dozen_lengths_by_chance_are_all_known(log: Counting) -> None:
    draw = random.Random(0)
    assert count_known(log, [draw.randrange(5, 17) for _ in range(200)]) == 188
    assert log.asked == 12


def test_too_many_lengths_are_seldom_met(log: Counting) -> None:
    """To know a kind is not free, and nothing comes of it where it is forgotten before it is back.

    Of these 1600 values every ninth would have one know its kind.
    """
    count_known(log, [5 + number % 40 for number in range(1600)])
    assert log.asked < 16 + 1600 / 9 / 5


def test_lengths_that_grow_are_met_though_others_were_before(log: Counting) -> None:
    lengths = [5 + number // 30 for number in range(1200)]
    assert count_known(log, lengths) > 800
    assert log.asked == 40


def test_what_cannot_be_measured_now_is_met_no_second_time(
    log: Counting, device: PretendedDevice
) -> None:
    companions = Companions(SITES)
    log.measure(companions, 5, torch.float32)
    for stream in range(20, 60):
        device.stream = stream
        assert not log.measure(companions, 5, torch.float32)
    assert log.measure(companions, 5, torch.float32)
    assert log.asked == 1


def test_values_of_which_one_is_missing_are_of_no_kind(log: Counting) -> None:
    companions = Companions(SITES)
    log.measure(companions, 5, torch.float32)
    assert companions.measure([None, torch.randn(5)]) is None
    assert companions.measure([torch.randn(5, 3), None]) is None
    assert log.measure(companions, 5, torch.float32)


def test_what_never_can_be_measured_so_is_seldom_tried(log: Counting) -> None:
    companions = Companions(SITES)
    for _ in range(1000):
        values = [torch.randn(9)[1:], torch.randn(8)]  # at an address that is not aligned
        assert companions.measure(values) is None
        companions.meet(log, values)  # type: ignore[arg-type]
    assert log.asked < 16 + 1000 / 9 / 5
