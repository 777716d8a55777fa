"""Backward compiled by torch's compiled autograd, into one graph with all that is around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo import config
from torch.utils.checkpoint import checkpoint

import hookline as hl


class Net(nn.Module):
    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.a, self.act = nn.Linear(4, 8), nn.GELU()
        self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 2)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.a(x))
        x = checkpoint(self.b, x, use_reentrant=False) if self.is_checkpointed else self.b(x)
        out: Tensor = self.c(x.relu())
        return out


@pytest.fixture(autouse=True, params=["aot_eager", "inductor"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with config.patch(compiled_autograd=True):
        yield request.param


def make(backend: str, **options: bool) -> tuple[Net, Callable[[], Tensor]]:
    """Make a net, and a compiled function that does its forward and its backward."""
    torch.manual_seed(0)
    net, x = Net(**options), torch.randn(3, 4)

    @torch.compile(backend=backend)
    def step() -> Tensor:
        loss = net(x).square().mean()
        shown: Tensor = loss.detach()
        loss.backward()
        return shown

    return net, step


def train(net: Net, step: Callable[[], Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        seen.append(step().clone())
        seen += [one.grad.clone() for one in net.parameters() if one.grad is not None]
        optimizer.step()
    return seen


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_watch_measures_gradients_and_changes_no_bit(
    backend: str, *, is_checkpointed: bool
) -> None:
    plain = train(*make(backend, is_checkpointed=is_checkpointed))
    torch._dynamo.reset()
    net, step = make(backend, is_checkpointed=is_checkpointed)
    with hl.watch(net, rules=False) as w:
        watched = train(net, step)
    assert len(plain) == 3 * 7
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    sites = {row["site"] for row in w.table()}
    names = {"a", "act", "b", "c", ""}
    assert {f"{one}:output{kind}" for one in names for kind in ("", ".grad")} <= sites


def test_a_captured_gradient_is_that_of_eager(backend: str) -> None:
    def capture(net: Net, run: Callable[[], Any]) -> dict[str, Tensor]:
        with hl.capture(net, "*", grads=True) as got:
            run()
        return {name: got[name].output.grad for name in ("a", "act", "b", "c")}

    net, step = make(backend)
    heard = capture(net, step)
    eager = capture(net, lambda: _run_eagerly(step))
    assert heard.keys() == eager.keys()
    for name, one in heard.items():
        torch.testing.assert_close(one, eager[name])


def test_an_edited_gradient_goes_on_edited_until_the_edit_ends(backend: str) -> None:
    net, step = make(backend)
    with hl.edit(net, {"b:output.grad": hl.scale(0.0)}) as edited:
        step()
    assert _norms(net) == pytest.approx([0.0, 0.0], abs=0)
    assert [row["applied"] for row in edited.report()] == [1]
    net.zero_grad()
    step()
    assert min(_norms(net)) > 0


def _run_eagerly(step: Callable[[], Any]) -> None:
    with torch.compiler.set_stance("force_eager"):
        step()


def _norms(net: Net) -> list[float]:
    return [one.weight.grad.norm().item() for one in (net.a, net.b)]  # type: ignore[union-attr]
