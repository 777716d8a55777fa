"""A compiled training computes what it computes unwatched, to the last bit, also in bfloat16.

Inductor rounds where it writes a value to memory, and decides by who reads it whether it does.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections import Counter
from typing import Any

import pytest
import torch
import torch._dynamo
from compared_bits import LENGTH, SAME, WORDS, Outcome, SmallGPT, compare_outcomes
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.fx_passes.joint_graph import early_patterns

import hookline as hl
from hookline.hooks.inductor import part_undisturbed

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

SPARING: Any = {"parameters": None, "units_every": 0, "rules": False}


def test_inductor_gives_the_same_bits() -> None:
    options: Any = {"device": "cpu", "dtype": "autocast", "mode": "default", "steps": 4}
    plain = Outcome(**options, is_watched=False)
    watched = Outcome(**options, is_watched=True)
    assert compare_outcomes(plain, watched) == SAME
    assert watched.watch is not None
    assert watched.watch.notes == []
    assert len(watched.watch.history.steps) == 4


class Graphs:
    """A backend that parts graphs as inductor does, and keeps both parts."""

    def __init__(self) -> None:
        self.parts: list[fx.GraphModule] = []

    def part(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        early_patterns.apply(joint.graph)
        return part_undisturbed(joint, inputs, **options)

    def keep(self, part: fx.GraphModule, inputs: Any) -> Any:
        part.graph.lint()
        self.parts.append(part)
        return make_boxed_func(part)

    def compile(self, model: nn.Module) -> Any:
        backend = aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep, partition_fn=self.part)
        return torch.compile(model, fullgraph=True, backend=backend)


def _is_own(node: fx.Node) -> bool:
    """Tell whether a node is there for hookline alone."""
    source: Any = node.args[0] if node.target is operator.getitem else node
    if source.target is torch.ops.higher_order.with_effects:
        return True
    if node.op == "placeholder":
        value = node.meta["val"]
        return value.numel() == 0 or (value.dtype == torch.int64 and value.shape == (1,))
    return node.op == "call_function" and bool(node.users) and all(map(_is_own, node.users))


def _describe(part: fx.GraphModule) -> list[tuple[str, list[Any]]]:
    """Write down what the model itself computes, each node by what it is made of.

    What comes from outside is known by its shape: the order of that is another one.
    """
    known: dict[fx.Node, Any] = {}
    lines = []
    for node in part.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            known[node] = (tuple(value.shape), value.dtype)
        elif node.op == "call_function" and not _is_own(node):
            known[node] = len(lines)
            lines.append((str(node.target), [known[one] for one in node.all_input_nodes]))
    return lines


def _graphs(watch: Any, model: nn.Module, *args: Tensor) -> list[fx.GraphModule]:
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = graphs.compile(model)
    with watch(model):
        compiled(*args).square().mean().backward()
    return graphs.parts


def _plain(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


@pytest.mark.parametrize(
    "watch",
    [
        lambda model: hl.watch(model, **SPARING),
        lambda model: hl.capture(model, "**", grads=True),
        lambda model: hl.capture(model, "**", inputs=True),
    ],
    ids=["watch", "gradients", "inputs"],
)
def test_graphs_are_those_of_the_model_alone(watch: Any) -> None:
    model, tokens = SmallGPT(blocks=1).bfloat16(), torch.randint(0, WORDS, (2, LENGTH))
    alone = _graphs(_plain, model, tokens)
    seen = _graphs(watch, model, tokens)
    assert len(alone) == len(seen) == 2
    for one, other in zip(alone, seen, strict=True):
        assert _describe(one) == _describe(other)
    assert any(map(_is_own, seen[0].graph.nodes))


class Forgetful(nn.Module):
    """Compute what nobody uses, and what only a gradient needs."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        self.act(self.unused(x))
        out: Tensor = self.used(x).exp()
        return out


def test_values_that_nobody_needs_are_seen_too() -> None:
    model, x = Forgetful(), torch.randn(3, 4)
    torch._dynamo.reset()
    compiled = Graphs().compile(model)
    with hl.capture(model, "**") as got:
        compiled(x).sum().backward()
    torch.testing.assert_close(got["unused"].output, model.unused(x))
    torch.testing.assert_close(got["act"].output, model.unused(x).tanh())


def test_values_are_not_kept_longer_than_alone() -> None:
    """What backward gets from forward is what it gets without a watch, and keys beside."""
    model, tokens = SmallGPT(blocks=1).bfloat16(), torch.randint(0, WORDS, (2, LENGTH))
    sizes = []
    for watch in (_plain, lambda model: hl.watch(model, **SPARING)):
        forward, _ = _graphs(watch, model, tokens)
        (given,) = next(node for node in forward.graph.nodes if node.op == "output").args
        values = [one.meta["val"] for one in given if isinstance(one, fx.Node)]
        sizes.append(sum(one.nbytes for one in values if one.numel() > 1))
    assert sizes[0] == sizes[1]


def test_the_settings_of_the_compiler_are_left_as_they_were() -> None:
    from torch._inductor import config

    model = nn.Linear(3, 3)
    compiled = torch.compile(model, fullgraph=True)
    with hl.watch(model, **SPARING):
        compiled(torch.randn(2, 3)).sum().backward()
    assert config.custom_partitioner_fn is None


def _list_kernels(watch: Any) -> Counter[Any]:
    """Compile a training step, and count which operations inductor puts into one kernel."""
    from torch._inductor import config

    kernels: Counter[Any] = Counter()

    def look(nodes: list[Any]) -> list[Any]:
        for node in nodes:
            parts = [one.node for one in node.get_nodes() if one.node is not None]
            if len(parts) > 1:
                targets = [sorted(str(o.target) for o in one.origins) for one in parts]
                kernels[str(sorted(targets))] += 1
        return nodes

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, tokens = SmallGPT(blocks=3), torch.randint(0, WORDS, (2, LENGTH))
    compiled = torch.compile(model, fullgraph=True)
    with config.patch(_post_fusion_custom_pass=look), watch(model):
        compiled(tokens).square().mean().backward()
    return kernels


def test_what_becomes_one_kernel_does_so_without_a_watch() -> None:
    plain = _list_kernels(_plain)
    watched = _list_kernels(lambda model: hl.watch(model, **SPARING))
    assert len(plain) > 5
    assert watched == plain


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.act(self.up(x)))).tanh()


@pytest.mark.parametrize("with_grad", [True, False])
def test_a_bias_is_added_where_it_is_without_a_watch(
    with_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU inductor takes it out of a product if all who read that could be in one kernel."""
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(post_grad, "is_gpu", lambda device: True)
    model, x = Residual(), torch.randn(4, 8)
    counts = []
    for watch in (_plain, lambda model: hl.watch(model, with_inference=True, **SPARING)):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)

        def run(call: Any = compiled) -> None:
            with torch.set_grad_enabled(with_grad):
                out = call(x).sum()
            if with_grad:
                out.backward()

        with watch(model):
            codes = run_and_get_code(run)[1]
        counts.append(["\n".join(codes).count(f"extern_kernels.{one}(") for one in ("addmm", "mm")])
    assert counts[0][1] > 0
    assert counts[1] == counts[0]


def test_parameters_are_known_as_what_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are told by numbers, which torch counts without the token that stands first."""
    from torch._functorch import partitioners

    part = partitioners.min_cut_rematerialization_partition
    found: list[tuple[int, bool]] = []

    def look(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        given = [node for node in joint.graph.nodes if node.op == "placeholder"]
        lasting = [given[at].meta["val"] for at in options["static_lifetime_input_indices"]]
        parameters = sum(one.dtype is torch.bfloat16 for one in lasting)
        found.append((parameters, any(one.shape == tokens.shape for one in lasting)))
        return part(joint, inputs, **options)

    monkeypatch.setattr(partitioners, "min_cut_rematerialization_partition", look)
    model, tokens = SmallGPT(blocks=1).bfloat16(), torch.randint(0, WORDS, (2, LENGTH))
    for watch in (_plain, lambda model: hl.watch(model, **SPARING)):
        _graphs(watch, model, tokens)
    assert found == [(len(list(model.parameters())), False)] * 2


class Turned(nn.Module):
    """Read a value in another order than it was made in, so in another kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, torch.arange(15, -1, -1)] * 1.7


@pytest.mark.parametrize(
    "watch",
    [
        lambda model: hl.watch(model, **SPARING),
        lambda model: hl.capture(model, "**", inputs=True),  # what is given on is seen twice
    ],
    ids=["watch", "inputs"],
)
def test_a_value_is_not_written_for_us_where_the_model_reads_it_once(watch: Any) -> None:
    found = []
    for one in (_plain, watch):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), Turned()), torch.randn(8, 16)
        compiled = torch.compile(model.bfloat16(), fullgraph=True)
        with one(model):
            found.append(compiled(x.bfloat16()))
    assert torch.equal(*found)


class Folding(nn.Module):
    """Give a layer rows in groups, and add what it gives to the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.view(4, -1, 16)).view(x.shape) + x
        return out


def test_views_of_views_are_taken_out_as_without_us() -> None:
    model, x = Folding(), torch.randn(16, 16)
    alone, seen = _graphs(_plain, model, x), _graphs(lambda one: hl.capture(one, "layer"), model, x)
    assert [_describe(one) for one in seen] == [_describe(one) for one in alone]


class Adding(nn.Module):
    """A product whose only reader adds something: one operation, if nobody looks between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layer(x)
        return out


def test_a_product_and_a_sum_become_one_as_without_us() -> None:
    model, x = nn.Sequential(Adding(), Adding()).bfloat16(), torch.randn(8, 16).bfloat16()
    found = []
    for watch in (_plain, lambda one: hl.capture(one, "**.layer")):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        with watch(model) as got:
            found.append(compiled(x))
    assert torch.equal(*found)
    torch.testing.assert_close(got["0.layer"].output, model[0].layer(x))


DRAWING = {
    "Dropout1d": [nn.Linear(16, 16), nn.Dropout1d(0.5), nn.Dropout(0.5)],
    "RReLU": [nn.Linear(16, 16), nn.RReLU(), nn.Dropout(0.5)],
}
"""Layers that draw random numbers in two ways: which come first is for inductor to say."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWING)
def test_random_numbers_are_drawn_in_the_same_order(name: str) -> None:
    def train(look: Any) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*copy.deepcopy(DRAWING[name]), nn.Linear(16, 4))
        compiled, losses = torch.compile(model), []
        with look(compiled):
            for _ in range(2):
                loss = compiled(torch.randn(8, 16)).square().mean()
                loss.backward()
                losses.append(loss.item())
        return losses

    plain = train(_plain)
    assert train(lambda one: hl.watch(one, **SPARING)) == plain
    assert train(lambda one: hl.watch(one, sites="1", **SPARING)) == plain
    assert train(lambda one: hl.capture(one, "1", last=True)) == plain


@pytest.mark.slow
def test_a_wrapper_in_cpp_is_compiled_with_us() -> None:
    """Text in it stands on one line."""
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 16)
    compiled = torch.compile(model, options={"cpp_wrapper": True})
    with hl.watch(model, **SPARING) as watched:
        compiled(x).sum().backward()
        watched.step()
    assert len(watched.history.steps) == 1
    with torch.no_grad(), hl.capture(model, "*") as got:
        compiled(x)
    torch.testing.assert_close(got["1"].output, model[:2](x))
