from __future__ import annotations

import pytest
from made_steps import Network, judge

from hookline.rules.non_finite import NonFinite

NAN = {"nan": 3.0}
NETWORK = Network("a", "b", "c")


def find(*steps, network=NETWORK):
    return judge(NonFinite(), network, steps)


def test_first_nan_of_forward_is_the_producer_and_the_rest_carried_it():
    names = ("b:output", "c:output", "c:output.grad", "b:output.grad", "a.weight:grad")
    bad = dict.fromkeys(names, NAN)
    (finding,) = find(NETWORK.step(0), NETWORK.step(1, bad, loss=float("nan")))
    assert (finding.site, finding.step, finding.severity) == ("b", 1, "error")
    assert finding.value == 3
    assert finding.others == ("c", "c:output.grad", "b:output.grad", "a.weight:grad")
    assert finding.message == (
        "b made the first NaN at step 1 (model.py:1); everything that ran before it was finite; "
        "4 sites downstream only carried it on."
    )
    assert finding.evidence[:2] == (
        "step 1: b has 3 NaN of 512",
        "step 0: finite, rms 1, largest 3",
    )


def test_later_steps_are_not_told_again():
    bad = {"b:output": NAN}
    assert len(find(NETWORK.step(1, bad), NETWORK.step(2, {"a:output": NAN}))) == 1


def test_order_of_backward_is_the_order_of_ids():
    (finding,) = find(NETWORK.step(0, {"b:output.grad": NAN, "a:output.grad": NAN}, loss=1.0))
    assert finding.site == "b:output.grad"
    assert "all outputs were finite" in finding.message


def test_loss_comes_between_outputs_and_gradients():
    bad = {"c:output.grad": NAN, "a.weight:grad": NAN}
    (finding,) = find(NETWORK.step(0, bad, loss=float("inf")))
    assert finding.site == ""
    assert finding.message.startswith("The loss became inf at step 0, and all outputs were finite")


def test_loss_alone_is_enough():
    (finding,) = find(NETWORK.step(0, loss=float("nan")))
    assert finding.value is None
    assert finding.message == "The loss became nan at step 0, and all outputs were finite."


def test_parameter_that_was_bad_before_is_the_cause():
    bad = {"a:output": NAN, "b.weight": NAN, "c:output": NAN}
    (finding,) = find(NETWORK.step(0, bad))
    assert finding.site == "b.weight"
    assert "already when step 0 began" in finding.message


def test_update_of_finite_gradients_is_the_optimizers():
    (finding,) = find(NETWORK.step(0, {"b.weight:update": {"posinf": 1.0}}))
    assert finding.site == "b.weight:update"
    assert finding.message.startswith("The optimizer made the first infinity")


def test_masks_of_minus_infinity_do_not_alarm():
    assert find(*(NETWORK.step(n, {"b:output": {"neginf": 200.0}}) for n in range(5))) == []


def test_minus_infinity_that_was_never_there_is_the_producer_of_a_nan():
    bad = {"b:output": {"neginf": 1.0}, "c:output": NAN}
    (finding,) = find(NETWORK.step(0), NETWORK.step(1, bad))
    assert finding.site == "b"


def test_mask_is_not_the_producer_of_a_nan():
    mask = {"b:output": {"neginf": 9.0}}
    (finding,) = find(NETWORK.step(0, mask), NETWORK.step(1, {**mask, "c:output": NAN}))
    assert finding.site == "c"


def test_plus_infinity_alarms():
    (finding,) = find(NETWORK.step(0), NETWORK.step(1, {"b:output": {"posinf": 1.0}}))
    assert (finding.site, finding.more["kind"]) == ("b", "inf")


def test_plus_infinity_from_the_start_that_does_no_harm_is_a_mask():
    step = {"b:output": {"posinf": 1.0}}
    assert find(*(NETWORK.step(n, step, loss=1.0) for n in range(4))) == []


def test_data_is_suspected_where_the_first_module_shows_it():
    (finding,) = find(NETWORK.step(0, {"a:output": NAN, "b:output": NAN}))
    assert "look at the batch" in finding.hint


@pytest.mark.parametrize(("good", "limit"), [(0, 14), (2, 8)])
def test_skipped_steps_of_a_scaler_are_fine_until_there_are_many(good, limit):
    bad = {"a:output.grad": {"posinf": 5.0}, "a.weight:grad": {"posinf": 5.0}}
    steps = [NETWORK.step(n, grad_scale=65536.0) for n in range(good)]
    steps += [
        NETWORK.step(good + n, bad, grad_scale=2.0 ** (16 - n), skipped=1.0)
        for n in range(limit - 1)
    ]
    assert find(*steps) == []
    last = NETWORK.step(good + limit, bad, grad_scale=4.0, skipped=1.0)
    (finding,) = find(*steps, last)
    assert finding.value == limit
    assert finding.site == "a:output.grad"


def test_scaler_does_not_excuse_outputs():
    step = NETWORK.step(0, {"b:output": {"posinf": 1.0}, "a.weight:grad": NAN}, skipped=1.0)
    assert [one.site for one in find(step)] == ["b"]


def test_scale_below_one_is_too_small():
    bad = {"a.weight:grad": {"posinf": 5.0}}
    assert len(find(NETWORK.step(0, bad, grad_scale=0.5, skipped=1.0))) == 1


def test_origin_names_operation_line_and_inputs():
    origin = {
        "site": "b/softmax",
        "operation": "softmax",
        "is_backward": False,
        "source": "model.py:48",
        "line": "  weights = scores.softmax(-1)",
        "kind": "nan",
        "cause": "operation",
        "inputs": [{"name": "0", "shape": [2, 4], "dtype": "float32", "min": -1.0, "max": 9.5}],
    }
    step = NETWORK.step(7, {"b:output": NAN, "c:output": NAN}, more={"origin": origin})
    (finding,) = find(step)
    assert (finding.site, finding.source) == ("b/softmax", "model.py:48")
    assert finding.message == (
        "b/softmax made the first NaN at step 7 (model.py:48); its input was finite; "
        "2 sites downstream only carried it on."
    )
    assert "model.py:48: weights = scores.softmax(-1)" in finding.evidence
    assert "input 0: float32 2x4, -1 to 9.5" in finding.evidence
    assert finding.more["origin"]["operation"] == "softmax"


def test_origin_in_the_input_says_so():
    origin = {"site": ":input.x", "cause": "input", "kind": "nan", "source": "", "inputs": []}
    step = NETWORK.step(3, {"a:output": NAN}, more={"origin": origin})
    (finding,) = find(step)
    assert finding.message.startswith("The input of the model held a NaN already at step 3")


def tell(**facts):
    origin = {"site": "b/op", "source": "model.py:48", "kind": "nan", "cause": "operation"} | facts
    (finding,) = find(NETWORK.step(7, {"b:output": NAN, "c:output": NAN}, more={"origin": origin}))
    return finding


def test_reason_stands_in_the_message():
    finding = tell(why="softmax of a row that is all -inf (16 rows)", inputs=[{"inf": 4}])
    assert finding.message == (
        "b/op made the first NaN at step 7 (model.py:48): softmax of a row that is all -inf "
        "(16 rows); 2 sites downstream only carried it on."
    )
    assert finding.hint.startswith("Give every row something to look at")


def test_input_with_an_infinity_is_not_called_finite():
    finding = tell(why="op gave NaN, and was given none", inputs=[{"inf": 4, "nan": 0}])
    assert finding.message.startswith("b/op made the first NaN at step 7 (model.py:48); 2 sites")


@pytest.mark.parametrize(
    ("why", "hint"),
    [
        ("division by zero (1 element of `deg` is 0)", "Add an epsilon to the divisor"),
        ("log of 0 (3 elements)", "Clamp what goes into the log"),
        ("exp of 89.1 overflows float32", "Take the largest away"),
        ("exp of 12.1 overflows float16", "Use bfloat16"),
        ("float16 overflow: 7e+04 > 65504", "Use bfloat16"),
        ("sqrt at 0 has an infinite slope (2 elements)", "Add an epsilon before the root"),
        ("acos at 1 or -1 has an infinite slope", "Keep it inside of -1 and 1"),
        ("sqrt of a negative number (1 element, the lowest -1)", "Clamp what goes into it"),
        ("nll_loss where every target is -100, which is ignored: ...", "Leave out batches"),
        ("std of a single element: its divisor n - 1 is 0", "Leave out groups"),
        ("0 * inf", "Choose with torch.where"),
        ("float32 overflow: matmul passes 3.4e+38", "Scale down"),
        ("something else", "Look at the operations of this module"),
    ],
)
def test_hint_fits_the_reason(why, hint):
    assert tell(why=why).hint.startswith(hint)


def test_parameter_that_a_replay_shows_was_bad_before():
    finding = tell(site="b.weight", cause="parameter", why="NaN was in it before the call")
    assert finding.message.startswith("b.weight held a NaN already when step 7 began")
    assert finding.hint.startswith("Look where the parameter comes from")


def test_sentence_has_a_name_also_where_a_replay_shows_nothing():
    origin = {"site": "", "cause": "not reproduced", "why": "it talks to other ranks"}
    origin["evidence"] = ["it talks to other ranks"]
    (loss,) = find(NETWORK.step(2, {}, loss=float("nan"), more={"origin": origin}))
    assert loss.message == "The loss became nan at step 2, and all outputs were finite."
    assert "it talks to other ranks" in loss.evidence
    (value,) = find(NETWORK.step(2, {"b:output": NAN}, more={"origin": origin}))
    assert value.message.startswith("b made the first NaN at step 2")
    nameless = tell(site="", why="")
    assert nameless.message.startswith("b made the first NaN")
