from __future__ import annotations

import pytest
from made_steps import Network, judge

from hookline.rules.no_gradient import NoGradient
from hookline.rules.saturation import Saturation
from hookline.rules.units import DeadUnits, OutlierChannels

NETWORK = Network(
    "a", "act", "b", "c", width=64, types={"act": "ReLU"}, without_weight=["act"], biases=["b"]
)


def units(site, dead=0.0, *, count=64, window=20, outlier=1.0, saturated=-1.0):
    return {site: (count, dead * count, window, outlier, saturated)}


def dead(share, *, site="act:output", network=NETWORK, **options):
    steps = [network.step(n, units=units(site, share, **options)) for n in range(20)]
    return judge(DeadUnits(), network, steps)


def test_dead_units_are_found_once_and_are_an_error_from_nine_tenths():
    (finding,) = dead(0.7)
    assert (finding.site, finding.severity, finding.value) == ("act", "warning", pytest.approx(0.7))
    (finding,) = dead(0.95)
    assert finding.severity == "error"


def test_half_of_the_units_may_be_dead():
    assert dead(0.5) == []


def test_units_that_die_while_the_training_learns_are_not_missed():
    def course(loss):
        dying = [units("act:output", 0.1 if n < 30 else 0.8) for n in range(60)]
        return [NETWORK.step(n, units=one, loss=loss(n)) for n, one in enumerate(dying)]

    assert judge(DeadUnits(), NETWORK, course(lambda n: 2.0 * 0.95**n)) == []
    (finding,) = judge(DeadUnits(), NETWORK, course(lambda n: 2.0))
    assert finding.step == 30


def test_dead_units_need_a_full_window():
    assert dead(1.0, window=19) == []


def test_few_units_have_to_be_dead_nearly_all():
    assert dead(0.8, count=10) == []
    assert len(dead(1.0, count=10)) == 1
    assert dead(1.0, count=4) == []


def test_rows_of_a_gradient_tell_of_dead_units_too():
    rows = {"b:output": {"rms": 10.0, "mean": -10.0}}
    steps = [NETWORK.step(n, rows, units=units("b.weight:grad", 1.0)) for n in range(20)]
    (finding,) = judge(DeadUnits(), NETWORK, steps)
    assert finding.site == "b.weight:grad"
    assert "of the 64 units of b are dead" in finding.message


def test_layer_whose_output_is_alive_is_not_dead_for_want_of_a_gradient():
    assert dead(1.0, site="b.weight:grad") == []


def test_rows_of_the_last_layer_may_be_unused():
    assert dead(1.0, site="c.weight:grad") == []


def test_rows_without_gradient_mean_nothing_when_none_flows():
    rows = {site.address: {"rms": 0.0} for site in NETWORK.sites if "gradient" in site.kind}
    steps = [NETWORK.step(n, rows, units=units("b.weight:grad", 1.0)) for n in range(20)]
    assert judge(DeadUnits(), NETWORK, steps) == []


def test_tables_have_no_dead_units():
    network = Network("a", "b", "c", width=64, types={"b": "Embedding"})
    assert dead(1.0, site="b:output", network=network) == []


def saturation(share, *, site="act:output", steps=20):
    return judge(
        Saturation(),
        NETWORK,
        [NETWORK.step(n, units=units(site, saturated=share)) for n in range(steps)],
    )


def test_saturation_has_to_last():
    assert saturation(0.8, steps=19) == []
    (finding,) = saturation(0.8)
    assert (finding.site, finding.severity) == ("act", "info")
    assert saturation(0.4) == []


def test_saturation_at_the_end_of_a_model_is_fine():
    assert saturation(1.0, site="c:output") == []


def ends(*, passed=1e-3, began=0.9, losses=None, share=0.9, width=64):
    """Judge a tanh that a model ends with, through which so much of the gradient passes."""
    network = Network("a", "b", "end", types={"end": "Tanh"}, without_weight=["end"], width=width)
    shown = units("end:output", saturated=share)
    steps = [
        network.step(
            n,
            {"b:output.grad": {"rms": passed if n else began}},
            units=None if n % 10 else shown,
            **({} if losses is None else {"loss": losses[n]}),
        )
        for n in range(40)
    ]
    return judge(Saturation(), network, steps)


def test_saturated_end_of_a_model_is_found_when_the_loss_stays_high():
    (finding,) = ends(losses=[2e4] * 40)
    assert (finding.site, finding.step) == ("end", 20)
    assert "the loss is as high as at the beginning" in finding.message


def test_saturated_end_of_a_model_is_fine_when_it_is_right():
    assert ends(losses=[0.9**n for n in range(40)]) == []


def test_end_of_a_model_that_was_saturated_from_the_start_was_right_before():
    assert ends(began=1e-3, losses=[0.01] * 40) == []


def test_saturated_end_of_a_model_is_fine_while_gradient_passes():
    assert ends(passed=0.2, losses=[2e4] * 40) == []


def test_saturated_end_of_a_model_is_fine_without_a_loss_or_with_few_channels():
    assert ends() == []
    assert ends(losses=[-1.0] * 40) == []
    assert ends(width=1, losses=[2e4] * 40) == []


def outliers(factor, *, site="a:output", rms=1.0, times=3, count=64, network=NETWORK):
    rows = {site: {"rms": rms}}
    steps = [
        network.step(n, rows, units=units(site, outlier=factor, count=count)) for n in range(times)
    ]
    return judge(OutlierChannels(), network, steps)


def test_outlier_channel_that_is_far_out_is_found_sooner():
    assert outliers(200.0, times=1) == []
    (finding,) = outliers(200.0, times=2)
    assert finding.step == 1


def test_outlier_channel_of_a_table_is_found_when_it_is_further_out():
    network = Network("table", "b", "c", width=64, types={"table": "Embedding"})
    (finding,) = outliers(80.0, site="table:output", network=network)
    assert (finding.site, finding.threshold) == ("table", 50.0)
    assert outliers(40.0, site="table:output", network=network) == []


def test_outlier_channel_is_found_after_three_times():
    assert outliers(50.0, times=2) == []
    (finding,) = outliers(50.0)
    assert (finding.site, finding.severity) == ("a", "info")
    assert outliers(15.0) == []


def test_outliers_of_few_channels_small_layers_and_outputs_are_fine():
    assert outliers(50.0, count=8) == []
    assert outliers(50.0, rms=1e-3) == []
    assert outliers(50.0, site="c:output") == []


def without(*names, how=None, steps=25, network=NETWORK):
    """Judge steps in which parameters have no gradient: none (None), or zeros."""
    rows = {f"{name}:grad": how for name in names}
    rows |= {f"{name}:update": {"rms": 0.0} for name in names}
    return judge(NoGradient(), network, [network.step(n, rows) for n in range(steps)])


@pytest.mark.parametrize("how", [None, {"rms": 0.0}])
def test_parameter_without_gradient_is_an_error(how):
    assert without("a.weight", how=how, steps=19) == []
    (finding,) = without("a.weight", how=how)
    assert (finding.site, finding.severity, finding.step) == ("a.weight", "error", 19)


def test_several_parameters_are_one_finding():
    (finding,) = without("a.weight", "c.weight")
    assert (finding.site, finding.others) == ("a.weight", ("c.weight",))


def test_bias_beside_a_weight_with_gradient_is_exempt():
    assert without("b.bias", how={"rms": 0.0}) == []
    assert without("b.bias", how=None) == []


def test_weight_whose_input_is_zero_is_not_told_of():
    assert without("b.weight", how={"rms": 0.0}) == []


def test_module_that_never_ran_is_an_info():
    network = Network("a", "b", "spare", silent=["spare"])
    (finding,) = without("spare.weight", network=network)
    assert (finding.site, finding.severity) == ("spare.weight", "info")


def test_pooler_that_nobody_uses_is_fine():
    network = Network(
        "a", "pooler.dense", "pooler", types={"pooler": "BertPooler"}, without_weight=["pooler"]
    )
    assert without("pooler.dense.weight", network=network) == []


def test_everything_at_zero_after_it_had_gradients_has_converged():
    names = ("a.weight", "b.weight", "b.bias", "c.weight")
    rows = {f"{name}:grad": {"rms": 0.0} for name in names}
    steps = [NETWORK.step(0), *(NETWORK.step(n, rows) for n in range(1, 60))]
    assert judge(NoGradient(), NETWORK, steps) == []


def test_parameter_that_began_without_and_then_had_one_is_fine():
    rows = {"a.weight:grad": {"rms": 0.0}}
    steps = [NETWORK.step(n, rows if n < 15 else {}) for n in range(60)]
    assert judge(NoGradient(), NETWORK, steps) == []


def test_parameters_of_another_optimizer_say_nothing():
    others = {
        f"{name}{end}": None
        for name in ("a.weight", "b.weight", "b.bias")
        for end in ("", ":grad", ":update")
    }
    steps = [NETWORK.step(n, others if n % 2 else {}) for n in range(80)]
    assert judge(NoGradient(), NETWORK, steps) == []


def test_update_shows_that_there_was_a_gradient():
    rows = {"a.weight:grad": None}
    assert judge(NoGradient(), NETWORK, [NETWORK.step(n, rows) for n in range(30)]) == []
