"""The short way of eager values and gradients on a GPU: the CPU's numbers, no wait, streams."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from trainings import addresses

import hookline as hl
from hookline.stats import open_log

pytestmark = pytest.mark.gpu

OPTIONS = {"parameters": None, "sketch_every": 0, "counts_every": 0, "units_every": 0}


class Net(nn.Module):
    """Residual blocks that share gradients, and a branch that may have a stream of its own."""

    def __init__(self, side: torch.cuda.Stream | None = None) -> None:
        super().__init__()
        self.side = side
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
            for _ in range(6)
        )
        self.branch = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        if self.side is None:
            return x + self.branch(x)
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            branch = self.branch(x)
        here.wait_stream(self.side)
        return x + branch


def train(net: Net, device: str, steps: int = 6) -> hl.Watch:
    """Train under a watch."""
    optimizer = SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1)
    with hl.watch(net, strict=True, replay=False, **OPTIONS) as watched:
        for batch in torch.randn(steps, 4, 8, 64):
            net(batch.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return watched


@pytest.mark.parametrize("has_side", [False, True])
def test_what_waits_is_measured_as_on_the_cpu(has_side: bool) -> None:
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        side = torch.cuda.Stream() if has_side and device == "cuda" else None
        watched = train(Net(side).to(device), device)
        found.append({one: watched.series(one, "rms").values for one in addresses(watched)})
    assert list(found[0]) == list(found[1])
    for site, values in found[0].items():
        assert found[1][site] == pytest.approx(values, rel=2e-3), site


def test_a_step_that_waits_for_nothing() -> None:
    net = Net().cuda()
    optimizer = SGD(net.parameters(), lr=0.1)
    x = torch.randn(4, 8, 64, device="cuda")
    with hl.watch(net, strict=True, rules=False, replay=False, **OPTIONS) as watched:
        for number in range(6):
            torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
            try:
                net(x).square().mean().backward()
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert len(watched.series("blocks.3.1:output.grad", "rms").values) == 6


def test_kinds_that_come_mixed_are_measured_as_alone_and_the_same_memory_once() -> None:
    log = open_log("cuda")
    x = torch.randn(64, 100, device="cuda")
    mixed = [x, x.view(100, 64), x.bfloat16(), x.t(), x[:, 1:], x.double(), x.bfloat16(), x[:0]]
    alone = [log.add(one) for one in mixed]
    together = log.add_together(mixed)
    rows = log.take().wait().rows
    assert together[0] == together[1]
    assert len(set(together)) == 7
    assert rows[together] == pytest.approx(rows[alone], rel=1e-6)
