"""Compiled models under hooks on saved tensors, which may give backward copies of what is saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.hooks import operators

BACKENDS = ["aot_eager", "inductor"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.act(self.a(x)))
        return out


def copy_saved() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda saved: saved)


def make(backend: str, device: str = "cpu") -> tuple[Net, Any, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net().to(device)
    return net, torch.compile(net, backend=backend), torch.randn(4, 8, device=device)


def step(model: Any, x: Tensor, around: AbstractContextManager[Any]) -> Tensor:
    with around:
        loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss


def count_rows(watch: Any) -> dict[str, int]:
    sites = [row["site"] for number in range(3) for row in watch.table(step=number)]
    return {name: sites.count(f"{name}:output.grad") for name in ("a", "act", "b")}


def gradients(net: Net, run: Callable[[], Any]) -> list[Tensor]:
    with hl.capture(net, "*", grads=True) as got:
        run()
    return [got[name].output.grad for name in ("a", "act", "b")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_captured_gradients_are_those_without_the_hooks(backend: str) -> None:
    net, compiled, x = make(backend)
    plain = gradients(net, lambda: step(compiled, x, contextlib.nullcontext()))
    copied = gradients(net, lambda: step(compiled, x, copy_saved()))
    for one, other in zip(plain, copied, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_watch_measures_gradients(backend: str) -> None:
    net, compiled, x = make(backend)
    with hl.watch(net, rules=False) as w:
        for _ in range(3):
            step(compiled, x, copy_saved())
            w.step()
    assert count_rows(w) == {"a": 3, "act": 3, "b": 3}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_edit_of_a_gradient_is_counted(backend: str) -> None:
    net, compiled, x = make(backend)
    with hl.edit(net, {"a:output.grad": hl.zero()}) as edited:
        step(compiled, x, copy_saved())
    assert [row["applied"] for row in edited.report()] == [1]
    assert net.a.weight.grad is not None
    assert not net.a.weight.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_session_hears_its_own(backend: str) -> None:
    """The second runs in the graph of the first, whose keys are copied in a backward of its own."""
    net, compiled, x = make(backend)
    with hl.capture(net, ["a"], grads=True) as first:
        step(compiled, 2 * x, copy_saved())
        with copy_saved():
            late = compiled(x).square().mean()
    with hl.capture(net, ["a"], grads=True) as second:
        step(compiled, 3 * x, copy_saved())
        late.backward()
    twice, thrice = (
        gradients(net, lambda by=by: step(net, by * x, copy_saved()))[0] for by in (2, 3)
    )
    torch.testing.assert_close(first.calls[0]["a"].output.grad, twice)
    torch.testing.assert_close(second["a"].output.grad, thrice)
    assert first.calls[1]["a"].output.grad is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_part_of_a_checkpointed_region_has_gradients(backend: str) -> None:
    net, compiled, x = make(backend)
    leaf = x.clone().requires_grad_()

    def run() -> None:
        checkpoint(compiled, leaf, use_reentrant=False).square().mean().backward()

    plain = gradients(net, lambda: step(compiled, x, contextlib.nullcontext()))
    for one, other in zip(plain, gradients(net, run), strict=True):
        torch.testing.assert_close(one, other)


def test_not_more_is_kept_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_MOST_TOLD", 4)
    net, compiled, x = make("aot_eager")
    with hl.capture(net, ["a"], grads=True), copy_saved():
        before = set(operators._ears.values())
        for _ in range(20):
            loss = compiled(x).sum()
        loss.backward()
        kept = [one.told for one in set(operators._ears.values()) - before]
        assert [len(one) for one in kept if one is not None] == [4]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_pinned", [False, True])
def test_what_is_saved_on_the_host_comes_back_with_its_gradients(
    backend: str, *, is_pinned: bool
) -> None:
    net, compiled, x = make(backend, "cuda")
    plain = gradients(net, lambda: step(compiled, x, contextlib.nullcontext()))
    back = gradients(net, lambda: step(compiled, x, save_on_cpu(pin_memory=is_pinned)))
    for one, other in zip(plain, back, strict=True):
        assert torch.equal(one, other)
    with hl.watch(net, rules=False) as w:
        for _ in range(3):
            step(compiled, x, save_on_cpu(pin_memory=is_pinned))
            w.step()
    assert count_rows(w) == {"a": 3, "act": 3, "b": 3}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_key_of_a_watch_that_ended_is_not_read(backend: str) -> None:
    net, compiled, x = make(backend, "cuda")
    with hl.watch(net, rules=False):
        compiled(x).square().mean().backward()  # which compiles the backward
        late = compiled(x).square().mean()
    torch.cuda.set_sync_debug_mode("error")
    try:
        late.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
