"""Messages of selectors that name nothing, word for word."""

from __future__ import annotations

import copy

import pytest
from torch import nn
from torch.nn.utils import parametrizations

from hookline._errors import NoSuchSite
from hookline.addresses import ModuleTree, Selector, resolve

LIST_THEM = "List them with `hl.sites(model)`."


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(2, 2)
        self.mlp = nn.Linear(2, 2, bias=False)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(12)])
        self.norm = nn.BatchNorm1d(2)
        self.register_module("extra", None)


def explain(selector: Selector, model: nn.Module | None = None) -> str:
    with pytest.raises(NoSuchSite) as caught:
        resolve(ModuleTree(GPT() if model is None else model), selector)
    return str(caught.value)


@pytest.mark.parametrize(
    ("address", "nearest"),
    [
        ("block.*.attn", "`blocks.*.attn`"),
        ("block.3.attn:output.grad", "`blocks.3.attn:output.grad`"),
        ("blocks.*.atn", "`blocks.*.attn`"),
        ("block.*.atn:input[0]", "`blocks.*.attn:input[0]`"),
        ("Norm", "`norm`"),
        ("attn", "`**.attn`"),
        ("module.blocks.3", "`blocks.3`"),
        ("_orig_mod.norm:input", "`norm:input`"),
        ("blocks[11]", "`blocks.11`"),
        ("blocks[0-3].mlp", "`blocks.[0-3].mlp`"),
        ("norm.wieght", "`norm.weight`"),
        ("norms.weight:grad", "`norm.weight:grad`"),
        ("norm.output", "`norm:output`"),
        ("norm.input.grad", "`norm:input.grad`"),
        ("norm.weight.grad", "`norm.weight:grad`"),
        ("norm.weight.local_grad", "`norm.weight:local_grad`"),
        ("norm.grad", "`norm:output.grad`, `norm:input.grad`"),
        ("output", "`:output`"),
        ("blok.*.atn.weigth", "`blocks.*.attn.weight`"),
        ("re:attn", "`re:.*(?:attn).*`"),
    ],
)
def test_nearest_is_found_segment_by_segment(address: str, nearest: str) -> None:
    message = explain(address)
    start = f"`{address}` matches no site in `GPT` (39 sites). Nearest: "
    assert message == f"{start}{nearest}. {LIST_THEM}"


def test_house_message_is_exact() -> None:
    assert explain("block.*.attn") == (
        f"`block.*.attn` matches no site in `GPT` (39 sites). Nearest: `blocks.*.attn`. {LIST_THEM}"
    )


def test_at_most_three_are_suggested() -> None:
    message = explain("blocks.12")
    assert message.count("`blocks.") == 4
    assert "`blocks.1`" in message


def test_nothing_near_suggests_nothing() -> None:
    assert explain("zzz") == f"`zzz` matches no site in `GPT` (39 sites). {LIST_THEM}"


def test_gradient_of_a_module_says_how_to_write_it() -> None:
    assert explain("blocks.3.attn:grad") == (
        "`blocks.3.attn:grad` names no parameter: the gradients of a module are "
        "`blocks.3.attn:output.grad` and `blocks.3.attn:input.grad`, "
        "those of its parameters `blocks.3.attn.weight:grad`."
    )
    assert explain(":grad") == (
        "`:grad` names no parameter: the gradients of a module are `:output.grad` and "
        "`:input.grad`, those of its parameters `**:grad`."
    )
    assert explain("*:grad", nn.Sequential(nn.ReLU())) == (
        "`*:grad` names no parameter: the gradients of a module are `*:output.grad` and "
        "`*:input.grad`."
    )


def test_buffer_is_named_as_one() -> None:
    assert explain("norm.running_mean") == (
        "`norm.running_mean` is a buffer, not a parameter or module, so it is no site. "
        "Read it in a hook of its module: `norm:output`."
    )


@pytest.mark.parametrize("path", ["blocks.0.mlp.bias", "extra"])
def test_slot_without_a_value_is_said_to_be_none(path: str) -> None:
    model = GPT()
    owner = "GPT" if path == "extra" else "nn.Linear"
    assert explain(path, model) == f"`{path}` is None in this `{owner}`, so it is no site."


def test_parametrized_weight_says_what_it_comes_from() -> None:
    model = GPT()
    parametrizations.weight_norm(model.blocks[0].mlp)
    inside = "blocks.0.mlp.parametrizations.weight"
    assert explain("blocks.0.mlp.weight", model) == (
        "`blocks.0.mlp.weight` is parametrized: it is computed at every read, not a parameter. "
        f"What it is computed from: `{inside}.original*`; what computes it: `{inside}`."
    )
    assert resolve(ModuleTree(model), f"{inside}.original*")
    assert resolve(ModuleTree(model), inside)


def test_pattern_below_parametrizations_says_to_be_exact() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    parametrizations.weight_norm(model[0])
    message = explain("**._WeightNorm", model)
    assert "exact paths" not in message
    message = explain("0.parametrizations.*", model)
    assert "Modules below `parametrizations` are named by exact paths only." in message


def test_class_message_names_the_classes_there() -> None:
    assert explain(nn.Conv2d) == (
        "`nn.Conv2d` matches no module in `GPT` (39 sites). "
        f"Its classes: `GPT`, `nn.ModuleList`, `Block`, `nn.Linear`, `nn.BatchNorm1d`. {LIST_THEM}"
    )


def test_class_defined_again_is_told_apart() -> None:
    again = type("Block", (nn.Module,), {})
    assert explain(again) == (
        "`Block` matches no module in `GPT` (39 sites). A class of that name is there, but it is "
        "another one: it was defined again, or its file was reloaded, after the model was made."
    )


def test_predicate_message_names_the_predicate() -> None:
    def is_huge(path: str, module: nn.Module) -> bool:
        return False

    assert explain(is_huge) == (
        "the predicate `is_huge` is true for no module in `GPT` (39 sites)."
    )


def test_module_of_a_copy_is_a_stranger() -> None:
    model = GPT()
    assert explain(copy.deepcopy(model).norm, model) == (
        "the `nn.BatchNorm1d` given is not a module of `GPT` (39 sites); "
        f"it may belong to a copy of it. {LIST_THEM}"
    )


def test_single_site_is_counted_as_one() -> None:
    assert explain("a", nn.ReLU()) == f"`a` matches no site in `ReLU` (1 site). {LIST_THEM}"
