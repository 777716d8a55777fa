"""Trainings of many steps: the earliest step, drift, steps that are missing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from made_traces import MemoryTrace, TraceMaker
from torch import Tensor

from hookline._errors import NotComparable
from hookline.diffs.comparing import compare

SITES = ("m0:output", "m1:output", "m0.weight", "m1.weight", "m1.weight:grad", "m1.weight:update")


def make_training(
    steps: int,
    *,
    noise: Sequence[float] = (),
    weights: Sequence[float] = (),
    wrong: dict[tuple[int, str], float] | None = None,
    first_step: int = 0,
) -> MemoryTrace:
    """Make a training; values and weights of step i are off by `noise[i]` and `weights[i]`."""
    maker = TraceMaker()
    for name in ("m0", "m1"):
        maker.value(name, "output", torch.zeros(100), caller="")
    weight = [maker.parameter(name, "weight", torch.zeros(100)) for name in ("m0", "m1")]
    maker.parameter_gradient(weight[1], torch.zeros(100))
    maker.update(weight[1], torch.zeros(100))
    values = []
    for step in range(first_step, first_step + steps):
        generator = torch.Generator().manual_seed(step)
        found: dict[int, Tensor] = {}
        for site, name in enumerate(SITES):
            x, off = torch.randn(2, 100, generator=generator)
            sizes = weights if name.endswith("weight") else noise
            size = sizes[step] if step < len(sizes) else 0
            size += (wrong or {}).get((step, name), 0)
            found[site] = x + size * off * x.norm() / off.norm()
        values.append(found)
    return MemoryTrace(maker.sites, values, first_step=first_step, keeps_tensors=False)


def test_all_steps_agree() -> None:
    found = compare(make_training(5), make_training(5, noise=[1e-7] * 5))
    assert found.same
    assert found.history is not None
    assert found.history.steps == (0, 1, 2, 3, 4)
    assert found.history.r.shape == found.history.limits.shape == (5, 6)
    assert str(found).startswith("No difference: 6 sites in 5 steps agree to ")


def test_earliest_step_counts() -> None:
    wrong = {(3, "m1:output"): 0.1, (4, "m0:output"): 0.5}
    found = compare(make_training(6), make_training(6, wrong=wrong))
    assert (found.step, found.first, found.site) == (3, "m1", "m1:output")
    assert str(found).startswith("Runs agree exactly up to m1 (Linear) at step 3; it introduces ")


def test_one_step_of_many() -> None:
    wrong = {(3, "m1:output"): 0.1}
    a, b = make_training(6), make_training(6, wrong=wrong)
    assert compare(a, b, step=2).same
    found = compare(a, b, step=3)
    assert (found.step, found.first, found.history) == (3, "m1", None)
    with pytest.raises(NotComparable, match=r"has no step 9; it has 6 from 0 to 5"):
        compare(a, b, step=9)


def test_drift_is_a_note_and_no_difference() -> None:
    """Two trainings that round otherwise part slowly, and everything in them does."""
    drift = [0, 1e-6, 1e-5, 1e-4, 3e-4]
    a, b = make_training(5), make_training(5, weights=drift, noise=drift)
    found = compare(a, b)
    assert found.same
    assert found.notes == ("drift: the weights are 3e-4 apart by step 4",)
    assert str(found) == (
        "No difference: 6 sites agree exactly in the first of 5 steps; drift: the weights are 3e-4 "
        "apart by step 4."
    )


def test_difference_on_top_of_drift_is_found() -> None:
    drift = [0, 1e-6, 1e-5, 1e-4, 3e-4]
    wrong = {(4, "m0:output"): 0.3}
    a, b = make_training(5), make_training(5, weights=drift, noise=drift, wrong=wrong)
    found = compare(a, b)
    assert (found.step, found.first, found.site) == (4, "m0", "m0:output")


@pytest.mark.parametrize(("spike", "is_same"), [(5e-3, True), (5e-2, False)])
def test_site_that_drifts_unevenly(spike: float, is_same: bool) -> None:
    """One batch may be ten times more sensitive than another; that is no new difference."""
    weights, noise = [0, 1e-5, 1e-5, 1e-5, 1e-5], [0, 5e-4, 5e-4, 5e-4, spike]
    found = compare(make_training(5), make_training(5, weights=weights, noise=noise))
    assert found.same is is_same
    assert found.step == (0 if is_same else 4)


@pytest.mark.parametrize("name", ["m0.weight", "m1.weight"])
def test_weights_that_something_else_than_the_optimizer_changed(name: str) -> None:
    """They agree at the end of step 2, updates and all; at the start of step 3 one does not."""
    wrong = {(step, name): 1e-3 for step in (3, 4)}
    found = compare(make_training(5), make_training(5, wrong=wrong))
    assert (found.step, found.direction, found.site) == (3, "state", name)
    assert (found.first, found.introduced) == (name[:2], pytest.approx(1e-3, rel=0.5))
    assert "something else than the optimizer changed it" in str(found)
    assert str(found).startswith(f"Runs agree exactly up to {name[:2]} (Linear) at step 3; ")


def test_steps_that_agree_before_a_drift_are_counted() -> None:
    drift = [0, 0, 0, 1e-6, 1e-5]
    found = compare(make_training(5), make_training(5, weights=drift, noise=drift))
    assert found.same
    assert "agree exactly in the first 3 of 5 steps; drift: " in str(found)


def test_weights_that_differ_from_the_first_step_on_are_a_difference() -> None:
    found = compare(make_training(3), make_training(3, weights=[1e-3] * 3))
    assert (found.step, found.direction, found.site) == (0, "state", "m0.weight")


def test_wrong_update_is_found_in_its_step() -> None:
    wrong = {(2, "m1.weight:update"): 1.0}
    found = compare(make_training(5), make_training(5, wrong=wrong))
    assert (found.step, found.direction, found.first) == (2, "update", "m1")


def test_steps_that_one_side_lacks_are_left_out_and_named() -> None:
    found = compare(make_training(5), make_training(4, first_step=2))
    assert found.same
    assert found.history is not None
    assert found.history.steps == (2, 3, 4)
    assert str(found) == "No difference: 6 sites in 3 of 6 steps agree exactly."
    assert found.notes == ("made lacks step 5: left out", "made lacks step 0, 1: left out")


def test_steps_of_single_step_traces_need_not_have_one_number() -> None:
    found = compare(make_training(1), make_training(1, first_step=7))
    assert found.steps == (0, 7)


def test_traces_without_a_step_in_common() -> None:
    with pytest.raises(NotComparable, match="no step in common: 0 to 1 and 5 to 6"):
        compare(make_training(2), make_training(2, first_step=5))


def test_trace_without_steps() -> None:
    with pytest.raises(NotComparable, match="`made` has no steps"):
        compare(make_training(0), make_training(2))


def test_traces_of_different_models() -> None:
    other = TraceMaker()
    other.value("encoder.layer", "output", torch.randn(7, 3), type="Conv2d", caller="encoder")
    with pytest.raises(NotComparable, match=r"have no site in common \(6 and 1 sites\)"):
        compare(make_training(1), other.build())


def test_nothing_measured() -> None:
    a, b = make_training(1), make_training(1)
    b.values[0] = {}
    with pytest.raises(NotComparable, match="nothing measured of them"):
        compare(a, b)
