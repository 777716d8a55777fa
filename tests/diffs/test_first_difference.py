"""Where two models part first, and whose code is to blame: from tensors and from sketches."""

from __future__ import annotations

import math

import pytest
import torch
from made_gpt import Gpt, compare_planted, make_gpt, make_ids, square, wrap
from made_traces import TraceMaker, follow
from torch import Tensor, nn

from hookline.diffs.comparing import compare
from hookline.diffs.traces import ModuleFacts, TraceFacts

BOTH = pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "sketches"])


@BOTH
def test_same_model_is_the_same(tensors: bool) -> None:
    found = compare_planted(lambda model: None, tensors=tensors)
    assert found.same
    assert (found.first, found.site, found.direction, found.introduced) == (None,) * 4
    assert str(found) == f"No difference: {len(found.pairs)} sites agree exactly."
    assert {pair.verdict for pair in found.pairs} == {"agrees"}


@BOTH
def test_setting_of_a_leaf(tensors: bool) -> None:
    def plant(model: Gpt) -> None:
        model.blocks[1].mlp.act.approximate = "tanh"

    found = compare_planted(plant, tensors=tensors)
    assert (found.first, found.first_b) == ("blocks.1.mlp.act",) * 2
    assert found.site == "blocks.1.mlp.act:output"
    assert found.direction == "forward"
    assert found.causes == ("approximate='none' here, 'tanh' there",)
    assert found.introduced == pytest.approx(2e-4, rel=0.5)
    assert (found.r_in, found.agree_to, found.floor) == (0, 0, None)
    assert found.candidates == ("blocks.1.mlp.act",)
    assert not found.is_own_code
    verdicts = [pair.verdict for pair in found.pairs if pair.kind == "value"]
    at = verdicts.index("introduces")
    assert set(verdicts[:at]) == {"agrees"}
    assert set(verdicts[at + 1 :]) == {"inherits"}


@BOTH
def test_input_of_a_child_blames_the_code_of_its_caller(tensors: bool) -> None:
    def plant(model: Gpt) -> None:
        model.blocks[1].attn.scale *= 1.1

    found = compare_planted(plant, tensors=tensors)
    assert (found.first, found.site) == ("blocks.1.attn", "blocks.1.attn.out:input")
    assert (found.is_own_code, found.before) == (True, "blocks.1.attn.out")
    assert "the code of blocks.1.attn (Attention) itself, before it calls out" in str(found)


@BOTH
def test_output_of_a_parent_blames_its_own_code(tensors: bool) -> None:
    def plant(model: Gpt) -> None:
        block = model.blocks[2]

        def forward(old: object, x: Tensor) -> Tensor:
            x = x + block.attn(block.ln1(x))
            return block.mlp(block.ln2(x))

        wrap(block, forward)

    found = compare_planted(plant, tensors=tensors)
    assert (found.first, found.site) == ("blocks.2", "blocks.2:output")
    assert (found.is_own_code, found.before) == (True, "")


@BOTH
def test_other_inputs(tensors: bool) -> None:
    model, ids = make_gpt(), make_ids()
    a = follow(model, ids, keeps_tensors=tensors)
    b = follow(model, ids.flip(0), keeps_tensors=tensors)
    found = compare(a, b)
    assert (found.first, found.direction, found.site) == ("", "input", ":input")
    assert str(found).startswith("The inputs differ: :input by ")


def test_whole_numbers_have_no_tolerance() -> None:
    model, ids = make_gpt(), make_ids()
    other = ids.clone()
    other[0, 0] = (other[0, 0] + 1) % 20
    found = compare(follow(model, ids), follow(model, other))
    assert (found.direction, found.limit) == ("input", 0)


@BOTH
def test_small_setting_shows_below_the_limit(tensors: bool) -> None:
    """An epsilon moves float32 by less than rounding may elsewhere."""

    def plant(model: Gpt) -> None:
        model.blocks[1].ln2.eps = 1e-6

    found = compare_planted(plant, tensors=tensors)
    assert found.first == "blocks.1.ln2"
    assert found.causes == ("eps=1e-05 here, 1e-06 there",)
    assert found.introduced < 2e-5
    assert found.gain >= 8


def test_small_difference_without_a_reason_is_none() -> None:
    def plant(model: Gpt) -> None:
        wrap(model.blocks[1].ln2, lambda old, x: old(x) * (1 + 1e-6))

    assert compare_planted(plant).same


def test_module_that_makes_more_than_rounding_of_equal_values() -> None:
    """No single module rounds by fifty units what it is given bit for bit."""

    def plant(model: Gpt) -> None:
        wrap(model.blocks[1].ln2, lambda old, x: old(x) * (1 + 3e-6))

    found = compare_planted(plant)
    assert (found.first, found.site) == ("blocks.1.ln2", "blocks.1.ln2:output")


@pytest.mark.parametrize(("other", "is_same"), [("GELU", True), ("NewGELU", False)])
def test_other_class_is_evidence(other: str, is_same: bool) -> None:
    """Twenty units of rounding are nothing by themselves."""
    x, noise = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    traces = []
    for kind, size in (("GELU", 0.0), (other, 20 * 2.0**-24)):
        maker = TraceMaker()
        given = maker.value("", "input", x, caller=None)
        maker.value("act", "input", x, same_as=given, type=kind)
        y = x.double() + size * noise * x.norm() / noise.norm()
        maker.value("act", "output", y.float(), type=kind)
        modules = {"": ModuleFacts("Net"), "act": ModuleFacts(kind)}
        traces.append(maker.build(facts=TraceFacts(modules=modules)))
    found = compare(*traces)
    assert (found.same, found.first) == (is_same, None if is_same else "act")


def test_difference_that_grew_past_the_limit_is_named_at_its_origin() -> None:
    """Less than a tenth of the limit is made by m1, and m3 makes it thirty times larger."""
    x, noise = torch.randn(64), torch.randn(64)
    noise *= x.norm() / noise.norm()
    sizes = [0, 1.7e-6, 1.7e-6, 5.1e-5, 5.1e-5]
    traces = []
    for scale in (0, 1):
        maker = TraceMaker()
        given = maker.value("", "input", x, caller=None)
        for number, size in enumerate(sizes):
            maker.value(f"m{number}", "input", torch.empty(64), same_as=given)
            given = maker.value(f"m{number}", "output", (x + scale * size * noise))
        traces.append(maker.build())
    found = compare(*traces)
    assert (found.first, found.site) == ("m3", "m3:output")
    assert found.gain == pytest.approx(30, rel=0.1)
    # With less at once it is followed back to where it began.
    sizes[3:] = [1.1e-5, 6e-5]
    traces = []
    for scale in (0, 1):
        maker = TraceMaker()
        given = maker.value("", "input", x, caller=None)
        for number, size in enumerate(sizes):
            maker.value(f"m{number}", "input", torch.empty(64), same_as=given)
            given = maker.value(f"m{number}", "output", (x + scale * size * noise))
        traces.append(maker.build())
    found = compare(*traces)
    assert found.first == "m1"
    assert found.introduced == pytest.approx(1.7e-6, rel=0.1)
    assert not found.is_gradual


def test_gradual_growth_has_no_place() -> None:
    x, noise = torch.randn(64), torch.randn(64)
    noise *= x.norm() / noise.norm()
    traces = []
    for scale in (0, 1):
        maker = TraceMaker()
        given = maker.value("", "input", x, caller=None)
        for number in range(40):
            maker.value(f"m{number}", "input", torch.empty(64), same_as=given)
            size = 3e-7 * 1.3**number
            given = maker.value(f"m{number}", "output", x + scale * size * noise)
        traces.append(maker.build())
    found = compare(*traces)
    assert not found.same
    assert found.is_gradual
    assert "grows gradually" in str(found)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@BOTH
def test_what_is_not_finite_on_one_side(value: float, tensors: bool) -> None:
    def plant(model: Gpt) -> None:
        model.blocks[1].mlp.up.bias.data[3] = value

    found = compare_planted(plant, tensors=tensors)
    assert (found.first, found.introduced) == ("blocks.1.mlp.up", math.inf)
    assert "it introduces NaN or infinities that the other side lacks" in str(found)


@BOTH
def test_what_is_not_finite_on_both_sides_is_equal(tensors: bool) -> None:
    model = make_gpt()
    model.blocks[1].mlp.up.bias.data[3] = math.nan
    traces = [follow(model, make_ids(), loss=square, keeps_tensors=tensors) for _ in range(2)]
    assert compare(*traces).same


@BOTH
def test_wrong_cast_names_the_dtype(tensors: bool) -> None:
    def plant(model: Gpt) -> None:
        wrap(model.blocks[0].mlp.act, lambda old, x: old(x.half()).float())

    assert compare_planted(plant, tensors=tensors).first == "blocks.0.mlp.act"

    def leave(model: Gpt) -> None:
        wrap(model.blocks[0].attn.q, lambda old, x: old(x).bfloat16())
        wrap(model.blocks[0].attn.k, lambda old, x: old(x).bfloat16())
        wrap(model.blocks[0].attn.v, lambda old, x: old(x).bfloat16())
        wrap(model.blocks[0].attn.out, lambda old, x: old(x.float()))

    found = compare_planted(leave, tensors=tensors)
    assert found.first == "blocks.0.attn.q"
    assert "float32 here, bfloat16 there" in found.causes


@BOTH
def test_other_weight_is_the_cause(tensors: bool) -> None:
    def plant(model: Gpt) -> None:
        model.blocks[2].mlp.down.weight.data[0] *= 1.01

    found = compare_planted(plant, tensors=tensors)
    assert found.first == "blocks.2.mlp.down"
    assert [cause.partition(" by ")[0] for cause in found.causes] == ["weight differs"]


@BOTH
def test_weight_that_shows_nowhere_is_a_difference_of_state(tensors: bool) -> None:
    def plant(model: Gpt) -> None:
        model.register_buffer("unused", torch.ones(3))

    model = make_gpt()
    model.register_buffer("unused", torch.zeros(3))
    other = make_gpt()
    plant(other)
    a, b = (follow(one, make_ids(), keeps_tensors=tensors) for one in (model, other))
    found = compare(a, b)
    assert (found.first, found.site, found.direction) == ("", "unused", "state")


@BOTH
def test_training_flag_is_a_cause(tensors: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.fc(x))

    torch.manual_seed(0)
    net = Net().eval()
    x = torch.randn(4, 8)
    a = follow(net, x, keeps_tensors=tensors)
    net.drop.train()
    found = compare(a, follow(net, x, keeps_tensors=tensors))
    assert found.first == "drop"
    assert found.causes == ("not in training here, in training there",)


def test_second_visit_is_told() -> None:
    class Twice(nn.Module):
        def __init__(self, shift: float) -> None:
            super().__init__()
            self.fc, self.shift = nn.Linear(8, 8), shift

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x) + self.shift)

    models = []
    for shift in (0.0, 0.1):
        torch.manual_seed(0)
        models.append(Twice(shift))
    found = compare(*(follow(model, torch.ones(2, 8)) for model in models))
    assert (found.first, found.site, found.visit) == ("", "fc:input", 1)


def test_wider_limits_of_the_user() -> None:
    def plant(model: Gpt) -> None:
        model.blocks[1].mlp.act.approximate = "tanh"

    assert compare_planted(plant, tolerance=0.01).same
    assert not compare_planted(plant, allow={"blocks.1.mlp.act": 0.01}).same
    assert compare_planted(plant, allow={"**": 0.01}).same
    with pytest.raises(ValueError, match=r"`block.1.mlp` in allow= names no site.*`blocks.1.mlp`"):
        compare_planted(plant, allow={"**": 0.01, "block.1.mlp": 0.1})


def test_floors_decide_where_they_are_known() -> None:
    def plant(model: Gpt) -> None:
        wrap(model.blocks[1].ln2, lambda old, x: old(x) * (1 + 3e-6))

    count = len(follow(make_gpt(), make_ids(), loss=square, lr=0.1).sites)
    low = dict.fromkeys(range(count), 1e-7)
    found = compare_planted(plant, floors=low)
    assert (found.first, found.floor) == ("blocks.1.ln2", 1e-7)
    assert found.limit == pytest.approx(1e-6)
    assert compare_planted(plant, floors=dict.fromkeys(range(count), 3e-6)).same


def test_hook_before_a_module_is_the_modules() -> None:
    """What comes in was made by the caller, but a hook of the module has changed it."""
    traces = []
    for scale in (1.0, 1.1):
        maker = TraceMaker()
        maker.value("", "input", torch.ones(9), caller=None)
        maker.value("fc", "input", torch.full((9,), scale))
        maker.value("fc", "output", torch.full((9,), 2 * scale))
        hooks = {} if scale == 1 else {"hooks": "louder"}
        modules = {"": ModuleFacts("Net"), "fc": ModuleFacts("Linear", config=hooks)}
        traces.append(maker.build(facts=TraceFacts(modules=modules)))
    found = compare(*traces)
    assert (found.first, found.site, found.is_own_code) == ("fc", "fc:input", False)
    assert found.causes == ("hooks of others: louder there alone",)
