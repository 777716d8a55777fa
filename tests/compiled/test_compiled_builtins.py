"""Modules of torch's own that were compiled by themselves: until 2.13 torch runs these as they are.

It compiles them as soon as they have hooks, and then their gradients have other bits; not so while
hookline looks on. From 2.14 on it compiles them in any case.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from blocks import Block
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hookline as hl
from hookline._compiler import is_compiled_if_hooked, is_run_uncompiled

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # Attention never calls the layer that projects its output.
    pytest.mark.filterwarnings("ignore::hookline.HooklineWarning"),
]

Compile = Callable[[Any], nn.Module]


def _sequential(counter: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    model.compile(backend=counter)
    return model


def _one_layer(counter: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    model[0].compile(backend=counter)
    return model


def _encoder(counter: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for one in model.layers:
        one.compile(backend=counter)
    return model


def _with_blocks(counter: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), Block(6), nn.Linear(6, 6), Block(6))
    model.compile(backend=counter)
    return model


class Broken(nn.Module):
    """A model whose graph ends inside a container of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(6, 6), Breaking(), nn.LayerNorm(6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts(x).tanh()
        return out


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()


def _broken(counter: Any) -> nn.Module:
    model = Broken()
    model.compile(backend=counter)
    return model


def _hooked(counter: Any) -> nn.Module:
    model = _sequential(counter)
    model[0].register_forward_hook(lambda *_: None)
    return model


def _wrapped(counter: Any) -> nn.Module:
    model = _sequential(counter)
    forward = model[0].forward
    model[0].forward = functools.wraps(forward)(lambda x: forward(x) * 2)
    return model


ALWAYS = torch.__version__ >= "2.14"
"""Whether torch compiles them like any other."""

MODELS: dict[str, tuple[Compile, int | None]] = {
    "sequential": (_sequential, int(ALWAYS)),
    "one layer": (_one_layer, int(ALWAYS)),
    "encoder": (_encoder, 2 * ALWAYS),
    "with blocks": (_with_blocks, 1),
    "broken": (_broken, 3),
    "hooked": (_hooked, None),  # by somebody else: torch 2.13 compiles it then, torch 2.11 does not
    "wrapped": (_wrapped, 1),
}
WAYS: dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[Any]]] = {
    "watch": lambda model: hl.watch(model, parameters=None, units_every=0, rules=False),
    "gradients": lambda model: hl.capture(model, "**", grads=True),
    "inputs": lambda model: hl.capture(model, "**", inputs=True),
    "edit": lambda model: hl.edit(model, {"**": hl.scale(1.0)}),
}
INSIDE: dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[Any]]] = {
    "variables": lambda model: hl.capture(model, "**@*"),
    "operations": lambda model: hl.capture(model, "**/*"),
    "an operation's gradient": lambda model: hl.capture(model, "**/linear", grads=True),
}


def _train(
    make: Compile, look: Callable[..., Any], backend: str
) -> tuple[int, list[Tensor], nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter = CompileCounterWithBackend(backend)
    model = make(counter)
    x = torch.randn(4, 5, 6)
    for _ in range(2):
        with look(model):
            model(x).square().sum().backward()
    return counter.frame_count, [one.grad for one in model.parameters()], model


def _plain(_: nn.Module) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def _check_same(name: str, look: Callable[..., Any], backend: str) -> None:
    make, graphs = MODELS[name]
    alone, bits, plain = _train(make, _plain, backend)
    seen, others, model = _train(make, look, backend)
    assert graphs in (alone, None)
    assert seen == alone
    assert all(torch.equal(one, other) for one, other in zip(others, bits, strict=True))
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        assert vars(one).keys() == vars(other).keys()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_graphs_and_bits_are_those_of_the_model_alone(name: str, way: str) -> None:
    _check_same(name, WAYS[way], "aot_eager")


@pytest.mark.parametrize("way", INSIDE)
@pytest.mark.parametrize("name", [one for one in MODELS if one != "broken"])
def test_looking_inside_makes_no_graph_either(name: str, way: str) -> None:
    _check_same(name, INSIDE[way], "aot_eager")


@pytest.mark.parametrize("name", ["sequential", "one layer", "encoder", "with blocks"])
def test_inductor_gives_the_same_bits(name: str) -> None:
    """Of all but the last it makes no graph, which is what gives the same bits."""
    _check_same(name, WAYS["watch"], "inductor")


@pytest.mark.parametrize("name", ["sequential", "with blocks"])
def test_captures_are_right(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name][0]("aot_eager"), torch.randn(4, 5, 6)
    with hl.capture(model, "**", grads=True) as got:
        model(x).square().sum().backward()
    with (
        torch.compiler.set_stance("force_eager"),
        hl.capture(model, "**", grads=True) as truth,
    ):
        model(x).square().sum().backward()
    for site in ("", "0", "1", "2"):
        torch.testing.assert_close(got[site].output, truth[site].output)
        torch.testing.assert_close(got[site].output.grad, truth[site].output.grad)


def test_variables_and_operations_are_right() -> None:
    model, x = _encoder("aot_eager"), torch.randn(4, 5, 6)
    sites = ["layers.0@x", "layers.0.linear1/linear"]
    with hl.capture(model, sites) as got:
        model(x)
    with torch.compiler.set_stance("force_eager"), hl.capture(model, sites) as truth:
        model(x)
    for one in ("layers.0@x[0]", "layers.0@x[1]", "layers.0.linear1/linear[0]"):
        assert torch.equal(got[one], truth[one])


def test_edits_are_right() -> None:
    model, x = _sequential("aot_eager"), torch.randn(4, 6)
    with hl.edit(model, {"1": hl.zero()}):
        assert torch.equal(model(x), model[2].bias.expand(4, 6))
    with hl.edit(model, {"1@input": hl.scale(0.0), "2/linear": hl.add(1.0)}):
        assert torch.equal(model(x), model[2].bias.expand(4, 6) + 1)


def test_module_is_copied_and_pickled_without_a_trace() -> None:
    model, x = _sequential("aot_eager"), torch.randn(4, 6)
    with hl.capture(model, "**"):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        model(x)
    for one in copies:
        assert torch.equal(one(x), model(x))
        assert not any("forward" in vars(part) for part in one.modules())


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("how", COPIES)
def test_copy_made_while_a_session_is_open_is_left_uncompiled(how: str) -> None:
    torch._dynamo.reset()
    counter, x = CompileCounterWithBackend("aot_eager"), torch.randn(4, 6)
    model = _sequential(counter)
    with hl.capture(model, "**"):
        copied = COPIES[how](model)
    assert list(hl.inventory(copied)) == []
    copied.compile(backend=counter)
    for look in (_plain, WAYS["gradients"], _plain):
        with look(copied):
            copied(x)
    assert counter.frame_count == 2 * ALWAYS  # one of them without hooks


def test_what_a_pickle_leaves_behind_does_not_have_it_compiled_in_a_session() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 6))
    with hl.capture(model, "**"):  # nothing is compiled yet
        loaded = pickle.loads(pickle.dumps(model))
    assert len(hl.inventory(loaded)) == 2
    counter = CompileCounterWithBackend("aot_eager")
    loaded.compile(backend=counter)
    with hl.capture(loaded, "**@input"):
        loaded(torch.randn(4, 6))
    assert counter.frame_count == int(ALWAYS)


def test_inside_a_graph_they_are_compiled_as_ever() -> None:
    for look in (_plain, *WAYS.values()):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        blocks = nn.Sequential(*(Block(6) for _ in range(3)))
        for block in blocks:
            block.compile(backend=counter, fullgraph=True)
        with look(blocks):
            blocks(torch.randn(4, 6).requires_grad_()).sum().backward()
        assert counter.frame_count == 1


def test_torch_runs_its_own_modules_uncompiled() -> None:
    assert is_run_uncompiled(nn.Linear.forward.__code__)
    assert is_run_uncompiled(nn.Sequential.forward.__code__)
    assert not is_run_uncompiled(Block.forward.__code__)
    assert not is_compiled_if_hooked(Block(2))


def test_whether_torch_compiles_its_own_modules_that_have_hooks_is_known() -> None:
    graphs, _, _ = _train(_hooked, _plain, "aot_eager")
    assert is_compiled_if_hooked(nn.Linear(1, 1)) == (graphs > 0)
