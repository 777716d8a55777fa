"""Sessions on compiled models, one after the other and at once: each hears what is its own."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import Stack
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

SPARING: Any = {"parameters": None, "updates": False, "units_every": 0, "rules": False}


def watch(model: Any) -> hl.Watch:
    return hl.watch(model, None, **SPARING)


def count_gradients(watcher: hl.Watch) -> int:
    rows = [str(row["site"]) for row in watcher.history.sites()]
    return sum(one.endswith(".grad") for one in rows)


def test_models_one_after_the_other_share_a_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    for _ in range(10):
        model = Stack(2)
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        with watch(model) as watcher:
            compiled(torch.randn(3, 6)).sum().backward()
        assert count_gradients(watcher) == 11  # those of the modules and of the model
        del watcher, compiled, model
        gc.collect()
    assert counter.frame_count <= 2  # before anything was compiled, and since


def test_two_models_at_once_are_kept_apart() -> None:
    models = Stack(2), Stack(2)
    x = torch.randn(3, 6)
    compiled = [torch.compile(one, backend="aot_eager", fullgraph=True) for one in models]
    with watch(models[0]) as first, watch(models[1]) as second:
        for call, factor in zip(compiled, (1, 100), strict=True):
            call(factor * x).sum().backward()
    with torch.no_grad():
        truths = [one.blocks[0](factor * x) for one, factor in zip(models, (1, 100), strict=True)]
    for watcher, truth in zip((first, second), truths, strict=True):
        (value,) = watcher.series("blocks.0", "absmax").values
        assert value == truth.abs().max().item()


@pytest.mark.parametrize("sites", ["**", "**:output.grad"])
def test_a_backward_put_off_is_heard_by_nobody_who_came_since(sites: str) -> None:
    model, x = Stack(2), torch.randn(3, 6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.watch(model, None, sites=sites, **SPARING):
        loss = compiled(x).sum()
    with hl.watch(model, None, sites=sites, **SPARING) as later:
        loss.backward()
        compiled(x)
    assert count_gradients(later) == 0


def test_a_backward_put_off_is_heard_by_who_was_there_then() -> None:
    model, other, x = Stack(2), Stack(2), torch.randn(3, 6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with watch(model) as first:
        loss = compiled(x).sum()
        with watch(other) as second:
            loss.backward()
    assert count_gradients(first) == 11  # those of the modules and of the model
    assert count_gradients(second) == 0


def test_blocks_that_are_compiled_one_by_one_share_a_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model, x = Stack(4), torch.randn(3, 6, requires_grad=True)
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    with watch(model) as watcher:
        model(x).sum().backward()
    assert counter.frame_count == 1
    with torch.no_grad():
        value = x
        for number, block in enumerate(model.blocks):
            value = block(value)
            (seen,) = watcher.series(f"blocks.{number}", "absmax").values
            assert seen == value.abs().max().item()


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[torch.tensor([0, 2])] = 100.0
        out: Tensor = self.last(self.act(y))
        return out


def test_a_value_is_measured_before_it_is_written_over() -> None:
    model, x = Overwriting(), torch.randn(4, 4)
    compiled = torch.compile(model, fullgraph=True)
    with watch(model) as watcher:
        compiled(x).sum().backward()
    (value,) = watcher.series("first", "absmax").values
    assert value == pytest.approx(model.first(x).abs().max().item())


def test_values_of_changing_sizes_are_measured_each_time() -> None:
    model = Stack(2)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sizes = [3, 4, *[5] * 12, 3, 6, 7]
    with watch(model) as watcher:
        for size in sizes:
            compiled(torch.ones(size, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watcher.series("blocks.1.act", "count").values.tolist() == [12 * one for one in sizes]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}
OPENED: dict[str, Callable[[nn.Module], Any]] = {
    "capture": lambda model: hl.capture(model, "**", grads=True),
    "edit": lambda model: hl.edit(model, {"blocks.0": hl.zero()}),
    "watch": watch,
}


@pytest.mark.filterwarnings("ignore::hookline.HooklineWarning")  # the model itself is not called
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("what", OPENED)
def test_copy_made_while_a_session_is_open_compiles_as_one_graph(what: str, how: str) -> None:
    model, x = Stack(2), torch.randn(3, 6)
    plain = model(x)
    counter = CompileCounterWithBackend("aot_eager")
    with OPENED[what](model):
        early, late = COPIES[how](model), COPIES[how](model)
        assert torch.equal(torch.compile(early, backend=counter, fullgraph=True)(x), plain)
    compiled = torch.compile(late, backend=counter, fullgraph=True)
    assert torch.equal(compiled(x), plain)
    assert counter.frame_count == 1  # one fits all copies
