from __future__ import annotations

import pytest
from made_steps import Network, judge

from hookline.rules.divergence import Exploding
from hookline.rules.spikes import Spike
from hookline.rules.updates import UpdateRatio

NETWORK = Network("a", "b", "c")


def ratios(values, *, rate=1e-3, names="abc", losses=None):
    """Judge updates of so much of their weight, step by step."""
    steps = [
        NETWORK.step(
            n,
            {f"{name}.weight:update": {"rms": value} for name in names},
            lr=rate,
            **({} if losses is None else {"loss": losses[n]}),
        )
        for n, value in enumerate(values)
    ]
    return judge(UpdateRatio(), NETWORK, steps)


def test_update_far_above_its_weight_is_found_when_the_loss_is_larger_after_it():
    (finding,) = ratios([0.01, 5.0, *[0.01] * 8], losses=[1.0, 1.0, *[3.0] * 8])
    assert (finding.step, finding.value, finding.threshold) == (1, pytest.approx(5.0), 3.0)
    assert finding.site == "a.weight:update"
    assert finding.others == ("b.weight:update", "c.weight:update")


def test_update_far_above_its_weight_because_of_a_bad_batch_is_found():
    losses = [1.0] * 6 + [900.0] + [3.0] * 8
    (finding,) = ratios([0.01] * 6 + [5.0] + [0.01] * 8, losses=losses)
    assert finding.step == 6


def test_single_large_update_is_fine_when_the_loss_falls_or_is_not_known():
    values = [6.0, 0.5, *[0.1] * 20]
    assert ratios(values, losses=[90.0 * 0.5**n for n in range(22)]) == []
    assert ratios(values, losses=[1.0] * 22) == []
    assert ratios(values) == []


def test_large_updates_are_found_when_three_of_ten_are():
    assert ratios([5.0, 5.0]) == []
    (finding,) = ratios([5.0, 0.1, 5.0, 0.1, 5.0])
    assert (finding.step, finding.threshold) == (4, 1.0)


def rates(values, losses=None):
    steps = [
        NETWORK.step(n, lr=value, loss=1.0 if losses is None else losses[n])
        for n, value in enumerate(values)
    ]
    return judge(UpdateRatio(), NETWORK, steps)


def test_rate_that_decays_to_nothing_early_is_found_once():
    (finding,) = rates([0.1 * 0.5**n for n in range(100)])
    assert (finding.site, finding.step, finding.threshold) == ("", 39, 1e-6)
    assert "The learning rate has decayed to" in finding.message
    assert "since step 20" in finding.message


def test_rate_that_ends_at_nothing_is_fine():
    assert rates([1 - n / 100 for n in range(100)] + [0.0] * 19) == []
    assert rates([1 - n / 100 for n in range(100)] + [0.0] * 33) == []
    assert len(rates([1 - n / 100 for n in range(100)] + [0.0] * 34)) == 1


def test_rate_that_warms_up_or_comes_back_is_fine():
    assert rates([1e-9 * 1.3**n for n in range(60)]) == []
    assert rates(([0.1] * 5 + [0.0] * 15) * 6) == []


def test_rate_at_nothing_is_fine_once_all_is_learned():
    falling = [0.9**n for n in range(100)]
    assert rates([0.1] * 40 + [1e-9] * 60, falling) == []
    assert len(rates([0.1] * 40 + [1e-9] * 60)) == 1


def test_updates_of_a_third_have_to_last():
    assert ratios([0.4] * 19) == []
    (finding,) = ratios([0.4] * 20)
    assert finding.threshold == 0.3


def test_usual_updates_are_fine():
    for value in (0.1, 1e-2, 1e-4, 2e-6):
        assert ratios([value] * 60) == []


def test_weights_that_never_move_are_found_once():
    (finding,) = ratios([0.0] * 60, rate=0.0)
    assert finding.step == 19
    assert "The learning rate is 0." in finding.message


def test_one_weight_that_moves_is_enough():
    steps = []
    for n in range(30):
        rows = {f"{name}.weight:update": {"rms": 0.0} for name in "ab"}
        steps.append(NETWORK.step(n, rows, lr=1e-3))
    assert judge(UpdateRatio(), NETWORK, steps) == []


def test_schedule_that_ends_at_zero_is_fine():
    assert ratios([1e-3] * 5 + [0.0] * 60) == []


def test_weight_that_begins_at_zero_is_held_against_a_usual_one():
    updates = {f"{name}.weight:update": (256, 0, 0.0) for name in "abc"}
    rows = {f"{name}.weight:update": {"rms": 1e-3} for name in "abc"}
    steps = [NETWORK.step(n, rows, updates=updates, lr=1e-3) for n in range(40)]
    assert judge(UpdateRatio(), NETWORK, steps) == []


def losses(values, **options):
    return judge(
        Exploding(**options), NETWORK, [NETWORK.step(n, loss=v) for n, v in enumerate(values)]
    )


def test_loss_that_grows_tenfold_diverges():
    (finding,) = losses([2.0] * 20 + [50.0] * 5)
    assert finding.value == pytest.approx(25)
    assert "The training diverges" in finding.message


def test_loss_that_jumps_once_is_fine():
    assert losses(([2.0] * 9 + [500.0]) * 5) == []


def test_loss_that_fell_and_swings_is_fine():
    assert losses([2.0, 1.0, 0.1, *([1e-6, 1e-3] * 40)]) == []


def test_loss_with_a_sign_is_not_judged():
    assert losses([-0.01] * 20 + [50.0] * 20) == []


def test_loss_that_explodes_in_the_first_steps_is_found():
    steps = [
        NETWORK.step(n, {f"{x}.weight:update": {"rms": 2.0} for x in "abc"}, loss=v)
        for n, v in enumerate([2.3, 900.0, 4000.0, 3000.0, 2000.0, 2500.0, 2500.0])
    ]
    (finding,) = judge(Exploding(), NETWORK, steps)
    assert finding.step == 5


def test_output_that_grows_while_the_loss_falls_is_fine():
    def course(loss):
        return [NETWORK.step(n, {"c:output": {"rms": 1.2**n}}, loss=loss(n)) for n in range(40)]

    assert judge(Exploding(), NETWORK, course(lambda n: 1e8 * 0.99**n)) == []
    (finding,) = judge(Exploding(), NETWORK, course(lambda n: 1.02**n))
    assert finding.site == "c"
    assert "grows without end" in finding.message


def test_output_of_a_layer_that_began_at_zero_has_not_grown_without_end():
    network = Network("a")
    rows = {"a.weight:update": {"rms": 8.0}}
    sizes = [0.01, 1.0, 2.0, *[3.0] * 30]
    steps = [
        network.step(n, {"a:output": {"rms": size}} | (rows if n == 0 else {}), loss=0.7 + n / 40)
        for n, size in enumerate(sizes)
    ]
    assert judge(Exploding(), network, steps) == []


def test_gradients_that_grow_towards_the_input_explode():
    names = [f"l{n}" for n in range(10)]
    deep = Network(*names)
    rows = {f"{name}:output.grad": {"rms": 10.0 ** (9 - n)} for n, name in enumerate(names)}
    (finding,) = judge(Exploding(), deep, [deep.step(n, rows, loss=1.0) for n in range(20)])
    assert finding.site == "l0:output.grad"
    assert finding.value == pytest.approx(1e8)


def spikes(sizes, name="a:output"):
    return judge(
        Spike(), NETWORK, [NETWORK.step(n, {name: {"rms": v}}) for n, v in enumerate(sizes)]
    )


def test_spike_is_far_above_everything_before_it():
    (finding,) = spikes([1.0] * 25 + [80.0])
    assert (finding.site, finding.step, finding.severity) == ("a", 25, "info")
    assert finding.value == pytest.approx(80)


def test_spike_in_the_first_steps_is_none():
    assert spikes([1.0] * 10 + [80.0] * 40) == []


def test_spike_that_was_seen_before_is_none():
    assert spikes([1.0, 30.0] + [1.0] * 40 + [80.0]) == []


def test_spike_is_of_outputs_alone():
    assert spikes([1.0] * 25 + [80.0], "a:output.grad") == []


def test_spike_names_the_first_in_the_order_of_execution():
    steps = [NETWORK.step(n) for n in range(25)]
    steps.append(NETWORK.step(25, {"b:output": {"rms": 60.0}, "c:output": {"rms": 900.0}}))
    (finding,) = judge(Spike(), NETWORK, steps)
    assert (finding.site, finding.others) == ("b", ("c",))
