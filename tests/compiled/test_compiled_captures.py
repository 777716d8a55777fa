"""Captures inside compiled graphs: every value and gradient, and no compilation too many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from blocks import WAYS, Stack, assert_same, count, run_eagerly
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import hookline as hl

# The compiler looks at the .grad of what goes from one graph to the next.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

SITES = "blocks.**"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_the_eager_model(
    way: str, is_first: bool, backend: str
) -> None:
    model, x = Stack(2), torch.randn(3, 6)
    expected = run_eagerly(model, x)
    compiled = WAYS[way](model, count(backend))
    if not is_first:  # a graph without hooks is there already
        compiled(x)
    with hl.capture(model, SITES, grads=True) as got:
        compiled(x).square().sum().backward()
    assert_same(got, expected, depth=2)


@pytest.mark.parametrize("way", WAYS)
def test_sites_are_compiled_once(way: str) -> None:
    model, x = Stack(3), torch.randn(3, 6)
    counter = count("aot_eager")
    compiled = WAYS[way](model, counter)
    compiled(x)
    plain = counter.frame_count
    for _ in range(3):
        with hl.capture(model, SITES, grads=True):
            for _ in range(2):
                compiled(x).square().sum().backward()
        compiled(x)
    assert counter.frame_count == 2 * plain
    with hl.capture(model, "blocks.1.act") as got:
        compiled(x)
    assert len(got) == 1


@pytest.mark.parametrize("way", ["each block in place", "each block wrapped"])
def test_blocks_that_are_compiled_one_by_one_share_a_graph(way: str) -> None:
    model, x = Stack(12), torch.randn(3, 6)  # more than the compiler would compile one by one
    counter = count("aot_eager")
    expected = run_eagerly(model, x)
    compiled = WAYS[way](model, counter)
    with hl.capture(model, SITES, grads=True) as got:
        compiled(x).square().sum().backward()
    assert counter.frame_count <= 2
    assert_same(got, expected, depth=12)


@pytest.mark.parametrize("way", ["torch.compile(model)", "each block in place"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_captured_once(way: str, reentrant: bool) -> None:
    model, x = Stack(2, reentrant=reentrant), torch.randn(3, 6, requires_grad=True)
    expected = run_eagerly(model, x)
    compiled = WAYS[way](model, count("aot_eager"))
    with hl.capture(model, SITES, grads=True) as got:
        compiled(x).square().sum().backward()
    assert_same(got, expected, depth=2)


def test_several_calls_before_one_backward_keep_their_gradients_apart() -> None:
    model = Stack(2)
    first, second = torch.randn(3, 6), torch.randn(3, 6)
    expected = run_eagerly(model, first, second)
    compiled = WAYS["torch.compile(model)"](model, count("aot_eager"))
    with hl.capture(model, SITES, grads=True) as got:
        (compiled(first).square().sum() + compiled(second).square().sum()).backward()
    assert_same(got, expected, depth=2)


def test_other_shapes_compile_no_more_than_without() -> None:
    model = Stack(2)
    counter = count("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    compiled(torch.randn(3, 6))
    compiled(torch.randn(5, 6))
    before = counter.frame_count
    for size in (3, 5, 7, 9):
        with hl.capture(model, "blocks.1", grads=True) as got:
            compiled(torch.randn(size, 6)).sum().backward()
        assert got["blocks.1"].output.shape == (size, 6)
    assert counter.frame_count == before + 1


@pytest.mark.slow
def test_inductor_gives_the_same_values() -> None:
    model, x = Stack(1), torch.randn(3, 6)
    expected = run_eagerly(model, x)
    compiled = WAYS["torch.compile(model)"](model, count("inductor"))
    with hl.capture(model, SITES, grads=True) as got:
        compiled(x).square().sum().backward()
    assert_same(got, expected, depth=1)


class Sharing(nn.Module):
    """Give what was given back beside what was made of it, and that twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        h = self.fc(x)
        return {"last": h, "all": (y, h)}


class Sharers(nn.Module):
    """Call one module several times, on what is there before anything was computed too."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Sharing()
        self.same = nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.part(x, y)
        second = self.part(first["last"].sin(), x)
        third = self.part(y, second["all"][0])
        found = [first, second, third]
        sums: list[Tensor] = [one["last"] * one["all"][0] + one["all"][1] for one in found]
        return self.same(sums[0]) + self.same(x) + sums[1] * sums[2]


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_is_delivered_comes_in_the_order_of_the_model(backend: str, has_grad: bool) -> None:
    """Inductor moves what has nothing to wait for to the front, other visits' values too."""
    torch.manual_seed(0)
    model = Sharers()
    inputs = [torch.randn(3, 6, requires_grad=has_grad) for _ in range(2)]

    def call(model: Any) -> None:
        loss = model(*inputs).sum()
        if has_grad:
            loss.backward()

    sites = ["part", "part.fc", "same"]
    with torch.set_grad_enabled(has_grad):
        with hl.capture(model, sites, grads=has_grad) as expected:
            call(model)
        compiled = WAYS["torch.compile(model)"](model, count(backend))
        with hl.capture(model, sites, grads=has_grad) as got:
            call(compiled)
    assert len(list(got)) == len(list(expected)) == 8
    for one, other in zip(got, expected, strict=True):
        assert str(one) == str(other)
        torch.testing.assert_close(one.output, other.output, rtol=1e-5, atol=1e-6)


def test_models_are_as_before() -> None:
    model, x = Stack(1), torch.randn(3, 6)
    compiled = WAYS["torch.compile(model)"](model, count("aot_eager"))
    before = compiled(x)
    keys = [set(vars(one)) for one in model.modules()]
    with hl.capture(model, SITES):
        assert torch.equal(compiled(x), before)
    assert [set(vars(one)) for one in model.modules()] == keys
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert torch.equal(compiled(x), before)


def test_a_break_in_the_graph_loses_nothing() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            out: torch.Tensor = self.last(x.relu())
            return out

    model, x = Broken(), torch.randn(2, 4)
    counter = count("aot_eager")
    compiled = torch.compile(model, backend=counter)
    with hl.capture(model, "*", grads=True) as got:
        out = compiled(x)
        out.sum().backward()
    assert counter.frame_count == 2
    torch.testing.assert_close(got["first"].output, model.first(x))
    torch.testing.assert_close(got["last"].output, out)
    assert got["first"].output.grad is not None


@torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False)
def test_more_graphs_than_the_compiler_allows_run_eagerly() -> None:
    model = Stack(1)
    compiled = torch.compile(model, backend="aot_eager")
    for size in (2, 3, 4, 5, 6):
        x = torch.randn(size, 6)
        with hl.capture(model, "blocks.0.act", grads=True) as got:
            compiled(x).sum().backward()
        value = got["blocks.0.act"].output
        torch.testing.assert_close(value, run_eagerly(model, x)["blocks.0.act"].output)
        assert value.grad is not None


LIMIT = "as many graphs of a function as it may"


@torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False)
@pytest.mark.parametrize("is_function", [True, False])
def test_a_limit_is_noted_by_sessions_that_come_after_it(is_function: bool) -> None:
    model = Stack(1)
    called = (lambda x: model(x) * 1) if is_function else model
    compiled = torch.compile(called, backend="aot_eager")
    noted = []
    for size in (2, 3, 4, 5):
        with hl.capture(model, "blocks.0.act") as got:
            compiled(torch.randn(size, 6))
        noted.append(LIMIT in str(got.report()))
    assert noted == [False, False, True, True]
    with hl.watch(model, None, rules=False) as watcher:
        compiled(torch.randn(6, 6)).sum().backward()
    assert any(LIMIT in one for one in watcher.notes)
    torch._dynamo.reset()  # the compiler begins anew
    with hl.capture(model, "blocks.0.act") as got:
        compiled(torch.randn(2, 6))
    assert LIMIT not in str(got.report())


@torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False)
def test_a_limit_reached_before_any_session_is_noted_for_that_model_alone() -> None:
    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    model, other = Stack(1), Other()
    spent, free = (torch.compile(one, backend="aot_eager") for one in (model, other))
    for size in (2, 3, 4):
        spent(torch.randn(size, 6))
    for one, is_noted in ((spent, True), (free, False), (Stack(1), False)):
        with hl.capture(one, "") as got:
            one(torch.randn(5, 6))
        assert (LIMIT in str(got.report())) == is_noted


@torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False)
def test_a_limit_that_another_model_reaches_meanwhile_is_not_noted() -> None:
    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    model, other = Stack(1), torch.compile(Other(), backend="aot_eager")
    compiled = torch.compile(model, backend="aot_eager")
    with hl.capture(compiled, "blocks.0.act") as got:
        compiled(torch.randn(2, 6))
        for size in (2, 3, 4):
            other(torch.randn(size, 6))
    assert LIMIT not in str(got.report())


@torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False)
def test_a_limit_of_a_function_that_does_not_call_the_model_is_soon_forgotten() -> None:
    torch._dynamo.reset()
    model = torch.compile(Stack(1), backend="aot_eager")
    function = torch.compile(lambda x: x.cos(), backend="aot_eager")
    noted = []
    for sizes in ((2, 3, 4), (5,), ()):
        with hl.capture(model, "blocks.0.act") as got:
            model(torch.randn(2, 6))
            for size in sizes:
                function(torch.randn(size))
        noted.append(LIMIT in str(got.report()))
    assert noted == [True, False, False]  # while it happens, it may be a function that calls it


def test_a_gradient_that_would_not_be_whole_is_not_given() -> None:
    """What a graph makes of one of its outputs for another is not heard of outside."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(x)
            return {"logits": logits, "loss": logits.square().sum()}

    model, x = WithLoss(), torch.ones(2, 3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def run() -> hl.Captured:
        with hl.capture(model, "", "head", grads=True) as got:
            out = compiled(x)
            (out["loss"] + out["logits"].sum()).backward()
        return got

    with pytest.warns(hl.HooklineWarning, match=r"one of several outputs of a compiled graph"):
        got = run()
    torch.testing.assert_close(got["head"].output.grad, 2 * model.head(x) + 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_on_the_meta_device_is_heard_as_an_eager_one(backend: str) -> None:
    model, x = Stack(1).to("meta"), torch.randn(3, 6, device="meta")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with hl.capture(compiled, "blocks.0.wide", grads=True) as got:
        compiled(x).sum().backward()
    output = got["blocks.0.wide"].output
    assert output.is_meta
    assert output.shape == output.grad.shape == (3, 12)
    with hl.watch(model, None, rules=False) as watcher:
        compiled(x).sum().backward()
    assert any(one.startswith("`blocks.0.wide:output`: A tensor on") for one in watcher.notes)


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Any]] = {
    "tuple": (lambda a, b: (a, b), (2, 3)),
    "list": (lambda a, b: [a, b], (2, 3)),
    "nested": (lambda a, b: (a, {"a": b}), (2, {"a": 3})),
    "dict": (lambda a, b: {"a": a, 0: (b,)}, {"a": 2, 0: (3,)}),
    "numbered dict": (lambda a, b: {1: a, 2: b}, {1: 2, 2: 3}),
}
"""What a module makes of two tensors, and what that is known as in a checkpointed region."""


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_nested_values_of_a_checkpointed_region_are_tuples_and_dicts(
    kind: str, grads: bool
) -> None:
    make, known = CONTAINERS[kind]

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return make(x * 2, x * 3)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    model, x = Outer(), torch.randn(2, 4, requires_grad=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.capture(model, "inner", grads=grads) as got:
        sum(one.sum() for one in tree_leaves(compiled(x))).backward()
    assert tree_map(lambda one: (one / x).mean().round().item(), got["inner"].output) == known
