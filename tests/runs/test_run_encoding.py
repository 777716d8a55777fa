"""Blocks as bytes: what goes in comes out, exactly where that is promised."""

from __future__ import annotations

import contextlib
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hookline.runs.encoding import Encoded, decode, encode, pack_integers, unpack_integers
from hookline.runs.records import WIDTHS
from hookline.stats.rows import derive, empty_rows


def measure(values: np.ndarray) -> np.ndarray:
    """Compute the row of some numbers in the plainest way."""
    row = empty_rows(1)[0]
    exact = values.astype(np.float64)
    finite = exact[np.isfinite(exact)]
    row[:4] = len(finite), np.isnan(exact).sum(), (exact == np.inf).sum(), (exact == -np.inf).sum()
    if len(finite):
        with np.errstate(over="ignore", invalid="ignore"):
            mean = (finite / len(finite)).sum()
            row[4:] = finite.min(), finite.max(), mean, ((finite - mean) ** 2).sum()
    return row


def round_trip(kind: str, values: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
    places = np.arange(len(values)) if at is None else at
    return decode(kind, [encode(kind, values)], len(values), at=places)[0]


numbers = st.one_of(
    arrays.arrays(np.float16, st.integers(0, 6), elements=st.floats(width=16)),
    arrays.arrays(np.float32, st.integers(0, 6), elements=st.floats(width=32)),
    arrays.arrays(np.float64, st.integers(0, 6), elements=st.floats(width=64)),
    arrays.arrays(np.int64, st.integers(0, 6)),
    arrays.arrays(np.int32, st.integers(0, 6)),
    arrays.arrays(np.bool_, st.integers(0, 6)),
)


@given(st.lists(numbers, min_size=1, max_size=6))
def test_rows_come_back(sites: list[np.ndarray]) -> None:
    rows = np.stack([measure(values) for values in sites])
    back = round_trip("rows", rows)
    np.testing.assert_array_equal(back[:, :6], rows[:, :6])
    np.testing.assert_allclose(back[:, 6], rows[:, 6], rtol=1e-7)
    # Below 1e-160 the square of a deviation is no normal number, and m2 itself has lost digits.
    np.testing.assert_allclose(derive(back, "std"), derive(rows, "std"), rtol=1e-7, atol=1e-160)


@given(st.lists(numbers, min_size=2, max_size=6), st.data())
def test_some_sites_come_back_as_in_the_whole(sites: list[np.ndarray], data: st.DataObject) -> None:
    rows = np.stack([measure(values) for values in sites])
    at = np.array(sorted(data.draw(st.sets(st.integers(0, len(sites) - 1), min_size=1))))
    np.testing.assert_array_equal(round_trip("rows", rows, at), round_trip("rows", rows)[at])


def test_blocks_of_different_steps_are_read_together() -> None:
    """Steps with and without NaN, wide values and other batch sizes, in one batch."""
    plain = measure(np.array([1.0, 2.0], np.float32))
    odd = measure(np.array([1.0, np.nan, np.inf], np.float32))
    wide = measure(np.array([0.1, 1e300]))
    steps = [np.stack(rows) for rows in ([plain, odd], [plain, plain], [wide, odd])]
    back = decode("rows", [encode("rows", one) for one in steps], 2, at=np.array([0, 1]))
    np.testing.assert_array_equal(back[:, :, :6], np.stack(steps)[:, :, :6])


def test_rows_of_half_precision_take_16_bytes() -> None:
    rows = np.stack([measure(np.array([1.5, 2.5, number], np.float16)) for number in range(100)])
    encoded = encode("rows", rows)
    assert len(encoded.data) == 16 * 100
    assert encoded.rare is None
    assert encoded.shared is not None
    assert len(encoded.shared) < 20  # all sites have three elements


@given(
    arrays.arrays(
        np.int64, st.tuples(st.integers(0, 4), st.just(256)), elements=st.integers(0, 2**60)
    )
)
def test_histograms_come_back(values: np.ndarray) -> None:
    np.testing.assert_array_equal(
        round_trip("histogram", values >> 20 << 20), (values >> 20 << 20).astype(float)
    )


@pytest.mark.parametrize("column", [0, 100, 255])
def test_histogram_of_one_bin_comes_back(column: int) -> None:
    values = np.zeros((3, 256), np.int64)
    values[1, column] = 7
    encoded = encode("histogram", values)
    assert len(encoded.data) < 20
    np.testing.assert_array_equal(round_trip("histogram", values), values)


@pytest.mark.parametrize("kind", sorted(WIDTHS))
def test_no_sites_and_all_zero_come_back(kind: str) -> None:
    for count in (0, 3):
        values = np.zeros((count, WIDTHS[kind]))
        np.testing.assert_array_equal(round_trip(kind, values), values)


@given(arrays.arrays(np.float32, (3, 64), elements=st.floats(width=32)))
def test_sketches_come_back_bit_for_bit(values: np.ndarray) -> None:
    assert round_trip("sketch", values).tobytes() == values.tobytes()


def test_updates_and_counts_come_back() -> None:
    updates = np.array([[10.0, 3.0, 0.1], [2.0**40, 0.0, 1e-300], [0.0, 0.0, np.inf]])
    np.testing.assert_array_equal(round_trip("updates", updates), updates)
    counts = np.array([[1.0, 2.0**52, 0.0], [0.0, 5.0, 70000.0]])
    np.testing.assert_array_equal(round_trip("counts", counts), counts)


@given(arrays.arrays(np.int64, st.integers(0, 50), elements=st.integers(0, 2**63 - 1)))
def test_integers_come_back(values: np.ndarray) -> None:
    np.testing.assert_array_equal(unpack_integers(pack_integers(values)), values)


@given(st.binary(max_size=60), st.binary(max_size=60), st.sampled_from(sorted(WIDTHS)))
def test_other_bytes_are_refused(data: bytes, shared: bytes, kind: str) -> None:
    """A damaged file gives numbers or one of the errors that the reader expects, never a crash."""
    with contextlib.suppress(ValueError, KeyError, IndexError, zlib.error):
        found = decode(kind, [Encoded(data, shared, data)], 2, at=np.array([0, 1]))
        assert found.shape == (1, 2, WIDTHS[kind])
