"""Every implementation measures every dtype, layout and kind of number as exact arithmetic does."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from exact_statistics import (
    assert_row,
    exact_counts,
    exact_sketch,
    numbers_of,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookline.stats import Extras, Measured, open_log

# Making such a tensor warns once in a process; measuring one does not.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

FLOATS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
    torch.float8_e4m3fnuz: torch.int8,
    torch.float8_e5m2fnuz: torch.int8,
    torch.float8_e8m0fnu: torch.uint8,
}
WHOLE = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *WHOLE, *COMPLEX]

SHAPES = [
    (),
    (0,),
    (3, 0, 2),
    (1,),
    (7,),
    (64,),
    (3, 5),
    (17, 9),
    (1, 33, 1),
    (2, 3, 4, 5),
    (5, 40),
    (300,),
]
LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.movedim(0, -1) if x.ndim else x,
    "sliced": lambda x: x[..., 1::2] if x.ndim else x,
    "rows": lambda x: x[..., : x.shape[-1] // 2] if x.ndim else x,
    "expanded": lambda x: x[:1].expand(4, *x.shape[1:]) if x.ndim and len(x) else x,
    "expanded inside": lambda x: x.unsqueeze(-1).expand(*x.shape, 3),
    "flipped": lambda x: x[torch.arange(len(x)).flip(0)] if x.ndim else x,
    "offset": lambda x: x[1:] if x.ndim else x,
    "windows": lambda x: x.unfold(0, 2, 1) if x.ndim and len(x) > 1 else x,
}


def draw_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Give random bits as a dtype: all of its numbers, NaN and infinity among them."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    bits = torch.from_numpy(rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8))
    return bits.view(dtype).reshape(shape)


def draw_numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype, *, kind: str) -> Tensor:
    """Give numbers of one kind in a dtype."""
    rng = np.random.default_rng(seed)
    if dtype.is_complex:
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        real = {4: torch.float16, 8: torch.float32, 16: torch.float64}[dtype.itemsize]
        return torch.view_as_complex(draw_numbers(seed, (*shape, 2), real, kind=kind))
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool).reshape(shape))
    if kind == "bits" or dtype not in FLOATS:
        return draw_bits(rng, shape, dtype)
    info = torch.finfo(dtype)
    x = torch.from_numpy(np.asarray(rng.standard_normal(shape)))
    if kind == "huge mean":
        x = x * info.eps * 2**9 + 2**9
    elif kind == "subnormal":
        x = x * info.tiny
    elif kind == "constant":
        x = torch.full(shape, 0.3, dtype=torch.float64)
    elif kind == "holes":
        specials = torch.tensor([math.nan, math.inf, -math.inf, 0.0], dtype=torch.float64)
        chosen = specials[torch.from_numpy(np.asarray(rng.integers(0, 4, shape)))]
        x = torch.where(torch.from_numpy(np.asarray(rng.random(shape) < 0.3)), chosen, x)
    return x.to(dtype)


KINDS = ["normal", "bits", "huge mean", "subnormal", "constant", "holes"]
TENSORS = st.builds(
    lambda seed, shape, dtype, kind, layout: LAYOUTS[layout](
        draw_numbers(seed, shape, dtype, kind=kind)
    ),
    st.integers(0, 2**32 - 1),
    st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
    st.sampled_from(KINDS),
    st.sampled_from(sorted(LAYOUTS)),
)


def measure(implementation, tensor: Tensor, extras: int = 0) -> Measured:
    """Measure one tensor in a log of its own."""
    log = implementation.open()
    assert log.add(tensor.to(implementation.device), extras) == 0
    return log.take().wait()


def assert_extras(got: Measured, numbers: tuple[float, ...], dtype: torch.dtype) -> None:
    """Compare the sketch and the counts of one tensor with exact ones."""
    assert got.sketched.tolist() == got.counted.tolist() == [0]
    sketch, norm = exact_sketch(numbers)
    if norm < 1e30:
        difference = np.abs(got.sketches[0] - np.array(sketch)).max()
        assert difference <= 2e-7 * norm + 2.0**-149
    counts, bins = exact_counts(numbers, dtype)
    assert got.counts[0].tolist() == counts
    assert got.histograms[0].tolist() == bins


@settings(max_examples=100)
@given(TENSORS)
@example(torch.tensor(math.nan))
@example(torch.full((130,), -math.inf))
@example(torch.tensor([3.4e38, -3.4e38, 3.4e38] * 30))
@example(torch.tensor([1.7e308, -1.7e308, 1.7e308, 1e-300, 0.0], dtype=torch.float64))
@example(torch.tensor([1e200] * 7 + [-1e180] * 3, dtype=torch.float64))
@example(torch.tensor([5e-324, -1e-323, 2.2e-308], dtype=torch.float64))
@example(torch.tensor([2**63 - 1, -(2**63), 2**53 + 1]))
@example(torch.tensor([0], dtype=torch.uint8).view(torch.float8_e8m0fnu))
def test_statistics_equal_exact_arithmetic(implementation, tensor: Tensor) -> None:
    got = measure(implementation, tensor, Extras.SKETCH | Extras.COUNTS)
    assert_row(got.rows[0], numbers_of(tensor))
    assert_extras(got, numbers_of(tensor), tensor.dtype)


@settings(max_examples=40)
@given(TENSORS)
def test_row_alone_equals_exact_arithmetic(implementation, tensor: Tensor) -> None:
    """Without a sketch the order of elements is free, so another way through memory is taken."""
    assert_row(measure(implementation, tensor).rows[0], numbers_of(tensor))


MANY_BLOCKS = {
    "far from 0": lambda: torch.randn(9000) * 0.06 + 1e6,
    "very far from 0": lambda: torch.randn(9000, dtype=torch.float64) + 1e15,
    "NaN, then far from 0": lambda: torch.cat(
        [torch.full((2500,), math.nan), torch.randn(4000) * 0.06 + 1e6]
    ),
    "three places": lambda: torch.cat(
        [torch.randn(3000), torch.randn(3000) + 1e7, torch.randn(3000) * 1e-20]
    ),
    "first one out": lambda: torch.cat([torch.full((1,), 1e30), torch.randn(6000)]),
    "some infinite": lambda: torch.cat(
        [torch.randn(5000), torch.full((3,), math.inf), torch.randn(5000)]
    ),
    "masked": lambda: torch.randn(5000).masked_fill(torch.rand(5000) < 0.5, -math.inf),
    "bfloat16": lambda: torch.randn(6000).bfloat16() * 1e-3 + 1,
    "float16": lambda: torch.randn(6000).half() * 100,
    "float8": lambda: (torch.randn(6000) * 3).to(torch.float8_e4m3fn),
    "float8, some NaN": lambda: (torch.randn(6000) * 200).to(torch.float8_e4m3fn),
    "float8, some infinite": lambda: (torch.randn(6000) * 30000).to(torch.float8_e5m2),
    "float8 columns": lambda: torch.randn(90, 80).to(torch.float8_e5m2)[:, 10:70],
    "short runs": lambda: torch.randn(900, 8)[:, 2:5],
    "every third": lambda: torch.randn(9000)[::3],
    "columns": lambda: torch.randn(90, 80)[:, 10:70],
    "bfloat16 columns": lambda: torch.randn(90, 80).bfloat16()[:, 10:70],
    "transposed rows": lambda: torch.randn(90, 80).t()[3:, :],
    "expanded": lambda: torch.randn(40, 1, 90).expand(40, 3, 90),
    "constant": lambda: torch.full((7000,), 0.1, dtype=torch.float64),
    "whole": lambda: torch.randint(-1000, 1000, (5000,)),
    "large whole": lambda: torch.randint(-(2**62), 2**62, (5000,)),
    "squares overflow": lambda: torch.randn(3000, dtype=torch.float64) * 1e300,
    "sums overflow": lambda: torch.full((5000,), 1.7e308, dtype=torch.float64),
    "distances overflow": lambda: torch.tensor([1.7e308, -1.7e308], dtype=torch.float64).repeat(
        3000
    ),
    "largest float32": lambda: torch.tensor([3.4e38, -3.4e38, 3.3e38]).repeat(1500),
}


@cache
def numbers_of_many(name: str) -> tuple[Tensor, tuple[float, ...]]:
    """Give the same tensor and numbers to each implementation: exact arithmetic is slow."""
    tensor = MANY_BLOCKS[name]()
    return tensor, numbers_of(tensor)


@pytest.mark.parametrize("name", MANY_BLOCKS)
def test_many_blocks_equal_exact_arithmetic(implementation, name: str) -> None:
    tensor, numbers = numbers_of_many(name)
    got = measure(implementation, tensor, Extras.SKETCH | Extras.COUNTS)
    kinds = {"is_merged": implementation.is_merged, "tolerance": implementation.tolerance}
    assert_row(got.rows[0], numbers, **kinds)
    assert_extras(got, numbers, tensor.dtype)
    assert_row(measure(implementation, tensor).rows[0], numbers, **kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_millions_of_elements_agree_with_torch(implementation, dtype: torch.dtype) -> None:
    x = (torch.randn(1_500_000) * 3 + 1).to(dtype)
    wide = x.double()
    row = measure(implementation, x).rows[0]
    expected = [len(x), 0, 0, 0, wide.min(), wide.max(), wide.mean()]
    near = 1e-12 if implementation.tolerance < 1e-9 else 1e-7
    assert row[:6].tolist() == expected[:6]
    assert row[6] == pytest.approx(wide.mean().item(), rel=near)
    assert row[7] == pytest.approx((wide - wide.mean()).square().sum().item(), rel=near)


def test_sketch_of_pieces_is_the_sketch_of_the_whole(implementation) -> None:
    """Past the size at which any implementation works piece by piece."""
    x = torch.randn((1 << 22) + 100)
    got = measure(implementation, x, Extras.SKETCH | Extras.COUNTS)
    rows = torch.nn.functional.pad(x.double(), (0, 28)).view(-1, 64)
    number = np.arange(1, len(rows) + 1, dtype=np.uint64)
    z = number * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    sketch = np.zeros(64)
    for j in range(64):
        signs = 1.0 - 2.0 * ((z >> np.uint64(j)) & np.uint64(1)).astype(np.float64)
        sketch[j] = signs @ rows[:, j].numpy()
    assert np.abs(got.sketches[0] - sketch).max() <= 1e-7 * x.norm().item()
    assert got.histograms[0].sum() == x.numel()
    assert got.sketched.tolist() == got.counted.tolist() == [0]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64]),
    layout=st.sampled_from(["plain", "transposed", "sliced"]),
    has_grad=st.booleans(),
)
def test_updates_equal_exact_arithmetic(
    implementation, seed: int, shape: tuple[int, ...], dtype: torch.dtype, **how
) -> None:
    layout = LAYOUTS[how["layout"]]
    rng = np.random.default_rng(seed)
    before = layout(draw_numbers(seed, shape, dtype, kind="holes"))
    step = layout(draw_numbers(seed + 1, shape, dtype, kind="normal")) * 1e-3
    keep = torch.from_numpy(np.asarray(rng.random(before.shape) < 0.5))
    after = torch.where(keep, before, before + step)
    grad = layout(draw_numbers(seed + 2, shape, dtype, kind="holes")) if how["has_grad"] else None

    log = implementation.open()
    device = implementation.device
    moved = None if grad is None else grad.to(device)
    assert log.add_update(before.to(device), after.to(device), moved) == 0
    got = log.take().wait()

    old, new = numbers_of(before), numbers_of(after)
    slope = [1.0] * len(old) if grad is None else numbers_of(grad)
    assert_row(got.rows[0], [b - a for a, b in zip(old, new, strict=True)])
    given_count = sum(g != 0 for g in slope)
    lost = sum(g != 0 and a == b for g, a, b in zip(slope, old, new, strict=True))
    assert got.updated.tolist() == [0]
    assert got.updates[0].tolist() == [given_count, lost]


def test_update_with_a_gradient_of_another_dtype_counts_its_own_zeros(implementation) -> None:
    device = implementation.device
    before = torch.tensor([1.0, 1.0, 1.0], dtype=torch.bfloat16, device=device)
    grad = torch.tensor([1e-30, 0.0, 2.0], dtype=torch.float64, device=device)
    log = implementation.open()
    log.add_update(before, before.clone(), grad)
    assert log.take().wait().updates.tolist() == [[2, 2]]


def test_update_of_many_blocks_agrees_with_torch(implementation) -> None:
    device = implementation.device
    before = torch.randn(600_000, device=device)
    after = before - 1e-4 * torch.randn_like(before)
    after[::3] = before[::3]
    grad = torch.randn_like(before)
    grad[::2] = 0
    log = implementation.open()
    log.add_update(before, after, grad)
    got = log.take().wait()
    difference = after.double() - before.double()
    assert got.rows[0][6] == pytest.approx(difference.mean().item(), rel=1e-9)
    spread = (difference - difference.mean()).square().sum().item()
    assert got.rows[0][7] == pytest.approx(spread, rel=1e-12)
    lost = int(((grad != 0) & (after == before)).sum())
    assert got.updates.tolist() == [[300_000, lost]]


def test_update_of_unlike_shapes_is_refused(implementation) -> None:
    device = implementation.device
    with pytest.raises(ValueError, match=r"differ in shape: \(3,\), \(4,\)"):
        implementation.open().add_update(
            torch.zeros(3, device=device), torch.zeros(4, device=device)
        )


def test_numbers_start_again_after_take(implementation) -> None:
    log, x = implementation.open(), torch.ones(3, device=implementation.device)
    assert [log.add(x), log.add(2 * x, Extras.SKETCH), log.add_update(x, x), log.add(3 * x)] == [
        0,
        1,
        2,
        3,
    ]
    first = log.take()
    assert log.add(4 * x, Extras.COUNTS) == 0
    second = log.take()
    # Waited for in the other order, and after more was added.
    assert second.wait().rows[:, 4].tolist() == [4]
    assert first.wait().rows[:, 4].tolist() == [1, 2, 0, 3]
    assert first.wait().sketched.tolist() == [1]
    assert first.wait().updated.tolist() == [2]
    assert second.wait().counted.tolist() == [0]
    assert log.take().wait().rows.shape == (0, 8)


def test_arrays_have_their_types_when_there_is_nothing_and_when_there_is(implementation) -> None:
    log = implementation.open()
    for extras in (0, Extras.SKETCH | Extras.COUNTS):
        if extras:
            x = torch.ones(3, device=implementation.device)
            log.add(x, extras)
            log.add_update(x, x)
        got = log.take().wait()
        k = int(bool(extras))
        shapes = {
            "rows": ((2 * k, 8), np.float64),
            "sketched": ((k,), np.int64),
            "sketches": ((k, 64), np.float32),
            "counted": ((k,), np.int64),
            "counts": ((k, 3), np.float64),
            "histograms": ((k, 256), np.int64),
            "updated": ((k,), np.int64),
            "updates": ((k, 2), np.float64),
        }
        for name, (shape, dtype) in shapes.items():
            array = getattr(got, name)
            assert (array.shape, array.dtype) == (shape, dtype), name


def test_log_grows_past_any_number_of_rows(implementation) -> None:
    log = implementation.open()
    x = torch.arange(1200, dtype=torch.float32, device=implementation.device)
    for i in range(1200):
        assert log.add(x[i], Extras.SKETCH if i % 4 == 0 else 0) == i
    got = log.take().wait()
    assert got.rows[:, 6].tolist() == list(range(1200))
    assert got.sketched.tolist() == list(range(0, 1200, 4))
    assert np.abs(got.sketches[:, 0]).tolist() == list(range(0, 1200, 4))


def test_open_log_of_the_cpu_measures() -> None:
    log = open_log("cpu")
    log.add(torch.tensor([1.0, 3.0]))
    assert log.take().wait().rows.tolist() == [[2, 0, 0, 0, 1, 3, 2, 2]]
