"""Where gradients, parameters and updates part first."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from made_gpt import Gpt, compare_planted, make_gpt, make_ids, square, wrap
from made_traces import MemoryTrace, TraceMaker, follow
from torch import Tensor, nn

from hookline.diffs.comparing import compare
from hookline.diffs.traces import TraceFacts

BOTH = pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "sketches"])


class Louder(torch.autograd.Function):
    """Do nothing forward, and send a tenth more back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 1.1 * grad


class LoudGelu(nn.GELU):
    """An activation of the user's own, with a wrong backward."""

    def forward(self, x: Tensor) -> Tensor:
        return Louder.apply(super().forward(x))


def plant_in_leaf(model: Gpt) -> None:
    model.blocks[1].mlp.act = LoudGelu()


def plant_in_parent(model: Gpt) -> None:
    wrap(model.blocks[1].mlp, lambda old, x: old(Louder.apply(x)))


def plant_detached_residual(model: Gpt) -> None:
    block = model.blocks[1]

    def forward(old: object, x: Tensor) -> Tensor:
        x = x.detach() + block.attn(block.ln1(x))
        return x + block.mlp(block.ln2(x))

    wrap(block, forward)


@BOTH
@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (plant_in_leaf, "blocks.1.mlp.act"),
        (plant_in_parent, "blocks.1.mlp"),
        (plant_detached_residual, "blocks.1"),
    ],
)
def test_wrong_backward(plant: Callable[[Gpt], None], first: str, tensors: bool) -> None:
    """Without parts: by the classes and settings of those who use the value."""
    found = compare_planted(plant, tensors=tensors)
    assert (found.first, found.direction) == (first, "backward")
    assert found.candidates[0] == first
    values = [pair for pair in found.pairs if pair.kind == "value"]
    assert {pair.verdict for pair in values} == {"agrees"}


@BOTH
def test_detached_input_is_found_by_what_wants_a_gradient(tensors: bool) -> None:
    def plant(model: Gpt) -> None:
        block = model.blocks[1]

        def forward(old: object, x: Tensor) -> Tensor:
            x = x + block.attn(block.ln1(x))
            return x + block.mlp(block.ln2(x).detach())

        wrap(block, forward)

    found = compare_planted(plant, tensors=tensors)
    assert (found.first, found.site) == ("blocks.1", "blocks.1.mlp:input")
    assert (found.direction, found.word) == ("backward", "no gradient is wanted there")
    assert "the code of blocks.1 (Block) itself, before it calls mlp" in str(found)


def test_wanted_gradients_do_not_matter_without_any() -> None:
    def plant(model: Gpt) -> None:
        wrap(model.blocks[1].mlp, lambda old, x: old(x.detach()))

    assert compare_planted(plant, loss=None).same


@BOTH
def test_gradient_that_never_arrives(tensors: bool) -> None:
    def plant(model: Gpt) -> None:
        block = model.blocks[1]

        def forward(old: object, x: Tensor) -> Tensor:
            x = x + block.attn(block.ln1(x))
            return x + block.mlp(block.ln2(x)).detach()

        wrap(block, forward)

    found = compare_planted(plant, tensors=tensors)
    assert (found.first, found.site) == ("blocks.1", "blocks.1.mlp.down:output.grad")
    assert found.introduced == math.inf
    assert found.word == "no gradient reaches blocks.1.mlp.down there"
    missing = [pair for pair in found.pairs if pair.verdict == "missing"]
    assert {pair.kind for pair in missing} == {"gradient", "parameter gradient", "update"}


def test_gradient_that_only_the_other_has() -> None:
    model, other = make_gpt(), make_gpt()
    block = model.blocks[1]

    def forward(old: object, x: Tensor) -> Tensor:
        x = x + block.attn(block.ln1(x))
        return x + block.mlp(block.ln2(x)).detach()

    wrap(block, forward)
    a, b = (follow(one, make_ids(), loss=square) for one in (model, other))
    found = compare(a, b)
    assert found.first == "blocks.1"
    assert found.word == "no gradient reaches blocks.1.mlp.down here"


@BOTH
def test_frozen_parameter(tensors: bool) -> None:
    def plant(model: Gpt) -> None:
        model.blocks[1].mlp.up.weight.requires_grad_(False)

    found = compare_planted(plant, tensors=tensors)
    assert (found.first, found.direction) == ("blocks.1.mlp.up", "parameter gradient")
    assert found.word == "no gradient reaches blocks.1.mlp.up.weight there"


@BOTH
def test_hook_on_a_parameter(tensors: bool) -> None:
    def plant(model: Gpt) -> None:
        model.blocks[1].mlp.up.weight.register_hook(lambda grad: 1.5 * grad)

    found = compare_planted(plant, tensors=tensors)
    assert (found.first, found.direction) == ("blocks.1.mlp.up", "parameter gradient")
    assert found.site == "blocks.1.mlp.up.weight:grad"
    assert "in the gradient of blocks.1.mlp.up.weight" in str(found)


@BOTH
def test_other_loss_is_the_models(tensors: bool) -> None:
    model = make_gpt()
    a = follow(model, make_ids(), loss=square, keeps_tensors=tensors)
    b = follow(model, make_ids(), loss=lambda out: 2 * square(out), keeps_tensors=tensors)
    found = compare(a, b)
    assert found.direction == "backward"
    assert found.causes == ("the loss sends the model another gradient",)


@BOTH
@pytest.mark.parametrize("factor", [2.0, -0.5, 0.01])
def test_all_gradients_by_one_factor(factor: float, tensors: bool) -> None:
    def plant(model: Gpt) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: factor * grad)

    found = compare_planted(plant, tensors=tensors)
    assert (found.first, found.direction) == ("", "parameter gradient")
    written = "0.01" if factor == 0.01 else f"{factor:.2f}"
    assert found.causes == (f"every gradient is {written} times",)


@BOTH
def test_all_updates_by_one_factor(tensors: bool) -> None:
    model, ids = make_gpt(), make_ids()
    a = follow(model, ids, loss=square, lr=0.1, keeps_tensors=tensors)
    b = follow(model, ids, loss=square, lr=0.3, keeps_tensors=tensors)
    found = compare(a, b)
    assert (found.first, found.direction) == ("", "update")
    assert found.causes == ("every update is 3.00 times",)


def test_parameters_tied_on_one_side() -> None:
    """The head is the embedding here, and a copy of it there."""
    model = make_gpt()
    model.head.weight = model.wte.weight
    other = copy.deepcopy(model)
    other.head.weight = nn.Parameter(model.wte.weight.detach().clone())
    traces = [follow(one, make_ids(), loss=square) for one in (model, other)]
    facts = traces[0].facts
    traces[0].facts = TraceFacts(facts.title, facts.modules, ties=(("wte.weight", "head.weight"),))
    found = compare(*traces)
    assert found.first == "head"
    assert found.causes == ("wte.weight and head.weight are one tensor here, two there",)
    back = compare(*reversed(traces))
    assert back.first == "head"
    assert back.causes == ("wte.weight and head.weight are one tensor there, two here",)


def make_parts(*, wrong: str = "", size: float = 0.1) -> MemoryTrace:
    """Trace a block with a residual around a leaf, with parts; one gradient may be wrong.

    The block calls `leaf` and adds its input; the model calls the block, then `head`.
    """
    maker = TraceMaker()
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    user = {"type": "Leaf", "requires_grad": True}
    root = maker.value("", "input", x, caller=None, requires_grad=True)
    outer = maker.value("block", "input", x, same_as=root, **user)
    inner = maker.value("block.leaf", "input", x, same_as=root, **user)
    leaf = maker.value("block.leaf", "output", 2 * x, **user)
    block = maker.value("block", "output", 3 * x, **user)
    head = maker.value("head", "input", 3 * x, same_as=block, **user)
    out = maker.value("head", "output", x.exp(), **user)
    maker.value("", "output", x, same_as=out, caller=None, requires_grad=True)
    for name, of, is_part in (
        ("out", out, False),
        ("head part", head, True),
        ("block", block, False),
        ("leaf", leaf, False),
        ("leaf part", inner, True),
        ("block part", outer, True),
    ):
        is_off = wrong and list(_ORDER).index(wrong) <= list(_ORDER).index(name)
        grad = torch.randn(4, 8)
        maker.gradient(of, grad * (1 + size * bool(is_off)), is_part=is_part)
    return maker.build()


_ORDER = ("out", "head part", "block", "leaf", "leaf part", "block part")


@pytest.mark.parametrize(
    ("wrong", "first", "is_own_code"),
    [
        ("out", "head", False),  # what the model returned: the loss
        ("head part", "head", False),
        ("block", "", True),  # used by head alone, whose part agrees: the code of the model
        ("leaf", "block", True),  # used by the code of the block alone
        ("leaf part", "block.leaf", False),
        ("block part", "block", True),  # the leaf's part agrees: the residual
    ],
)
def test_parts_tell_who_sent_a_wrong_gradient(wrong: str, first: str, is_own_code: bool) -> None:
    found = compare(make_parts(), make_parts(wrong=wrong))
    assert found.direction == "backward"
    if wrong == "out":
        assert found.causes == ("the loss sends the model another gradient",)
        return
    assert (found.first, found.is_own_code) == (first, is_own_code)


def test_gradients_that_cancel_are_noise() -> None:
    """A bias before a normalisation has no gradient but what rounding leaves."""

    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(conv=nn.Conv1d(3, 8, 3), norm=nn.BatchNorm1d(8)))
    x = torch.randn(16, 3, 10)

    def weigh(out: Tensor) -> Tensor:
        return (out * torch.linspace(-1, 1, out[0].numel()).view_as(out[0])).relu().sum()

    traces = [follow(copy.deepcopy(model), x, loss=weigh, lr=0.1) for _ in range(2)]
    # The same up to the order of summation, done by hand for the bias alone.
    b = traces[1]
    (bias,) = [site.id for site in b.sites if site.address == "conv.bias:grad"]
    (update,) = [site.id for site in b.sites if site.address == "conv.bias:update"]
    (sent,) = [site.id for site in b.sites if site.address == "conv:output.grad"]
    b.values[0][bias] = b.values[0][sent].flip(0).sum(dim=(0, 2)) * 1.1
    b.values[0][update] = -3 * b.values[0][update]
    b._measured.clear()
    found = compare(*traces)
    assert found.find("conv.bias:grad").r > 0.05
    assert found.find("conv.bias:grad").verdict == "noise"
    assert found.find("conv.bias:update").verdict == "noise"
    assert found.same


def test_bias_gradient_that_means_something_is_no_noise() -> None:
    def plant(model: Gpt) -> None:
        model.blocks[1].mlp.up.bias.register_hook(lambda grad: grad * (1 + 1e-3))

    assert compare_planted(plant).first == "blocks.1.mlp.up"


def test_sum_that_cancels_is_noise() -> None:
    x = torch.randn(50)
    traces = []
    for rest in (1e-7, -1e-7):
        maker = TraceMaker()
        given = maker.value("m", "input", x, caller="")
        maker.value("m", "output", torch.full((50,), rest))
        maker.value("n", "input", x, same_as=given)
        traces.append(maker.build())
    found = compare(*traces)
    assert found.find("m:output").verdict == "noise"
    assert found.same
    large = [trace.values[0] for trace in traces]
    for values, rest in zip(large, (1e-3, -1e-3), strict=True):
        values[1] = torch.full((50,), rest)
    for trace in traces:
        trace._measured.clear()
    assert compare(*traces).first == "m"


@pytest.mark.parametrize(("error", "is_same"), [(1e-3, True), (0.5, False)])
def test_update_follows_the_root_of_its_gradient(error: float, is_same: bool) -> None:
    """A gradient that agrees to 1e-7 may make a thousandth in an adaptive update."""
    traces = []
    for off in (0, error):
        maker = TraceMaker()
        torch.manual_seed(0)
        maker.value("m", "output", torch.randn(9), caller="")
        weight = maker.parameter("m", "weight", torch.randn(9))
        maker.parameter_gradient(weight, torch.randn(9) * (1 + 1e-7))
        maker.update(weight, torch.randn(9) * (1 + off))
        traces.append(maker.build())
    found = compare(*traces)
    assert found.same is is_same
    if not is_same:
        assert (found.first, found.direction, found.site) == ("m", "update", "m.weight:update")


def test_update_far_smaller_than_its_weight_is_read_off_coarsely() -> None:
    traces = []
    for off in (0, 2e-2):
        maker = TraceMaker()
        torch.manual_seed(0)
        maker.value("m", "output", torch.randn(9), caller="")
        weight = maker.parameter("m", "weight", torch.full((9,), 1e5))
        maker.update(weight, torch.full((9,), 1 + off))
        traces.append(maker.build())
    assert compare(*traces).same


@BOTH
def test_buffer_after_the_step(tensors: bool) -> None:
    def make(momentum: float) -> MemoryTrace:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4, momentum=momentum)
        maker = TraceMaker()
        x = torch.randn(8, 4)
        maker.value("bn", "output", norm(x), caller="", type="BatchNorm1d")
        maker.parameter("bn", "running_mean", torch.zeros(4), kind="buffer")
        after = norm.running_mean
        maker.parameter("bn", "running_mean", after, kind="buffer", more={"after": True})
        return maker.build(keeps_tensors=tensors)

    found = compare(make(0.1), make(0.2))
    assert (found.first, found.direction, found.site) == ("bn", "state", "bn.running_mean")


def test_second_backward_shows_in_the_parameters() -> None:
    def make(times: int) -> MemoryTrace:
        maker = TraceMaker()
        torch.manual_seed(0)
        value = maker.value("m", "output", torch.randn(9), caller="", requires_grad=True)
        for arrival in range(times):
            more = {"more": {"arrival": arrival}} if arrival else {}
            maker.gradient(value, torch.ones(9), **more)
        torch.manual_seed(1)
        for name in ("weight", "bias"):
            parameter = maker.parameter("m", name, torch.randn(9))
            maker.parameter_gradient(parameter, times * torch.randn(9))
        return maker.build()

    found = compare(make(1), make(2))
    assert (found.first, found.direction) == ("", "parameter gradient")
    assert found.causes == ("every gradient is 2.00 times",)


def test_gradient_in_pieces_is_not_compared() -> None:
    """Positions are embedded once here, and there again for each half of the batch."""

    def make(visits: int) -> MemoryTrace:
        maker = TraceMaker()
        torch.manual_seed(0)
        x, grad = torch.randn(2, 9)
        for visit in range(visits):
            value = maker.value("places", "output", x, caller="", visit=visit, requires_grad=True)
            maker.gradient(value, grad / visits)
        return maker.build()

    found = compare(make(1), make(2))
    assert found.same
    assert [one.kind for one in found.pairs] == ["value"]
    assert not compare(make(2), MemoryTrace(make(2).sites, {0: torch.ones(9)})).same


def test_nearly_all_updates_differ_by_the_optimizer() -> None:
    """Decay moves each weight by another share."""

    def make(decay: float) -> MemoryTrace:
        maker = TraceMaker()
        torch.manual_seed(0)
        maker.value("m", "output", torch.randn(9), caller="")
        for name in ("weight", "bias", "scale"):
            parameter = maker.parameter("m", name, torch.randn(9))
            grad = torch.randn(9)
            maker.parameter_gradient(parameter, grad)
            maker.update(parameter, grad - decay * maker.tensors[parameter])
        return maker.build()

    found = compare(make(0), make(0.3))
    assert (found.first, found.direction) == ("", "update")
    assert found.causes == ("3 of 3 updates differ",)


def test_part_of_a_module_that_hands_on_its_input_is_the_callers() -> None:
    """An identity sends back what comes from those who use its output."""

    def make(scale: float) -> MemoryTrace:
        maker = TraceMaker()
        torch.manual_seed(0)
        more = {"requires_grad": True, "type": "Identity"}
        x = maker.value("block", "input", torch.randn(9), caller="", **more)
        given = maker.value("block.skip", "input", torch.ones(9), same_as=x, **more)
        maker.value("block.skip", "output", torch.ones(9), same_as=x, **more)
        out = maker.value("block", "output", torch.randn(9), caller="", **more)
        maker.gradient(out, torch.randn(9))
        maker.gradient(given, scale * torch.randn(9), is_part=True)
        return maker.build()

    found = compare(make(1), make(2))
    assert (found.first, found.is_own_code) == ("block", True)
