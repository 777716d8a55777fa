"""On a CUDA device every dtype is read as it lies, in any order of memory and of any size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hookline.stats import NOT_NOW, TOGETHER, UNLIKE, Log, open_log

pytestmark = pytest.mark.gpu

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SMALL_FLOATS = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e8m0fnu]
DTYPES = [*FLOATS, *SMALL_FLOATS, *SIGNED, *UNSIGNED]


@pytest.fixture(scope="module")
def log() -> Log:
    """Give one log for all: its kernels are compiled once."""
    return open_log("cuda")


def draw(count: int, dtype: torch.dtype, *, mean: float = 5.0) -> Tensor:
    """Give random numbers of a dtype on the device, none below zero for one that has no sign."""
    x = torch.randn(count, device="cuda") * 2 + mean
    return (x.abs() if dtype in UNSIGNED else x).to(dtype)


def assert_measured(log: Log, x: Tensor, *, near: float = 1e-6) -> None:
    """Compare a row with what float64 operations of torch give."""
    log.add(x)
    row = log.take().wait().rows[0]
    wide = x.double().flatten()
    finite = wide[wide.isfinite()]
    mean = finite.mean().item()
    spread = (finite - mean).square().sum().item()
    assert row[:6].tolist() == [
        len(finite),
        wide.isnan().sum(),
        (wide == math.inf).sum(),
        (wide == -math.inf).sum(),
        finite.min(),
        finite.max(),
    ]
    assert row[6] == pytest.approx(mean, rel=near, abs=1e-9 * finite.abs().max().item())
    assert row[7] == pytest.approx(spread, rel=near, abs=1e-300)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_many_tiles_agrees_with_torch(log: Log, dtype: torch.dtype) -> None:
    """Some tiles a program, whole groups of them, and a last one that is cut."""
    for count in (300_001, 12 * 264 * 4096 + 77):
        assert_measured(log, draw(count, dtype))
        assert_measured(log, draw(count, dtype)[1:])  # at an address that is not aligned


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_is_not_finite_is_counted_among_many(log: Log, dtype: torch.dtype) -> None:
    x = draw(3_000_017, dtype)
    places = {5: math.nan, 1_000_000: math.nan, 3_000_016: math.nan}
    if dtype is not torch.float8_e4m3fn:  # it has no infinity
        places |= {7: math.inf, 2_000_000: -math.inf}
    for place, number in places.items():
        x[place : place + 1] = torch.tensor([number], device="cuda").to(dtype)
    assert_measured(log, x)


def test_very_small_numbers_of_16_bits_have_a_spread(log: Log) -> None:
    """Their squares are nothing in float32, where those of others are added up."""
    x = (torch.randn(5_000_000, device="cuda") * 1e-25).bfloat16()
    assert_measured(log, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_equal_numbers_have_no_spread(log: Log, dtype: torch.dtype) -> None:
    x = torch.full((5_000_003,), 0.3, device="cuda").to(dtype)
    log.add(x)
    row = log.take().wait().rows[0]
    assert row[7] == 0
    assert row[4] == row[5] == row[6] == x[0].double()


@pytest.mark.parametrize("width", [1, 2, 7, 16, 50, 64, 80, 100, 256, 1000, 1024, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_columns_are_those_and_no_others(log: Log, dtype: torch.dtype, width: int) -> None:
    for first, beside in ((0, width), (3, 9)):
        x = draw(700 * (first + width + beside), dtype).view(700, -1)
        x[:, :first] = x[:, first + width :] = torch.tensor(99.0, device="cuda").to(dtype)
        assert_measured(log, x[:, first : first + width])


def test_views_are_read_where_they_lie(log: Log) -> None:
    """A copy would be as large as the view: nothing of that size is taken from the device."""
    x = torch.randn(64, 128, 1024, device="cuda")
    views = [
        x.permute(2, 0, 1),
        x.mT,
        x[:, :, :512],
        x[:, :, 3:900],
        x[:, 1:],
        x.view(-1)[::2],
        x[:, :1].expand(-1, 128, -1),
        x.view(64, 2, 64, 1024).to(memory_format=torch.channels_last),
    ]
    for view in views:
        log.add(view)  # what is compiled and kept
    log.take().wait()
    for view in views:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        log.add(view)
        assert torch.cuda.max_memory_allocated() == before
    log.take().wait()


def test_float8_is_not_widened(log: Log) -> None:
    for dtype in (*SMALL_FLOATS, torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.bool):
        x = draw(1 << 22, dtype)
        log.add(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        log.add(x)
        assert torch.cuda.max_memory_allocated() == before
        log.take().wait()


def test_every_bit_pattern_of_8_bits_is_that_number(log: Log) -> None:
    bits = torch.arange(256, dtype=torch.uint8, device="cuda")
    for dtype in (*SMALL_FLOATS, torch.float8_e8m0fnu, torch.int8, torch.uint8):
        for one in bits.view(dtype).split(1):
            log.add(one)
        rows = log.take().wait().rows
        for row, number in zip(rows, bits.view(dtype).double().tolist(), strict=True):
            if math.isnan(number):
                assert row[:4].tolist() == [0, 1, 0, 0]
            elif math.isinf(number):
                assert row[2 if number > 0 else 3] == 1
            else:
                assert row[4:7].tolist() == [number] * 3


def test_more_elements_than_32_bits_count(log: Log) -> None:
    count = 2**31 + 5
    x = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    x[-1], x[-2], x[2**31 - 1] = 3, -2, 1
    log.add(x)
    row = log.take().wait().rows[0]
    assert row[:6].tolist() == [count, 0, 0, 0, -2, 3]
    assert row[6] == pytest.approx(2 / count, rel=1e-12)
    assert row[7] == pytest.approx(14, rel=1e-8)
    rows = x[: 2**31].view(2**15, 2**16)[:, :-8]
    rows[-1, -1] = 7
    log.add(rows)
    x[11] = math.nan
    log.add(x)
    by_rows, whole = log.take().wait().rows
    assert by_rows[[0, 4, 5]].tolist() == [rows.numel(), 0, 7]
    assert whole[[0, 1, 4, 5]].tolist() == [count - 1, 1, -2, 7]


def test_measuring_adds_no_synchronisation(log: Log) -> None:
    x = torch.randn(300, 500, device="cuda")
    values = [x, x.t(), x[:, :200], x[:1].expand(7, 500), x.to(torch.float8_e4m3fn), x.bfloat16()]
    for value in values:
        log.add(value)
    log.take().wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for value in values:
            log.add(value)
        log.add_together(values)
        taken = log.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(taken.wait().rows) == 12


@pytest.mark.parametrize("number", [5, TOGETHER - 1, TOGETHER])
def test_alike_tensors_of_every_dtype_go_together(log: Log, number: int) -> None:
    counts = [1, 1000, 70_000, 5, 300_000, *(3000 * one for one in range(1, TOGETHER))][:number]
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.float64):
        values = [draw(count, dtype) for count in counts]
        alone = [log.add(one) for one in values]
        together = log.add_together(values)
        rows = log.take().wait().rows
        assert rows[alone][:, :6].tolist() == rows[together][:, :6].tolist()
        assert rows[alone][:, 6] == pytest.approx(rows[together][:, 6], rel=1e-7)
        assert rows[alone][:, 7] == pytest.approx(rows[together][:, 7], rel=1e-6)


def test_tensors_that_come_again_are_measured_in_the_short_way(log: Log) -> None:
    first = [draw(count, torch.bfloat16) for count in (1000, 70_000, 300_000)]
    first.insert(1, first[0].view(10, 100))
    log.add_together(first)
    repeat = log.repeat(first)
    assert repeat is not None
    log.take().wait()
    again = [draw(one.numel(), torch.bfloat16) for one in first[1:]]
    again[0] *= 2
    again.insert(0, again[0].view(-1))
    again[1] = again[1].view(10, 100)
    alone = [log.add(one) for one in again]
    row = repeat(again)
    assert row >= 0
    together = [row + offset for offset in repeat.offsets]
    assert together[0] == together[1]
    rows = log.take().wait().rows
    assert rows[alone][:, :6].tolist() == rows[together][:, :6].tolist()
    assert rows[alone][:, 6] == pytest.approx(rows[together][:, 6], rel=1e-7)


def test_what_is_otherwise_than_it_was_is_not_taken_for_the_same(log: Log) -> None:
    first = [draw(count, torch.bfloat16) for count in (1000, 70_000, 300_000)]
    log.add_together(first)
    repeat = log.repeat(first)
    assert repeat is not None
    a, b, c = first
    others = [
        [a[:-8], b, c],
        [a, b.float(), c],
        [a, b.view(1000, 70).t(), c],
        [a, torch._neg_view(b), c],
        [a, c[4:70_004], c],
        [a, c[:70_000], c[8:]],
        [a, b],
        [c[:1000], b, c],
    ]
    assert [repeat(values) >= 0 for values in others] == [False] * 7 + [True]
    shared = [a, a.view(10, 100), b]
    log.add_together(shared)
    again = log.repeat(shared)
    assert again is not None
    assert again(shared) >= 0
    assert again([a, a.clone().view(10, 100), b]) == UNLIKE  # in another memory now
    assert log.repeat([a, b.view(1000, 70).t()]) is None
    assert log.repeat([a[:8]] * 4 + [b[8 * n : 8 * n + 8] for n in range(TOGETHER)]) is None


def test_tensors_of_several_dtypes_come_again(log: Log) -> None:
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.float32)
    for turn in range(3):
        values = [draw(1000 * (turn + 1), kind) for kind in kinds]
        log.add_together(values)
        repeat = log.repeat(values)
        assert repeat is not None
        alone = [log.add(one) for one in values]
        for _ in range(2):
            row = repeat(values)
            assert row >= 0
            together = [row + offset for offset in repeat.offsets]
            assert sorted(together) == list(range(row, row + 5))
        rows = log.take().wait().rows
        assert rows[alone][:, :6].tolist() == rows[together][:, :6].tolist()
        assert rows[alone][:, 6] == pytest.approx(rows[together][:, 6], rel=1e-7)


def test_a_stream_that_comes_later_leaves_rows_alone_until_they_are_merged(log: Log) -> None:
    first, second = draw(1000, torch.float32), draw(1000, torch.float32, mean=-50)
    log.add(first)
    log.take().wait()
    other = torch.cuda.Stream()
    log.add(first)
    torch.cuda._sleep(2**28)  # about a tenth of a second, before the merge
    taken = log.take()
    with torch.cuda.stream(other):
        log.add(second)
        later = log.take()
    for step, values in ((taken, first), (later, second)):
        row = step.wait().rows[0]
        assert row[0] == 1000
        assert row[6] == pytest.approx(values.double().mean().item(), rel=1e-6)


def test_memory_that_was_freed_is_not_read(log: Log) -> None:
    first = [draw(count, torch.bfloat16) for count in (1000, 70_000)]
    log.add_together(first)
    repeat = log.repeat(first)
    assert repeat is not None
    assert repeat(first) >= 0
    freed = draw(1000, torch.bfloat16)
    freed.untyped_storage().resize_(0)
    assert repeat([freed, first[1]]) == NOT_NOW
