"""Models whose guards the user has dropped: `torch.compile(options={"guard_filter_fn": ...})`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import count
from torch import Tensor, nn

import hookline as hl

FILTERS = {
    one: getattr(torch.compiler, one)
    for one in (
        "skip_guard_on_inbuilt_nn_modules_unsafe",
        "skip_guard_on_all_nn_modules_unsafe",
        "keep_tensor_guards_unsafe",
        "skip_guard_on_globals_unsafe",
        "skip_all_guards_unsafe",
    )
}

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.act, self.narrow = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(x)
        out: Tensor = self.narrow(self.act(y))
        return out


class Broken(Own):
    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(x)
        torch._dynamo.graph_break()
        out: Tensor = self.narrow(self.act(y))
        return out


def wrap(model: nn.Module, wanted: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="aot_eager", options={"guard_filter_fn": wanted})


def in_place(model: nn.Module, wanted: Any) -> Callable[..., Any]:
    model.compile(backend="aot_eager", options={"guard_filter_fn": wanted})
    return model


def function(model: nn.Module, wanted: Any) -> Callable[..., Any]:
    def call(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    return torch.compile(call, backend="aot_eager", options={"guard_filter_fn": wanted})


WAYS = {"wrapped": wrap, "in place": in_place, "a function": function}


def check(model: nn.Module, call: Callable[..., Any]) -> None:
    """Open one session after the other, and see that each is heard and ends."""
    x = torch.randn(3, 4, requires_grad=True)
    wide: Any = model.get_submodule("wide")
    act: Any = model.get_submodule("act")
    plain, value = model(x), act(wide(x))
    for site in ("act", "wide", "act"):
        with hl.edit(model, {site: hl.zero()}):
            edited = call(x)
        assert torch.equal(edited[0], edited[1])
        assert torch.equal(call(x), plain)
    for _ in range(2):
        with hl.capture(model, ["act", "wide:input"], grads=True) as got:
            call(x).sum().backward()
        assert torch.equal(got["act"].output, value)
        assert got["act"].output.grad is not None
        assert torch.equal(got["wide"].input, x)
        assert torch.equal(call(x), plain)
    with hl.capture(model, "@y") as inside:
        call(x)
    assert torch.equal(inside["@y"], wide(x))
    with hl.watch(model) as watcher:
        call(x).sum().backward()
    assert watcher.series("act", "absmax").values.tolist() == [value.max().item()]
    assert torch.equal(call(x), plain)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Own, Broken])
def test_sessions_are_heard_and_end(kind: type[Own], way: str, name: str) -> None:
    model = kind()
    check(model, WAYS[way](model, FILTERS[name]))


@pytest.mark.parametrize("name", FILTERS)
def test_graphs_are_made_once(name: str) -> None:
    counter, model, x = count("aot_eager"), Own(), torch.randn(3, 4)
    compiled = torch.compile(
        model, backend=counter, fullgraph=True, options={"guard_filter_fn": FILTERS[name]}
    )
    compiled(x)
    for _ in range(3):
        with hl.capture(model, "act"):
            compiled(x)
        compiled(x)
    assert counter.frame_count == 2


CALLED_BEFORE = """
import itertools
import warnings
import torch
from test_compiled_guards import FILTERS, WAYS, Broken, Own, check

warnings.filterwarnings("ignore", "The .grad attribute")
torch._dynamo.config.recompile_limit = 100
x = torch.randn(3, 4, requires_grad=True)
models = []
for kind, name, way in itertools.product((Own, Broken), FILTERS, WAYS):
    model = type(kind.__name__, (kind,), {})()
    call = WAYS[way](model, FILTERS[name])
    assert torch.equal(call(x), model(x))
    models.append((model, call))
for model, call in models:
    check(model, call)
print(len(models))
"""


def test_graphs_that_were_there_before_any_session_are_made_again() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CALLED_BEFORE],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "30"
