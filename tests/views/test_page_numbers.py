"""Numbers on their way into a page: pooled, packed, chosen."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from reported_runs import rms_of, write_broken, write_large, write_run

from hookline.runs import Run, open_run
from hookline.views import read_report
from hookline.views.payload import Payload, make_payload
from hookline.views.pooling import Columns, choose_columns, pool, pool_line, read_exponents
from hookline.views.quantising import Packed, pack, unpack

NUMBERS = st.one_of(
    st.floats(width=32, allow_subnormal=False),
    st.sampled_from([0.0, np.nan, np.inf]),
)


@settings(deadline=None, max_examples=60)
@given(arrays.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=NUMBERS))
def test_packed_numbers_come_back_with_their_kind(values: np.ndarray) -> None:
    """Over all of float32 at once the steps are coarser, and still within a percent."""
    found = unpack(pack(values))
    finite = np.isfinite(values)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(values))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(values))
    np.testing.assert_array_equal(found[finite] == 0, values[finite] == 0)
    np.testing.assert_allclose(found[finite], values[finite], rtol=0.01)


def test_packed_numbers_keep_three_digits() -> None:
    values = 10.0 ** np.random.default_rng(0).uniform(-12, 6, (40, 300))
    np.testing.assert_allclose(unpack(pack(values)), values, rtol=7e-4)


def test_pooling_keeps_the_largest_and_its_sign() -> None:
    values = np.array([[1.0, -5.0, np.nan, 2.0, np.nan, np.nan, 7.0]])
    np.testing.assert_array_equal(pool(values, 2), [[-5.0, 2.0, np.nan, 7.0]])
    assert pool(values, 1) is values
    np.testing.assert_array_equal(pool(np.array([[1.0, np.inf, 3.0]]), 3), [[np.inf]])


def test_pooling_a_line_keeps_its_extremes_and_shows_a_nan() -> None:
    mean, low, high = pool_line(np.array([1.0, 3.0, np.nan, 2.0, 5.0]), 2)
    np.testing.assert_array_equal(mean, [2.0, np.nan, 5.0])
    np.testing.assert_array_equal(low, [1.0, 2.0, 5.0])
    np.testing.assert_array_equal(high, [3.0, 2.0, 5.0])


def test_columns_say_which_steps_they_stand_for() -> None:
    columns = choose_columns(np.arange(0, 70, 10), 4)
    assert (columns.count, columns.stride) == (4, 2)
    assert columns.first.tolist() == [0, 20, 40, 60]
    assert columns.last.tolist() == [10, 30, 50, 60]
    assert columns.halve().last.tolist() == [30, 60]
    assert Columns(np.empty(0, np.int64), 1).last.tolist() == []


def read_map(payload: Payload, kind: str, stat: str) -> np.ndarray:
    """Read a map as the page reads it."""
    facts = next(one for one in payload.facts["maps"] if (one["kind"], one["stat"]) == (kind, stat))
    shape = (facts["rows"], facts["columns"])
    data = payload.chunks[facts["chunk"]]
    return unpack(Packed(data, shape, facts["base"], facts["steps"], facts["signed"]))


def test_payload_holds_the_values_of_the_run(tmp_path: Path) -> None:
    payload = make_payload(read_report(write_run(tmp_path)))
    expected = [[rms_of(site, step) for step in range(10)] for site in range(5)]
    np.testing.assert_allclose(read_map(payload, "value", "rms"), expected, rtol=7e-4)
    assert payload.facts["sites"]["value"][0][0] == "embed:output"
    assert payload.facts["columns"]["last"] == list(range(10))


def test_gradients_are_in_the_order_of_the_forward(tmp_path: Path) -> None:
    payload = make_payload(read_report(write_run(tmp_path)))
    names = [site[0] for site in payload.facts["sites"]["gradient"]]
    assert (names[0], names[-1]) == ("embed:output.grad", "head:output.grad")
    expected = [[rms_of(site, step) for step in range(10)] for site in range(9, 4, -1)]
    np.testing.assert_allclose(read_map(payload, "gradient", "rms"), expected, rtol=7e-4)


def test_payload_marks_what_is_not_finite_and_where_findings_are(tmp_path: Path) -> None:
    payload = make_payload(read_report(write_broken(tmp_path)))
    counts = read_map(payload, "value", "nan")
    assert counts[2:, 7:] == pytest.approx(3, rel=1e-3)
    assert not counts[:2].any()
    assert not counts[:, :7].any()
    assert not any(one["stat"] == "posinf" for one in payload.facts["maps"])
    cause, spike = payload.facts["groups"]
    assert cause["root"]["place"] == ["value", 2]
    assert cause["follows"][0]["place"] == ["update", 4]
    assert spike["root"]["place"] == ["value", 4]


def test_a_site_without_anything_finite_is_not_a_site_that_was_not_measured(
    tmp_path: Path,
) -> None:
    from hookline.runs import Block, RunWriter, StepRecord
    from hookline.stats.rows import empty_rows

    write_run(tmp_path, steps=3)
    with RunWriter(tmp_path, resume=True) as writer:
        from reported_runs import list_sites

        writer.add_sites(list_sites(["embed", "blocks.0.attn"]))
        rows = empty_rows(1)
        rows[0, :2] = 0, 32
        writer.write(StepRecord(3, 1003.0, blocks=[Block("rows", np.array([1], np.int32), rows)]))
    found = read_map(make_payload(read_report(open_run(tmp_path))), "value", "rms")
    assert np.isinf(found[1, 3])
    assert np.isnan(found[0, 3])


def test_exponents_are_shares_over_the_steps_that_have_them(tmp_path: Path) -> None:
    steps, shares = read_exponents(write_run(tmp_path), "value", 3) or (None, None)
    assert steps is not None
    assert steps.tolist() == [0, 4, 8]
    np.testing.assert_allclose(shares[:, :, 126], 0.75)
    np.testing.assert_allclose(shares[:, :, 0], 0.25)
    assert read_exponents(write_run(tmp_path / "none", steps=0), "value", 3) is None


def test_exponents_reach_the_page_as_levels(tmp_path: Path) -> None:
    payload = make_payload(read_report(write_run(tmp_path)))
    facts = payload.facts["exponents"]["value"]
    levels = np.frombuffer(zlib.decompress(payload.chunks[facts["chunk"]]), np.uint8)
    levels = levels.reshape(5, len(facts["steps"]), facts["bins"])
    assert set(np.unique(levels)) == {0, 13, 15}
    assert (levels[:, :, 126 - facts["low"]] == 15).all()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Give a run of 500 sites over 2000 steps."""
    return write_large(tmp_path_factory.mktemp("large"))


def test_a_large_run_has_fewer_columns_and_loses_no_nan(large: Run) -> None:
    payload = make_payload(read_report(large))
    assert payload.size < 2_200_000
    stats = [one["stat"] for one in payload.facts["maps"]]
    assert {"nan", "rms", "absmax"} <= set(stats)
    stride = payload.facts["columns"]["stride"]
    counts = read_map(payload, "value", "nan")
    assert np.argwhere(counts > 0).tolist() == [[333, 777 // stride]]
    exact = large.series("model.layers.42.mlp", "rms").values
    wanted = exact.reshape(-1, stride).max(axis=1)
    np.testing.assert_allclose(read_map(payload, "value", "rms")[42], wanted, rtol=7e-4)


def test_a_long_run_is_pooled(tmp_path: Path) -> None:
    payload = make_payload(read_report(write_large(tmp_path, sites=3, steps=4100)))
    columns = payload.facts["columns"]
    assert len(columns["first"]) <= 2000
    assert columns["last"][-1] == 4099
    assert len(payload.facts["scalars"]["first"]) == 2050


def test_very_many_sites_leave_the_page_small(tmp_path: Path) -> None:
    payload = make_payload(read_report(write_large(tmp_path, sites=12_000, steps=120)))
    assert payload.size < 2_200_000
    assert len(payload.facts["sites"]["value"]) == 12_000
    assert "rms" in [one["stat"] for one in payload.facts["maps"]]
