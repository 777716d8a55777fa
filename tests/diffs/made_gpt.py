"""A small GPT to plant differences in, and a way to compare two of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from made_traces import follow
from torch import Tensor, nn

from hookline.diffs.comparing import compare
from hookline.diffs.difference import Difference

WIDTH, WORDS, HEADS = 16, 20, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = (WIDTH // HEADS) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        mixed = (q @ k.transpose(-1, -2) * self.scale).softmax(dim=-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_gpt() -> Gpt:
    """Make the same model every time."""
    torch.manual_seed(0)
    return Gpt()


def make_ids() -> Tensor:
    """Make the same words every time."""
    return torch.randint(0, WORDS, (2, 6), generator=torch.Generator().manual_seed(1))


def square(out: Tensor) -> Tensor:
    """A loss."""
    return out.float().square().mean()


def compare_planted(
    plant: Callable[[Gpt], Any],
    *,
    tensors: bool = True,
    loss: Callable[[Tensor], Tensor] | None = square,
    **options: Any,
) -> Difference:
    """Compare the model with a copy that something was done to."""
    model = make_gpt()
    other = copy.deepcopy(model)
    plant(other)
    ids = make_ids()
    a = follow(model, ids, loss=loss, lr=0.1, keeps_tensors=tensors)
    b = follow(other, ids, loss=loss, lr=0.1, keeps_tensors=tensors)
    return compare(a, b, **options)


def wrap(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module another forward, called with the old one and its arguments."""
    old = module.forward
    module.forward = lambda *args: forward(old, *args)  # type: ignore[method-assign]
