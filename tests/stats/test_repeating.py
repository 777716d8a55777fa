"""Tensors that come together again, as the log of a GPU measures them, on a pretended one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from pretended_device import PretendedDevice, pretend_device
from torch import Tensor

from hookline.stats import NOT_NOW, TOGETHER, UNLIKE, Log, Measured


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedDevice]:
    """Pretend that there is a GPU."""
    with pretend_device(monkeypatch) as device:
        yield device


@pytest.fixture
def log(device: PretendedDevice) -> Log:
    """Give its log."""
    return device.open_log()


def draw(count: int, kind: torch.dtype = torch.float32) -> Tensor:
    """Give numbers whose statistics tell whose they are."""
    return (torch.randn(count) * 2 + 5).to(kind)


def assert_measured(measured: Measured, values: Sequence[Tensor], rows: Sequence[int]) -> None:
    """Compare rows with what torch gives."""
    for value, row in zip(values, rows, strict=True):
        wide = value.double()
        found = measured.rows[row]
        assert found[0] == wide.numel()
        expected = [one.item() for one in (wide.min(), wide.max(), wide.mean())]
        assert found[4:7].tolist() == pytest.approx(expected)


def test_the_device_measures_as_torch_does(log: Log, device: PretendedDevice) -> None:
    values = [draw(count, torch.bfloat16) for count in (5, 70, 700)]
    rows = [log.add(values[0]), *log.add_together(values), log.add(values[2])]
    assert_measured(log.take().wait(), [values[0], *values, values[2]], rows)
    assert device.launches == [
        ("measure", "usual"),
        ("measure_several", "usual"),
        ("measure", "short"),
    ]


@pytest.mark.parametrize("count", [2, TOGETHER - 1, TOGETHER])
def test_as_many_as_one_launch_takes_are_each_measured(
    count: int, log: Log, device: PretendedDevice
) -> None:
    values = [draw(3 + 5 * number) for number in range(count)]
    rows = log.add_together(values)
    repeat = log.repeat(values)
    assert repeat is not None
    row = repeat(values)
    again = [row + offset for offset in repeat.offsets]
    assert_measured(log.take().wait(), [*values, *values], [*rows, *again])
    assert device.launches == [("measure_several", "usual"), ("measure_several", "short")]


def test_tensors_of_several_dtypes_come_again(log: Log, device: PretendedDevice) -> None:
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.float32)
    for turn in range(1, 4):
        values = [draw(100 * turn, kind) for kind in kinds]
        log.add_together(values)
        repeat = log.repeat(values)
        assert repeat is not None
        log.take()
        for others in (values, [draw(100 * turn, kind) for kind in kinds]):
            for _ in range(2):  # where they lay the last time, and elsewhere
                before = len(device.launches)
                row = repeat(others)
                assert [way for _, way in device.launches[before:]] == ["short"] * 3
                log.add(others[0])
                rows = [row + offset for offset in repeat.offsets]
                assert sorted(rows) == list(range(row, row + 5))
        assert_measured(log.take().wait(), others, rows)


def test_other_tensors_take_the_same_rows_in_the_next_step(log: Log) -> None:
    first, second = [draw(64), draw(65)], [draw(64), draw(65)]
    log.add_together(first)
    repeat = log.repeat(first)
    assert repeat is not None
    for values in (first, second, second, first):
        log.take()
        assert repeat(values) == 0
        assert_measured(log.take().wait(), values, repeat.offsets)


def test_more_tensors_than_there_are_slots_for_have_rows_of_their_own(log: Log) -> None:
    groups = [[draw(64) for _ in range(13)] for _ in range(50)]
    log.add_together(groups[0])
    repeat = log.repeat(groups[0])
    assert repeat is not None
    for _ in range(2):
        log.take()
        rows: list[int] = []
        for values in groups:
            row = repeat(values)
            rows += log.add_together(values) if row < 0 else [row + n for n in repeat.offsets]
        assert rows == list(range(650))
        values = [one for group in groups for one in group]
        assert_measured(log.take().wait(), values, rows)


def test_a_stream_is_used_once_it_is_known(log: Log, device: PretendedDevice) -> None:
    first, second = [draw(64), draw(65)], [draw(64), draw(65)]
    log.add_together(first)
    repeat = log.repeat(first)
    assert repeat is not None
    log.take()
    assert repeat(first) == 0
    device.stream, device.waits = 9, []
    assert repeat(first) == NOT_NOW  # nobody would wait for it
    assert repeat.is_like(first)
    log.add_together(first)
    assert device.waits == [(9, 7)]  # the slots are read there until now
    row = repeat(second)  # the launch itself says that it is on the new stream
    assert row == 4
    assert_measured(log.take().wait(), second, [row + n for n in repeat.offsets])
    assert device.waits[1:] == [(9, 7)]
    device.stream = 7
    assert repeat(first) == NOT_NOW
    log.add_together(first)
    assert device.waits[2:] == [(7, 9)]


def test_where_another_device_is_current_theirs_is_made_so(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [draw(64), draw(65)]
    log.add_together(values)
    repeat = log.repeat(values)
    assert repeat is not None
    current = [1]

    @contextmanager
    def make_current(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    repeating = sys.modules["hookline.stats.repeating"]
    monkeypatch.setattr(repeating, "current_cuda_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", make_current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == 1)
    row = repeat(values)
    assert row == 2
    assert_measured(log.take().wait(), values, [row + n for n in repeat.offsets])


def test_triton_that_is_not_known_is_launched_the_longer_way(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [draw(64), draw(65)]
    log.add_together(values)
    assert log.repeat(values) is not None
    launching = sys.modules["hookline.stats.launching"]
    monkeypatch.setattr(launching.Launcher, "is_quick", False)
    assert log.repeat(values) is None


def test_memory_is_shared_by_the_same_tensors_each_time(log: Log) -> None:
    x, y = draw(64), draw(64)
    shared = [x, x.view(8, 8), y]
    log.add_together(shared)
    repeat = log.repeat(shared)
    assert repeat is not None
    assert repeat.offsets == [0, 0, 1]
    assert repeat(shared) >= 0
    assert repeat([y, y.view(8, 8), x]) >= 0
    assert repeat.is_like(shared)
    apart = [x, x.clone().view(8, 8), y]
    assert repeat(apart) == UNLIKE
    assert not repeat.is_like(apart)
    freed = draw(64)
    freed.untyped_storage().resize_(0)
    found = repeat([freed, freed.view(8, 8), y])
    assert found == NOT_NOW
    assert repeat([x.view(64)[16:], x.view(8, 8), y]) == UNLIKE


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_measured_the_longer_way(log: Log) -> None:
    """Torch's guard would end the process: it asks for sizes first, which they have not."""
    plain = [draw(64), draw(64)]
    mixed = [plain[0], torch.nested.nested_tensor([draw(4), draw(5)])]
    assert log.repeat(mixed) is None
    log.add_together(plain)
    repeat = log.repeat(plain)
    assert repeat is not None
    assert repeat(mixed) == UNLIKE
    assert repeat([plain[0], None]) == UNLIKE
    assert repeat(plain) >= 0


def test_a_default_device_changes_nothing(log: Log) -> None:
    """It is a mode, which would see every look at a tensor."""
    seen: list[object] = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(function)
            return function(*args, **(kwargs or {}))

    values = [draw(64), draw(65)]
    log.add_together(values)
    with torch.device("cpu"), Seeing():
        repeat = log.repeat(values)
        assert repeat is not None
        assert repeat(values) >= 0
    assert not seen


def test_what_is_large_or_lies_askew_is_not_repeated(log: Log) -> None:
    assert log.repeat([draw(64), draw(64).view(8, 8).t()]) is None
    assert log.repeat([draw(64), draw(64)[1:]]) is None  # at an address that is not aligned
    assert log.repeat([draw(8) for _ in range(TOGETHER + 1)]) is None
    values = [draw(64), draw(64)]
    log.add_together(values)
    repeat = log.repeat(values)
    assert repeat is not None
    assert repeat([draw(65)[1:], draw(64)]) == NOT_NOW
