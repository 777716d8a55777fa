"""Models that are traced and recorded in the tests, and what is asked of their traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from small_models import is_clean
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from hookline.diffs.traces import Trace, TraceSite
from hookline.recordings import record


class Block(nn.Module):
    """A residual block: its own code adds twice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Small(nn.Module):
    """Two blocks between an embedding and a head that is tied to it."""

    def __init__(self, *, way: str = "plain", dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.drop = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.way = way

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.way == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.way == "reentrant")
        return self.head(self.norm(self.drop(x)))


def tokens(seed: int = 3) -> Tensor:
    """Make the same batch of tokens each time."""
    return torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(seed))


def square(output: Tensor) -> Tensor:
    """Make one number of an output."""
    return output.square().mean()


def find(trace: Trace, address: str, **wanted: Any) -> TraceSite:
    """Give the one site of an address that has these properties."""
    found = [
        site
        for site in trace.sites
        if site.address == address
        and all(getattr(site, name) == value for name, value in wanted.items())
    ]
    assert len(found) == 1, (address, wanted, found)
    return found[0]


def of_kind(trace: Trace, kind: str) -> list[str]:
    """List the addresses of a kind of sites in order."""
    return [site.address for site in trace.sites if site.kind == kind]


def snapshot(model: nn.Module) -> list[Any]:
    """Take everything of a model that a step could change."""
    state = {name: one.clone() for name, one in model.state_dict().items()}
    grads = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    versions = [one._version for one in (*model.parameters(), *model.buffers())]
    attributes = [
        {name: value for name, value in vars(module).items() if not name.startswith("_")}
        for module in model.modules()
    ]
    return [state, grads, versions, attributes, torch.get_rng_state(), is_clean(model)]


def assert_same(before: Sequence[Any], after: Sequence[Any]) -> None:
    """Compare two snapshots bit for bit."""
    for left, right in zip(before, after, strict=True):
        if isinstance(left, dict):
            assert left.keys() == right.keys()
            assert_same(list(left.values()), list(right.values()))
        elif isinstance(left, list):
            assert_same(left, right)
        elif isinstance(left, Tensor):
            assert torch.equal(left, right)
        else:
            assert left == right


Loop = Callable[[nn.Module, Optimizer], list[Tensor]]


def plain_loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Train for four steps; give the losses."""
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = square(model(tokens(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train(
    make: Callable[[], nn.Module], loop: Loop = plain_loop, folder: Path | None = None, **given: Any
) -> list[Any]:
    """Train a model, recorded where a folder is given; give all that came of it."""
    torch.manual_seed(0)
    model = make()
    optimizer = AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    if folder is None:
        losses = loop(model, optimizer)
    else:
        with record(model, folder, **given):
            losses = loop(model, optimizer)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [losses, *snapshot(model), moments]
