"""Why a module was not called: each reason on a model small enough to read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hookline.addresses import ModuleTree
from hookline.hooks.reasons import (
    Reason,
    is_container,
    why_not_called,
)


class Net(nn.Module):
    """Two linear layers and a list; subclasses write the forward under test."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.by_name = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        self.seq = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x)


def ask(
    model: nn.Module, path: str, *ran: str, hooked: Iterable[str] = (), tree: Any = None
) -> Reason:
    """Ask about a path, with the modules that ran and that had hooks given by path."""
    tree = tree or ModuleTree(model)

    def ids(paths: Iterable[str]) -> set[int]:
        return {id(tree.find(one).module) for one in paths}

    module = tree.find(path).module
    return why_not_called(tree, path, module, ids(ran), hooked=ids([*hooked, path]))


def run_with_hooks(model: nn.Module, path: str, *inputs: Any) -> list[str]:
    """Run a model with plain hooks everywhere; give the paths that ran, without `path`."""
    ran: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for name, module in model.named_modules()
    ]
    model(*inputs)
    for handle in handles:
        handle.remove()
    assert path not in ran, "the module under test must not have been called"
    return ran


@pytest.mark.parametrize(
    "module",
    [nn.ModuleList(), nn.ModuleDict(), nn.ParameterList(), nn.ParameterDict(), nn.Module()],
)
def test_module_without_forward_is_a_container(module: nn.Module) -> None:
    assert is_container(module)


def test_container_with_forward_is_none() -> None:
    class Stack(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            return x

    assert not is_container(Stack())
    assert not is_container(nn.Sequential())


def test_container_points_to_its_children() -> None:
    assert ask(Net(), "layers", "", "other") == Reason(
        "a container: it is never called itself",
        "ask for its children: `layers.*`",
    )


def test_root_container_points_to_its_children() -> None:
    assert ask(nn.ModuleList([nn.ReLU()]), "").fix == "ask for its children: `*`"


@pytest.mark.parametrize("training", [True, False])
def test_out_proj_of_attention_is_never_called(training: bool) -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).train(training)
    x = torch.zeros(1, 3, 4)
    ran = run_with_hooks(attention, "out_proj", x, x, x)
    assert ask(attention, "out_proj", *ran) == Reason(
        "`nn.MultiheadAttention` never calls it: it uses its weight in a function",
        "ask for `:output[0]`, which is what it would give, or for `out_proj.weight`",
        is_bypass=True,
    )


def test_out_proj_of_a_subclass_that_calls_it_is_no_bypass() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:
            return self.out_proj(x) if x.sum() > 0 else x

    own = Own(4, 2)
    ran = run_with_hooks(own, "out_proj", torch.zeros(1, 4))
    assert ask(own, "out_proj", *ran).what.endswith("a branch not taken, or unused")


def test_weights_read_for_the_fused_path_are_no_bypass() -> None:
    """A hook on a child switches the fused path off, so that cannot be why it was not called."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)
    what = ask(encoder, "layers.0.linear1", "").what
    assert what == "the model ran without calling it: a branch not taken, or unused"


def test_parametrization_names_the_tensor_it_computes() -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    net = Net()
    parametrize.register_parametrization(net.fc, "weight", Double())
    for path in ("fc.parametrizations.weight", "fc.parametrizations.weight.0"):
        reason = ask(net, path, "", "other")
        assert reason.what.startswith("a parametrization: it runs when `fc.weight` is read, which")
        assert reason.fix == "run what reads `fc.weight`, outside of `parametrize.cached()`"


class DirectForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc.forward(x)


def test_direct_forward_is_named() -> None:
    net = DirectForward()
    ran = run_with_hooks(net, "fc", torch.zeros(1, 2))
    assert ask(net, "fc", *ran) == Reason(
        "`DirectForward.forward` calls `self.fc.forward()` directly, which skips hooks",
        "write `self.fc(...)` there",
        is_bypass=True,
    )


class FunctionalUse(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.fc.weight, self.fc.bias)


def test_functional_use_of_a_weight_is_named() -> None:
    net = FunctionalUse()
    ran = run_with_hooks(net, "fc", torch.zeros(1, 2))
    assert ask(net, "fc", *ran) == Reason(
        "`FunctionalUse.forward` uses `self.fc.weight` directly (functional use)",
        "ask for the output of the root, or for `fc.weight`",
        is_bypass=True,
    )


def test_weight_of_a_module_that_is_also_called_is_told_with_both() -> None:
    class Tied(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x) if x.sum() > 0 else x
            return h @ self.fc.weight

    net = Tied()
    ran = run_with_hooks(net, "fc", torch.zeros(1, 2))
    assert ask(net, "fc", *ran).what == (
        "the model ran without calling it; "
        "`Tied.forward` uses `self.fc.weight` directly (functional use)"
    )


def test_method_of_the_child_is_named() -> None:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def encode(self, x: Tensor) -> Tensor:
            return self.inner(x)

        forward = encode

    class Encodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.coder = Coder()

        def forward(self, x: Tensor) -> Tensor:
            return self.coder.encode(x)

    net = Encodes()
    ran = run_with_hooks(net, "coder", torch.zeros(1, 2))
    assert ask(net, "coder", *ran) == Reason(
        "`Encodes.forward` calls `self.coder.encode()`, a method, which skips the module's hooks",
        "ask for its children: `coder.*`",
        is_bypass=True,
    )


def test_grandparents_are_read() -> None:
    class Deep(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.seq[0].forward(x)

    assert "`self.seq[0].forward()`" in ask(Deep(), "seq.0", "").what


def test_sequential_whose_children_are_called_one_by_one() -> None:
    class Iterates(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.seq:
                x = layer(x)
            return x

    net = Iterates()
    ran = run_with_hooks(net, "seq", torch.zeros(1, 2))
    assert ask(net, "seq", *ran) == Reason(
        "modules inside it ran, but it was not called itself: they are called one by one",
        "ask for its children: `seq.*`",
        is_bypass=True,
    )


def test_parent_that_did_not_run_is_named_if_known() -> None:
    net = Net()
    assert ask(net, "seq.0", "", "other", hooked=["seq"]) == Reason(
        "its parent `seq` was not called either",
        "look at `seq` first",
    )
    assert ask(net, "seq.0", "", "other").what.endswith("a branch not taken, or unused")


def test_farther_parent_that_did_not_run_is_named() -> None:
    net = nn.ModuleDict({"a": nn.Sequential(nn.Sequential(nn.ReLU())), "b": nn.ReLU()})
    model = nn.Sequential(net["b"], net["a"])
    what = ask(model, "1.0.0", "", "0", hooked=["1"]).what
    assert what == "`1`, which holds it, was not called either"


def test_shared_module_needs_all_its_parents_to_have_stopped() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    what = ask(model, "0.0", "", "1", hooked=["0", "1"]).what
    assert what.endswith("a branch not taken, or unused")
    what = ask(model, "0.0", "", hooked=["0", "1"]).what
    assert what == "its parent `0` was not called either"


def test_root_that_did_not_run() -> None:
    net = Net()
    assert ask(net, "", "other").what == "only modules below it were called"
    assert ask(net, "").what == "it was not called"
    assert ask(net, "fc", "other").what == (
        "only parts of the model were called, not the model itself"
    )


def test_nothing_ran() -> None:
    assert ask(Net(), "fc") == Reason(
        "neither the model nor any module with a hook was called",
        "call `model(x)` while the hooks are attached",
    )


def walked(model: nn.Module) -> ModuleTree:
    """Give a tree that knows the modules as they are now."""
    tree = ModuleTree(model)
    assert tree.entries
    return tree


def test_replaced_module_is_told() -> None:
    net = Net()
    tree = walked(net)
    net.other = nn.Sequential(nn.Linear(2, 2))
    assert ask(net, "other", "", tree=tree) == Reason(
        "it was replaced after attaching: a `Sequential` is there now",
        "attach after the swap",
    )


def test_replaced_parent_and_removed_module_are_told() -> None:
    net = Net()
    tree = walked(net)
    net.seq = nn.Sequential(nn.Linear(2, 2))
    assert ask(net, "seq.0", "", tree=tree).what.startswith("it was replaced after attaching")
    assert ask(net, "seq.1", "", tree=tree).what == "it was removed from the model after attaching"


def test_module_wrapped_after_attaching_is_not_replaced() -> None:
    net = Net()
    tree = ModuleTree(net)
    net.fc = torch.compile(net.fc, backend="eager")
    assert "replaced" not in ask(net, "fc", "", tree=tree).what


def test_module_replaced_under_one_of_its_names_is_not_replaced() -> None:
    net = Net()
    net.again = net.fc
    tree = ModuleTree(net)
    net.fc = nn.Linear(2, 2)
    assert "replaced" not in ask(net, "fc", "", tree=tree).what


def test_module_that_is_not_used_falls_through() -> None:
    net = Net()
    ran = run_with_hooks(net, "fc", torch.zeros(1, 2))
    assert ask(net, "fc", *ran) == Reason(
        "the model ran without calling it: a branch not taken, or unused",
        "run an input that takes the branch, or leave this address out",
    )


def _has_inplace(model: nn.Module) -> bool:
    return ModuleTree(model).facts.has_inplace


def test_inplace_modules_are_noticed() -> None:
    assert not _has_inplace(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    assert _has_inplace(nn.Sequential(nn.Sequential(nn.ReLU(inplace=True))))


def test_inplace_attribute_that_is_no_flag_is_ignored() -> None:
    module = nn.Identity()
    module.inplace = torch.ones(3)
    assert not _has_inplace(module)
