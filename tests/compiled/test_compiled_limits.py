"""How many graphs there may be: who listens takes none of those that the model may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import WAYS, Stack, count
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

few = torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False)


def has_note(error: BaseException) -> bool:
    return any("what listens takes graphs of its own" in one for one in error.__notes__)


@pytest.mark.parametrize("way", WAYS)
@few
def test_sets_of_sites_are_no_fewer_than_asked_for(way: str) -> None:
    model, x = Stack(2), torch.randn(3, 6, requires_grad=True)
    plain, counter = model(x), count("aot_eager")
    call = WAYS[way](model, counter)
    call(x)
    for site in ("norm", "wide", "act", "narrow", "wide", "act"):
        with hl.capture(model, f"blocks.*.{site}", grads=True) as got:
            call(x).sum().backward()
        assert got[f"blocks.1.{site}"].output.grad is not None
        with hl.watch(model, None, sites=f"blocks.*.{site}", rules=False) as watcher:
            call(x).sum().backward()
        assert watcher.series(f"blocks.1.{site}", "count").values[0] > 0
        with hl.edit(model, {f"blocks.1.{site}": hl.zero()}):
            assert not torch.equal(call(x), plain)
        assert torch.equal(call(x), plain)
    assert torch.equal(call(x[:2]), model(x[:2]))  # as many graphs of its own as before
    with pytest.raises(FailOnRecompileLimitHit):
        call(x[:1])


@few
def test_edits_of_other_kinds_at_one_site_are_counted_apart() -> None:
    model, x = Stack(1), torch.randn(3, 6)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    made = [hl.zero(), hl.scale(2.0), hl.add(1.0), hl.clip(-1.0, 1.0), hl.add(torch.ones(6))]
    for one in made:
        with hl.edit(model, {"blocks.0.norm": one}):
            edited = call(x)
        with hl.edit(model, {"blocks.0.norm": one}):
            assert torch.equal(edited, model(x))


@few
def test_model_with_all_its_graphs_is_heard() -> None:
    model = Stack(1)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = [torch.randn(size, 6) for size in (2, 3)]
    for x in inputs:
        call(x)
    for x in inputs:
        with hl.capture(model, "blocks.0.act") as got:
            out = call(x)
        assert torch.equal(out, model(x))
        assert got["blocks.0.act"].output.shape[0] == len(x)


@few
@pytest.mark.parametrize("is_open", [True, False])
def test_error_at_the_limit_names_who_listens(is_open: bool) -> None:
    model = Stack(1)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hl.capture(model, "blocks.0.act"):
        for size in (2, 3):
            call(torch.randn(size, 6))
        if is_open:
            with pytest.raises(FailOnRecompileLimitHit) as caught:
                call(torch.randn(4, 6))
            assert has_note(caught.value)
    for size in (2, 3):
        call(torch.randn(size, 6))
    with pytest.raises(FailOnRecompileLimitHit) as caught:
        call(torch.randn(4, 6))
    assert has_note(caught.value)


@few
def test_functions_that_nobody_listens_in_have_the_limit_of_torch() -> None:
    model, counter = Stack(1), count("aot_eager")
    function = torch.compile(lambda x: x.cos(), backend=counter, fullgraph=True)
    with hl.capture(model, "blocks.0.act"):
        torch.compile(model, backend="aot_eager")(torch.randn(2, 6))
        for size in (2, 3):
            function(torch.randn(size))
        with pytest.raises(FailOnRecompileLimitHit) as caught:
            function(torch.randn(4))
    assert counter.frame_count == 2
    assert not getattr(caught.value, "__notes__", [])


class Holder:
    """Hold a model where a function does not show it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


@few
def test_models_in_an_object_or_a_container_are_found() -> None:
    model, x = Stack(1), torch.randn(3, 6)
    holder, models = Holder(model), {"a": model}
    ways: list[Callable[[Tensor], Tensor]]
    ways = [holder.__call__, lambda x: holder(x), lambda x: models["a"](x)]
    for way in ways:
        torch._dynamo.reset()
        call = torch.compile(way, backend="aot_eager", fullgraph=True)
        for site in ("norm", "wide", "act", "narrow"):
            with hl.capture(model, f"blocks.0.{site}") as got:
                call(x)
            assert len(got) == 1


@few
def test_model_that_is_out_of_sight_is_counted_as_by_torch() -> None:
    model, x = Stack(1), torch.randn(3, 6)
    holder = Holder(Holder(model))
    call = torch.compile(lambda x: holder(x), backend="aot_eager", fullgraph=True)
    for site in ("norm", "act"):
        with hl.capture(model, f"blocks.0.{site}") as got:
            call(x)
        assert len(got) == 1
    with pytest.raises(FailOnRecompileLimitHit) as caught:
        call(x)
    assert has_note(caught.value)


class Unbound:
    """Say of itself that it is of no class, as a proxy does that nothing is bound to."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("nothing is bound")


class Early(nn.Module):
    """Call what is compiled before it is a module."""

    def __init__(self) -> None:
        self.first = early(torch.ones(2), self)
        super().__init__()


@torch.compile(backend="eager")
def early(x: Tensor, owner: object) -> int:
    return len(UNBOUND) if x.shape[0] > 2 else x.shape[0]


UNBOUND: Any = Unbound()


def test_what_users_made_is_not_asked() -> None:
    model = Stack(1)
    with hl.capture(model, "blocks.0.act"):  # from here on frames are looked at
        torch.compile(model, backend="eager")(torch.randn(2, 6))
    assert Early().first == 2
