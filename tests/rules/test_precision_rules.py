from __future__ import annotations

import pytest
from made_steps import Network, judge

from hookline.rules.precision import Headroom, LostUpdates, Underflow

HALF = Network("a", "b", "c", dtype="float16")
BRAIN = Network("a", "b", weights="bfloat16")


def headroom(network, row):
    return judge(Headroom(), network, [network.step(0, {"b:output": row})])


def test_headroom_of_float16_ends_at_an_eighth():
    assert headroom(HALF, {"rms": 2000.0, "min": -8000.0, "max": 8100.0}) == []
    (finding,) = headroom(HALF, {"rms": 2000.0, "min": -9000.0, "max": 1000.0})
    assert (finding.site, finding.value, finding.threshold) == ("b", 9000.0, 8188.0)


@pytest.mark.parametrize("fill", [-65504.0, -1e4, -30000.0])
def test_headroom_is_not_used_up_by_the_fill_of_a_mask(fill):
    assert headroom(HALF, {"rms": 5000.0, "mean": -3000.0, "min": fill, "max": 6.0}) == []


def test_headroom_of_wide_types_is_large():
    network = Network("a", "b", "c")
    assert headroom(network, {"rms": 1e20}) == []
    assert len(headroom(network, {"rms": 1e31})) == 1
    assert headroom(network, {"rms": 1e31, "min": -3.4e38, "max": 3.0}) == []


def test_headroom_is_of_outputs_alone():
    steps = [HALF.step(0, {"b:output.grad": {"rms": 20000.0}})]
    assert judge(Headroom(), HALF, steps) == []


def underflow(share, rms, *, steps=3, scale=None):
    """Judge gradients of which so many elements are tiny, half of the others being zero."""
    grads = [f"{name}:output.grad" for name in "abc"]
    counts = dict.fromkeys(grads, (256, 256 * share, 0))
    rows = {name: {"rms": rms} for name in grads}
    scalars = {} if scale is None else {"grad_scale": scale}
    return judge(
        Underflow(), HALF, [HALF.step(n, rows, counts=counts, **scalars) for n in range(steps)]
    )


def test_underflow_is_of_elements_that_are_not_zero():
    assert underflow(0.1, 1e-3) == []
    (finding,) = underflow(0.9, 1e-6)
    assert finding.value == pytest.approx(0.9)
    assert finding.step == 1
    assert "without a loss scale" in finding.message


def test_underflow_of_small_elements_beside_large_ones_is_none():
    assert underflow(0.9, 1e-2) == []


def test_underflow_counts_what_flowed_and_not_what_a_scale_left():
    assert underflow(0.9, 1e-6, scale=65536.0) == []


def test_underflow_of_float32_is_none():
    network = Network("a", "b")
    counts = {"a:output.grad": (0, 500, 0)}
    rows = {"a:output.grad": {"rms": 1e-39}}
    steps = [network.step(n, rows, counts=counts) for n in range(3)]
    assert judge(Underflow(), network, steps) == []


def test_underflow_at_convergence_is_none():
    grads = [f"{name}:output.grad" for name in "abc"]
    early = HALF.step(0)
    counts = dict.fromkeys(grads, (0, 500, 0))
    late = [
        HALF.step(n, {name: {"rms": 1e-6} for name in grads}, counts=counts) for n in range(1, 5)
    ]
    assert judge(Underflow(), HALF, [early, *late]) == []


def lost(share, network=BRAIN, *, steps=20, rates=None):
    updates = {f"{name}.weight:update": (256, 256 * share, 16.0) for name in "ab"}
    rates = rates or [1e-3] * steps
    return judge(
        LostUpdates(),
        network,
        [network.step(n, updates=updates, lr=r) for n, r in enumerate(rates)],
    )


def test_lost_updates_are_found_after_a_window():
    assert lost(0.9, steps=19) == []
    (finding,) = lost(0.9)
    assert (finding.step, finding.value) == (19, pytest.approx(0.9))
    assert lost(0.4) == []


def test_lost_updates_of_float32_are_not_judged():
    assert lost(0.9, Network("a", "b")) == []


def test_lost_updates_at_the_end_of_a_schedule_are_meant():
    assert lost(0.9, rates=[1e-3] * 10 + [1e-5] * 40) == []


def large(size, share, *, moves=1e-6, steps=40):
    """Judge float32 weights of such a size, of which so many elements lose their update."""
    network = Network("a", "b")
    updates = {"a.weight:update": (256, 256 * share, 16.0 * size)}
    rows = {"a.weight:update": {"rms": moves}}
    return judge(
        LostUpdates(),
        network,
        [network.step(n, rows, updates=updates, lr=1e-4) for n in range(steps)],
    )


def test_lost_updates_of_very_large_weights_are_found_in_float32():
    (finding,) = large(3e4, 0.95)
    assert (finding.site, finding.step) == ("a.weight:update", 19)
    assert "rounded away in float32" in finding.message
    assert "smaller" in finding.hint
    assert large(3e4, 0.3) == []


def test_lost_updates_of_usual_weights_are_for_want_of_a_gradient():
    assert large(1.0, 0.95) == []


def test_large_weight_that_does_not_move_at_all_has_a_rate_of_zero():
    assert large(3e4, 1.0, moves=0.0) == []


def test_large_weights_that_have_moved_have_converged():
    network = Network("a", "b")
    steps = [
        network.step(n, updates={"a.weight:update": (256, 250 if n else 0, 16e4)}, lr=1e-4)
        for n in range(60)
    ]
    assert judge(LostUpdates(), network, steps) == []
