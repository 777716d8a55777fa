"""How far two tensors are apart, from tensors and from what was measured of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookline.diffs.measuring import (
    describe_error,
    divide_all,
    estimate_gaps,
    measure_gap,
    relative_error,
)
from hookline.stats.reference import measure, sketch

NAN, INF = math.nan, math.inf


def estimate(x: Tensor, y: Tensor, *, with_sketch: bool = True) -> float:
    """Estimate r from rows and sketches."""
    rows = measure(x).numpy()[None], measure(y).numpy()[None]
    sketches = sketch(x).float().numpy()[None], sketch(y).float().numpy()[None]
    distances, norms = estimate_gaps(rows, sketches if with_sketch else None)
    return float(divide_all(distances, norms)[0])


@pytest.mark.parametrize(
    ("x", "y", "r"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.0], [3.0, 4.5], 0.1),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1e-30], INF),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN, 4.0, 3.0], [NAN, 4.5, 3.0], 0.1),
        ([INF, 1.0], [INF, 1.0], 0.0),
        ([INF, 1.0], [-INF, 1.0], INF),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([NAN, 1.0], [1.0, NAN], INF),
        ([1.0, 1.0], [1.0, INF], INF),
        ([], [], 0.0),
        ([1.0, 2.0], [2.0, 1.0], math.sqrt(2 / 5)),
    ],
)
def test_relative_error_of_tensors(x: list[float], y: list[float], r: float) -> None:
    assert relative_error(torch.tensor(x), torch.tensor(y)) == pytest.approx(r)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.tensor([2**62, 1]), torch.tensor([2**62 + 1, 1])),
        (torch.tensor([2**53, 1]), torch.tensor([2**53 + 1, 1])),
        (torch.tensor([1, 2], dtype=torch.uint64), torch.tensor([1, 3], dtype=torch.uint64)),
        (torch.tensor([1, 2], dtype=torch.uint16), torch.tensor([1, 3], dtype=torch.uint16)),
        (torch.tensor([1, 2]), torch.tensor([1, 3], dtype=torch.int32)),
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (torch.zeros(3, dtype=torch.bool), torch.tensor([False, True, False])),
    ],
)
def test_whole_numbers_are_compared_as_such(x: Tensor, y: Tensor) -> None:
    assert relative_error(x, y) > 0
    assert relative_error(x, x.clone()) == relative_error(y, y.clone()) == 0


def test_whole_numbers_from_statistics() -> None:
    """The largest of many that is off by one is far below what is seen of numbers."""
    x = 1000 * torch.arange(100_000)
    y = x.clone()
    y[-1] += 1
    rows = measure(x).numpy()[None], measure(y).numpy()[None]
    for is_whole in (False, True):
        distances, _ = estimate_gaps(rows, None, is_whole=np.array([is_whole]))
        assert bool(distances[0] > 0) is is_whole


@pytest.mark.parametrize("size", [1e-310, 1e-300, 1e-200, 1e200, 1e300])
@pytest.mark.parametrize("with_sketch", [False, True])
def test_numbers_whose_squares_are_out_of_range(size: float, with_sketch: bool) -> None:
    x = size * torch.linspace(1, 2, 50, dtype=torch.float64)
    for y, r in ((x, 0), (1.5 * x, 0.5), ((1 + 1e-9) * x, 0)):
        assert relative_error(x, y) == pytest.approx(r, abs=1e-8)
        found = estimate(x, y, with_sketch=with_sketch)
        assert found == 0 if r == 0 else r / 20 < found < 2 * r


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_relative_error_of_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.arange(1, 9)
    assert relative_error(x.to(dtype), x.double()) == 0
    assert relative_error(x.to(dtype), (x * 2).to(dtype)) == pytest.approx(1)


def test_relative_error_of_flags_and_complex_numbers() -> None:
    flags = torch.tensor([True, False, True, True])
    assert relative_error(flags, flags.clone()) == 0
    assert relative_error(flags, ~flags) == pytest.approx(math.sqrt(4 / 3))
    z = torch.tensor([3 + 4j])
    assert relative_error(z, z * 1j) == pytest.approx(math.sqrt(2))


def test_relative_error_does_not_overflow_or_vanish() -> None:
    x = torch.full((4,), 1e300, dtype=torch.float64)
    assert relative_error(x, x * 1.5) == pytest.approx(0.5)
    tiny = torch.full((4,), 1e-40)
    assert relative_error(tiny, tiny * 2) == pytest.approx(1)


def test_relative_error_sums_in_float64_over_chunks() -> None:
    """In float32 the 3e-8 that every element is off would be lost in the sum."""
    x = torch.ones((1 << 20) + 5, dtype=torch.float64)
    assert relative_error(x, x * (1 + 3e-8)) == pytest.approx(3e-8)


def test_relative_error_of_strided_and_sparse_tensors() -> None:
    x = torch.randn(6, 5)
    assert relative_error(x.T.contiguous(), x.T) == 0
    assert relative_error(x.to_sparse(), x) == 0
    assert measure_gap(x, x[:5]).distance == INF


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3000), st.floats(1e-5, 10.0), st.integers(0, 1000))
def test_sketch_estimates_the_relative_error(size: int, r: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    noise = torch.randn(size, generator=generator, dtype=torch.float64)
    y = x + noise * (r * x.norm() / noise.norm())
    estimated = estimate(x, y)
    if size <= 64:
        assert estimated == pytest.approx(relative_error(x, y), rel=1e-3)
    else:
        assert 0.4 * r < estimated < 1.8 * r


def test_sketch_sees_a_permutation_that_statistics_do_not() -> None:
    x = torch.randn(4, 100)
    y = x[[1, 0, 2, 3]]
    assert estimate(x, y, with_sketch=False) == pytest.approx(0, abs=1e-7)
    assert estimate(x, y) > 0.5


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 500), st.floats(0, 10.0), st.integers(0, 1000))
def test_statistics_alone_never_say_too_much(size: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, other = torch.randn(2, size, generator=generator, dtype=torch.float64)
    y = x + scale * other
    assert estimate(x, y, with_sketch=False) <= relative_error(x, y) * (1 + 1e-6)


def test_estimate_of_what_is_not_finite() -> None:
    x = torch.tensor([NAN, INF, 1.0, 2.0])
    assert estimate(x, x.clone()) == 0
    assert estimate(x, torch.tensor([1.0, INF, 1.0, 2.0])) == INF
    assert estimate(x, torch.tensor([NAN, -INF, 1.0, 2.0])) == INF
    huge = torch.full((200,), 3e38, dtype=torch.float64)
    assert estimate(huge, huge.clone()) == 0  # their sums pass the largest float32
    empty = torch.zeros(0)
    assert estimate(empty, empty) == 0
    assert estimate(torch.zeros(3), torch.zeros(3)) == 0
    assert estimate(torch.zeros(3), torch.ones(3)) == INF


def test_estimate_of_what_was_not_measured_is_nan() -> None:
    none = np.full((1, 8), np.nan)
    some = measure(torch.ones(3)).numpy()[None]
    distances, norms = estimate_gaps((none, some), None)
    assert np.isnan(distances[0])
    assert np.isnan(norms[0])


def test_describe_error_names_the_worst_element() -> None:
    x = torch.ones(2, 3, 4)
    y = x.clone()
    y[1, 2, 3] = 1.5
    found = describe_error(x, y)
    assert found.r == pytest.approx(0.5 / math.sqrt(24))
    assert (found.largest, found.where, found.values) == (0.5, (1, 2, 3), (1.0, 1.5))
    assert found.bias == pytest.approx(0.5 / 24)
    assert found.share_close == pytest.approx(23 / 24)
    assert found.profile[0] == pytest.approx((0, 0.5 / math.sqrt(12)))
    assert found.profile[2][:3] == (0, 0, 0)
    assert found.cosine == pytest.approx(
        float(torch.cosine_similarity(x.flatten(), y.flatten(), dim=0))
    )
    json.dumps(found.to_dict(), allow_nan=False)


def test_describe_error_counts_steps_of_the_coarser_dtype() -> None:
    x = torch.linspace(1, 1000, 999)
    y = x.bfloat16()
    found = describe_error(x, y)
    assert 0 < found.ulp_median <= found.ulp_p99 <= 0.5
    near = torch.nextafter(x, torch.tensor(math.inf))
    assert describe_error(x, near).ulp_p99 == pytest.approx(1)


def test_describe_error_of_odd_tensors() -> None:
    scalar = describe_error(torch.tensor(2.0), torch.tensor(3.0))
    assert (scalar.r, scalar.where, scalar.profile) == (0.5, (), {})
    assert describe_error(torch.zeros(0, 3), torch.zeros(0, 3)).r == 0
    nan = describe_error(torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]))
    assert (nan.r, nan.largest) == (0, 0)
    one_sided = describe_error(torch.tensor([NAN, 1.0]), torch.tensor([1.0, 1.0]))
    assert (one_sided.r, one_sided.where) == (INF, (0,))
    json.dumps(one_sided.to_dict(), allow_nan=False)
    whole = describe_error(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 5]))
    assert (whole.largest, whole.where) == (2, (2,))
    with pytest.raises(ValueError, match="no elements in common"):
        describe_error(torch.zeros(3), torch.zeros(4))


def test_long_profile_is_taken_together() -> None:
    x = torch.ones(10_000)
    y = x.clone()
    y[7000] = 2
    profile = describe_error(x, y).profile[0]
    assert len(profile) <= 4096
    assert [at for at, r in enumerate(profile) if r] == [7000 * len(profile) // 10_002]
