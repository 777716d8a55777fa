"""What has a watched graph compiled sooner: a short way to a hook, a collector that is spared."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo import callback
from torch._inductor.scheduler import Scheduler

import hookline as hl
from hookline.hooks import sparing

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Pair(nn.Module):
    """Gives two values."""

    def forward(self, x: Tensor, *, output: float) -> tuple[Tensor, Tensor]:
        return x * output, x + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.pair = Pair()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.pair(self.first(x), output=2.0)
        return self.last(one + other)


@contextmanager
def count_followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Name the modules whose hook dynamo follows by torch's own way, one for each call."""
    found: list[str] = []
    symbolic: Any = torch._dynamo.symbolic_convert.InliningInstructionTranslator
    build = symbolic.build_inline_tracer

    def follow(parent: Any, func: Any, args: Any, *given: Any, **options: Any) -> Any:
        if getattr(func, "get_code", None) and func.get_code() is nn.Module._call_impl.__code__:
            found.append(type(args[0].value).__name__)
        return build(parent, func, args, *given, **options)

    monkeypatch.setattr(symbolic, "build_inline_tracer", follow)
    yield found
    monkeypatch.undo()


@pytest.mark.parametrize("is_known", [False, True], ids=["watched first", "plain first"])
def test_dynamo_does_not_follow_torch_to_a_hook_that_only_looks(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    model, x = Model(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if is_known:
        compiled(x)
    with count_followed(monkeypatch) as followed, hl.watch(model):
        compiled(x).sum().backward()
    assert followed == []


def test_dynamo_follows_torch_where_a_module_has_another_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Model(), torch.randn(2, 4)
    heard: list[tuple[int, ...]] = []
    model.first.register_forward_hook(lambda _module, _args, output: heard.append(output.shape))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with count_followed(monkeypatch) as followed, hl.watch(model):
        compiled(x)
    assert followed == ["Linear"]
    assert heard == [(2, 4)]


@pytest.mark.parametrize("hook", ["forward", "pre", "backward", "global"])
def test_a_hook_that_comes_later_is_heard(hook: str) -> None:
    model, x = Model(), torch.randn(2, 4)
    model.compile(backend="aot_eager")
    heard: list[str] = []

    def hear(*_: Any) -> None:
        heard.append(hook)

    # By itself torch does not look for new hooks in a graph that is there.
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False), hl.watch(model):
        model(x).sum().backward()
        if hook == "forward":
            handle = model.pair.register_forward_hook(hear)
        elif hook == "pre":
            handle = model.pair.register_forward_pre_hook(hear)
        elif hook == "backward":
            handle = model.pair.register_full_backward_hook(hear)
        else:
            handle = nn.modules.module.register_module_forward_hook(hear)
        model(x).sum().backward()
        handle.remove()
    assert hook in heard


class Array(nn.Module):
    """Gives an array of NumPy."""

    def forward(self, x: Tensor) -> Any:
        return x.detach().numpy()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Array()

    def forward(self, x: Tensor) -> Tensor:
        given = self.inner(x)
        return x.double() if isinstance(given, np.ndarray) else x


def test_an_array_stays_what_it_is() -> None:
    model = Outer()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.watch(model):
        assert compiled(torch.ones(2)).dtype == torch.float64


def test_a_module_that_gives_several_values_is_heard_on_the_short_way() -> None:
    model, x = Model(), torch.randn(2, 4)
    with hl.watch(model) as eager:
        model(x).sum().backward()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.watch(model) as watch:
        compiled(x).sum().backward()
    found, asked = ({row["site"]: row for row in one.table()} for one in (watch, eager))
    assert found == asked
    assert {"pair:output[0]", "pair:output[1]", "pair:output[0].grad"} <= found.keys()


@pytest.fixture
def collector() -> Iterator[None]:
    """Leave the collector as it was, and have torch, which spares it since 2.15, not touch it."""
    before = gc.get_threshold()
    name = "gc_gen2_threshold_during_compile"
    config: Any = torch._dynamo.config
    with config.patch({name: None}) if hasattr(config, name) else contextlib.nullcontext():
        yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("is_failing", [False, True])
def test_the_collector_is_spared_until_the_graph_is_compiled(
    monkeypatch: pytest.MonkeyPatch, is_failing: bool
) -> None:
    gc.set_threshold(600, 9, 8)
    seen: list[tuple[int, int, int]] = []
    scheduler: Any = Scheduler
    schedule = scheduler.codegen

    def codegen(self: Any) -> Any:
        seen.append(gc.get_threshold())
        if is_failing:
            raise ZeroDivisionError
        return schedule(self)

    monkeypatch.setattr(scheduler, "codegen", codegen)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(lambda x: model(x).sum(), fullgraph=True)
    with torch._inductor.config.patch(fx_graph_cache=False), hl.watch(model):
        if is_failing:
            with pytest.raises(Exception, match="ZeroDivisionError"):
                compiled(torch.randn(2, 4))
        else:
            compiled(torch.randn(2, 4)).backward()
    assert seen == [(6000, 9, sparing._NEVER)] * (1 if is_failing else 2)
    assert gc.get_threshold() == (600, 9, 8)
    seen.clear()
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        if not is_failing:
            compiled(torch.randn(2, 4)).backward()
            assert seen == [(600, 9, 8)] * 2  # what is compiled without hooks is none of ours


@pytest.mark.usefixtures("collector")
def test_what_somebody_else_sets_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    spare = sparing.spare_searches

    def interfere() -> None:
        spare()
        gc.set_threshold(500, 5, 5)

    monkeypatch.setattr("hookline.hooks.inductor.spare_searches", interfere)
    compiled = torch.compile(lambda x: model(x) + 1, fullgraph=True)
    with hl.watch(model):
        compiled(torch.randn(2, 4))
    assert gc.get_threshold() == (500, 5, 5)


@pytest.mark.usefixtures("collector")
def test_the_collector_goes_on_where_somebody_elses_callback_raises() -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError

    before = gc.get_threshold()
    model = nn.Linear(4, 4)
    compiled = torch.compile(lambda x: model(x) + 2, fullgraph=True)
    handler: Any = callback.CompilationCallbackHandler()
    handler.register_end_callback(fail)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback, "callback_handler", handler)
        patch.setattr(torch._dynamo, "callback_handler", handler)
        with hl.watch(model), pytest.raises(Exception, match="ZeroDivisionError"):
            compiled(torch.randn(2, 4))
        assert gc.get_threshold() == before
