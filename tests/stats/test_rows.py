"""Rows merge exactly in any order and split; what is derived from them is numpy's answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from exact_statistics import assert_row, exact_row
from hypothesis import given
from hypothesis import strategies as st

from hookline.stats.rows import (
    COLUMNS,
    STATS,
    derive,
    empty_rows,
    merge_rows,
    scale_rows,
)

NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True, width=32),
    st.floats(min_value=1e6, max_value=1e6 + 1, width=32),
    st.sampled_from([0.0, 1.0, -1.0, math.inf, -math.inf, math.nan]),
)
SAMPLES = st.lists(NUMBERS, max_size=30)


def row_of(numbers: list[float]) -> np.ndarray:
    return np.array(exact_row(tuple(numbers)), dtype=np.float64)


@given(st.lists(SAMPLES, min_size=1, max_size=6), st.randoms())
def test_merge_of_any_split_is_the_row_of_all(parts: list[list[float]], random) -> None:
    rows = [row_of(part) for part in parts]
    random.shuffle(rows)
    merged = merge_rows(np.array(rows), [0] * len(rows), 1)[0]
    assert_row(merged, [x for part in parts for x in part], is_merged=True)


@given(st.lists(SAMPLES, min_size=2, max_size=6))
def test_merging_step_by_step_agrees_with_merging_at_once(parts: list[list[float]]) -> None:
    rows = np.array([row_of(part) for part in parts])
    at_once = merge_rows(rows, [0] * len(rows), 1)[0]
    grown = rows[0]
    for row in rows[1:]:
        grown = merge_rows(np.stack([row, grown]), [0, 0], 1)[0]
    assert grown[:6].tolist() == at_once[:6].tolist()
    scale = max((abs(x) for part in parts for x in part if math.isfinite(x)), default=0)
    assert grown[6] == pytest.approx(at_once[6], rel=1e-12, abs=1e-12 * scale)
    assert grown[7] == pytest.approx(at_once[7], rel=1e-12, abs=1e-24 * scale**2)


def test_rows_go_to_their_groups_and_absent_groups_are_empty() -> None:
    rows = np.array([row_of([1.0]), row_of([2.0, 4.0]), row_of([3.0])])
    merged = merge_rows(rows, np.array([2, 0, 2]), 4)
    assert_row(merged[0], [2.0, 4.0])
    assert_row(merged[2], [1.0, 3.0])
    np.testing.assert_array_equal(merged[[1, 3]], empty_rows(2))


def test_merging_nothing_gives_empty_rows() -> None:
    np.testing.assert_array_equal(merge_rows(empty_rows(0), [], 2), empty_rows(2))
    np.testing.assert_array_equal(merge_rows(empty_rows(3), [0, 0, 1], 2), empty_rows(2))


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=40), st.floats(-10, 10))
def test_merging_equal_means_makes_up_no_spread(counts: list[int], value: float) -> None:
    rows = np.array([[count, 0, 0, 0, value, value, value, 0] for count in counts])
    merged = merge_rows(rows, [0] * len(rows), 1)[0]
    assert merged.tolist() == [sum(counts), 0, 0, 0, value, value, value, 0]


def test_merging_the_largest_numbers_does_not_overflow_the_mean() -> None:
    rows = np.array([row_of([1.7e308]), row_of([-1.7e308]), row_of([1.7e308])])
    merged = merge_rows(rows, [0, 0, 0], 1)[0]
    assert merged[6] == pytest.approx(1.7e308 / 3, rel=1e-12)
    assert merged[7] == math.inf


@given(SAMPLES, st.sampled_from([2.0, -0.5, 0.0, 1 / 1024, -3.0]))
def test_scaled_rows_are_the_rows_of_scaled_numbers(numbers: list[float], factor: float) -> None:
    scaled = scale_rows(np.array([row_of(numbers)]), factor)[0]
    assert_row(scaled, [factor * x for x in numbers])


def test_each_row_may_have_its_own_factor() -> None:
    rows = np.array([row_of([1.0, 2.0]), row_of([5.0]), row_of([])])
    scaled = scale_rows(rows, np.array([2.0, -1.0, -1.0]))
    assert_row(scaled[0], [2.0, 4.0])
    assert_row(scaled[1], [-5.0])
    assert_row(scaled[2], [])


def test_scaling_leaves_the_given_rows_alone() -> None:
    rows = np.array([row_of([1.0, 2.0, math.inf])])
    before = rows.copy()
    scale_rows(rows, -2.0)
    np.testing.assert_array_equal(rows, before)


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_scaling_by_what_is_not_finite_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="finite factors"):
        scale_rows(empty_rows(1), factor)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
def test_derived_statistics_are_numpys(numbers: list[float]) -> None:
    x = np.array(numbers, dtype=np.float64)
    expected = {
        "count": x.size,
        "finite": x.size,
        "nan": 0,
        "posinf": 0,
        "neginf": 0,
        "inf": 0,
        "min": x.min(),
        "max": x.max(),
        "absmax": np.abs(x).max(),
        "mean": x.mean(),
        "sum": x.sum(),
        "sumsq": np.square(x).sum(),
        "std": x.std(),
        "rms": np.sqrt(np.square(x).mean()),
        "l2": np.linalg.norm(x),
    }
    assert set(expected) == set(STATS)
    rows = np.array([row_of(numbers)])
    scale = np.abs(x).max() * x.size
    for stat, value in expected.items():
        assert derive(rows, stat)[0] == pytest.approx(value, rel=1e-9, abs=1e-13 * scale), stat


def test_without_finite_elements_sizes_are_nan_and_sums_are_zero() -> None:
    rows = np.array([row_of([math.nan, math.inf, -math.inf, -math.inf]), row_of([])])
    for stat in ("min", "max", "absmax", "mean", "std", "rms"):
        assert np.isnan(derive(rows, stat)).all(), stat
    for stat in ("sum", "sumsq", "l2", "finite"):
        assert derive(rows, stat).tolist() == [0, 0], stat
    counts = [derive(rows, stat).tolist() for stat in ("count", "nan", "posinf", "neginf", "inf")]
    assert counts == [[4, 0], [1, 0], [1, 0], [2, 0], [3, 0]]


def test_norm_is_finite_where_the_sum_of_squares_is_not() -> None:
    rows = np.array([[4, 0, 0, 0, 1e200, 1e200, 1e200, 0.0]])
    assert derive(rows, "sumsq")[0] == math.inf
    assert derive(rows, "l2")[0] == pytest.approx(2e200)
    assert derive(rows, "rms")[0] == pytest.approx(1e200)


def test_unknown_statistic_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"`median` is not a statistic\. There are: count, "):
        derive(empty_rows(1), "median")


def test_an_empty_row_has_a_value_for_each_column() -> None:
    assert dict(zip(COLUMNS, empty_rows(1)[0].tolist(), strict=True)) == {
        "finite": 0,
        "nan": 0,
        "posinf": 0,
        "neginf": 0,
        "min": math.inf,
        "max": -math.inf,
        "mean": 0,
        "m2": 0,
    }
