from __future__ import annotations

import numpy as np
import pytest
from made_steps import Network, judge

from hookline.rules.depth import Vanishing, find_slope
from hookline.rules.initial import InitScale

LAYERS = [f"l{n}" for n in range(10)]
DEEP = Network(*LAYERS)


def gradients(sizes):
    """Give the rows of the gradients of the layers, first to last."""
    return {f"{name}:output.grad": {"rms": size} for name, size in zip(LAYERS, sizes, strict=True)}


def vanishing(sizes, steps=20, **options):
    return judge(Vanishing(**options), DEEP, [DEEP.step(n, gradients(sizes)) for n in range(steps)])


def test_gradients_that_fall_layer_by_layer_vanish():
    (finding,) = vanishing([10.0 ** -(9 - n) for n in range(10)])
    assert finding.site == "l1:output.grad"
    assert finding.step == 19
    assert finding.value == pytest.approx(1e-8)


def test_gradients_that_fall_a_little_do_not_vanish():
    assert vanishing([0.5 ** (9 - n) for n in range(10)]) == []


def test_scale_of_the_loss_does_not_matter():
    for scale in (1e-30, 1e30):
        assert len(vanishing([scale * 10.0 ** -(9 - n) for n in range(10)])) == 1
        assert vanishing([scale * 0.5 ** (9 - n) for n in range(10)]) == []


def test_single_step_is_a_small_head_and_not_vanishing():
    assert vanishing([1e-6] * 9 + [1.0]) == []


def test_falls_at_both_ends_with_nothing_between_are_no_vanishing():
    assert vanishing([1e-6, 2e-6, 1e-4, 3e-3, 3e-3, 3e-3, 3e-3, 3e-3, 2e-2, 0.2]) == []


def test_gradients_that_fall_in_one_half_of_the_layers_vanish():
    assert len(vanishing([10.0 ** min(n, 6) for n in range(10)])) == 1
    assert len(vanishing([10.0 ** max(n, 3) for n in range(10)])) == 1


def cut(sizes, moves):
    """Judge gradients of such sizes, and updates of so much of their weights."""
    rows = gradients(sizes)
    rows |= {f"{n}.weight:update": {"rms": one} for n, one in zip(LAYERS, moves, strict=True)}
    return judge(Vanishing(), DEEP, [DEEP.step(n, rows) for n in range(20)])


def test_gradient_that_one_place_takes_is_found_where_weights_stay_as_they_are():
    (finding,) = cut([1e-8] * 6 + [1.0] * 4, [1e-10] * 6 + [1e-3] * 4)
    assert finding.site == "l5:output.grad"
    assert "lost between l6:output.grad and l5:output.grad" in finding.message
    assert finding.value == pytest.approx(1e-8)


def test_gradient_that_one_place_takes_is_fine_where_the_optimizer_makes_up_for_it():
    assert cut([1e-8] * 6 + [1.0] * 4, [1e-3] * 10) == []


def test_weights_that_stay_as_they_are_with_a_usual_gradient_have_a_rate_of_zero():
    assert cut([1.0] * 10, [0.0] * 6 + [1e-3] * 4) == []


def test_head_that_begins_at_nothing_takes_no_gradient_away():
    assert cut([1e-8] * 9 + [1.0], [1e-10] * 9 + [1e-3]) == []


def test_branch_that_gets_nothing_is_fine_beside_a_way_to_the_input():
    assert cut([1.0, 1e-8, 1e-8, 1e-8, *[1.0] * 6], [1e-3, *[1e-10] * 3, *[1e-3] * 6]) == []


def test_small_side_branches_do_not_count():
    assert vanishing([1.0, 1e-7, 1.0, 1e-7, 1e-8, 1.0, 1e-9, 1.0, 1e-7, 1.0]) == []


def test_layers_without_any_gradient_are_left_out():
    assert vanishing([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == []


def test_vanishing_needs_its_window():
    sizes = [10.0 ** -(9 - n) for n in range(10)]
    assert vanishing(sizes, steps=19) == []
    assert len(vanishing(sizes, steps=1, window=1)) == 1


def test_slope_of_short_profiles_is_not_told():
    assert find_slope(np.array([1e-9, 1.0, 1.0])) is None


def init(sizes, weights=None, network=DEEP):
    rows = {f"{name}:output": {"rms": size} for name, size in zip(LAYERS, sizes, strict=True)}
    rows |= {f"{name}.weight": {"rms": weights or 0.2} for name in LAYERS}
    return judge(InitScale(), network, [network.step(0, rows), network.step(1, rows)])


def test_outputs_that_grow_layer_by_layer_are_found_at_the_first_step():
    (finding,) = init([8.0**n for n in range(10)])
    assert (finding.site, finding.step) == ("l9", 0)
    assert "outputs grow from layer to layer" in finding.message


def test_outputs_that_shrink_layer_by_layer_are_found():
    (finding,) = init([0.1**n for n in range(10)])
    assert "outputs shrink from layer to layer" in finding.message


def test_scale_of_the_data_is_no_growth():
    assert init([255.0] * 10) == []
    assert init([1e6] + [1.0] * 9) == []


def test_outputs_that_are_too_large_from_the_start_are_found():
    (finding,) = init([5e4, 3e4, 1e4, 6e3, 3e3, *[800.0] * 5])
    assert (finding.site, finding.value) == ("l0", pytest.approx(5e4))
    assert finding.others == ("l1", "l2", "l3", "l4")
    assert "Normalise the input data" in finding.hint


def test_large_numbers_that_only_the_last_layer_makes_are_fine():
    assert init([1.0] * 9 + [5e4], weights=30.0) == []


def test_one_layer_of_large_data_is_found():
    network = Network("l0", width=16)
    rows = {"l0:output": {"rms": 5e4}, "l0.weight": {"rms": 0.2}}
    (finding,) = judge(InitScale(), network, [network.step(0, rows)])
    assert finding.site == "l0"
    rows["l0.weight"] = {"rms": 20.0}  # it was trained to give large numbers
    assert judge(InitScale(), network, [network.step(0, rows)]) == []


def test_table_of_large_numbers_is_found():
    network = Network("table", "a", "b", types={"table": "Embedding"})
    (finding,) = judge(InitScale(), network, [network.step(0, {"table:output": {"rms": 5e3}})])
    assert (finding.site, finding.threshold) == ("table", 1e3)
    assert judge(InitScale(), network, [network.step(0, {"table:output": {"rms": 500.0}})]) == []


def test_layer_that_begins_at_zero_is_fine():
    assert init([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e-6]) == []


def test_large_weights_are_found_though_values_are_normalised():
    (finding,) = init([12.0] * 10, weights=12 / 4)
    assert finding.value == pytest.approx(12)
    assert finding.site.endswith(".weight")


def test_large_weights_with_a_factor_beside_them_are_fine():
    assert init([1.0] * 10, weights=12 / 4) == []


def test_only_the_first_step_is_judged():
    rows = {f"{name}:output": {"rms": 8.0**n} for n, name in enumerate(LAYERS)}
    assert judge(InitScale(), DEEP, [DEEP.step(0), DEEP.step(1, rows)]) == []
