"""Small networks written twice: other names, other nesting, fused and split projections."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, HEADS, BATCH, TIME = 8, 2, 3, 4


class TurnedLinear(nn.Module):
    """A linear layer whose weight lies the other way round."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend in heads; take and give [batch, time, width]."""
    q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class FusedAttention(nn.Module):
    def __init__(self, linear: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.qkv = linear(WIDTH, 3 * WIDTH)
        self.proj = linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(attend(*self.qkv(x).split(WIDTH, dim=-1)))


class SplitAttention(nn.Module):
    """Calls its projections in the order that is given."""

    def __init__(self, order: str = "qkv") -> None:
        super().__init__()
        for name in order:
            self.add_module(f"{name}_lin", nn.Linear(WIDTH, WIDTH))
        self.order = order
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = {name: self.get_submodule(f"{name}_lin")(x) for name in self.order}
        return self.out(attend(made["q"], made["k"], made["v"]))


class FusedBlock(nn.Module):
    def __init__(self, linear: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = FusedAttention(linear)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            OrderedDict(fc=linear(WIDTH, 2 * WIDTH), act=nn.GELU(), proj=linear(2 * WIDTH, WIDTH))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class SplitBlock(nn.Module):
    """Has no module around its feed forward."""

    def __init__(self, order: str = "qkv") -> None:
        super().__init__()
        self.norm_a = nn.LayerNorm(WIDTH)
        self.mixer = SplitAttention(order)
        self.norm_b = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.gelu = nn.GELU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm_a(x))
        return x + self.down(self.gelu(self.up(self.norm_b(x))))


class Stack(nn.Module):
    """Some blocks under a name, and a head."""

    def __init__(self, name: str, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleList(blocks))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.get_submodule(self.name):
            x = block(x)
        return self.head(x)


def make_ports(
    *, layers: int = 3, linear: type[nn.Module] = nn.Linear, order: str = "qkv"
) -> tuple[Stack, Stack]:
    """Make one network in two ways, with the same weights."""
    torch.manual_seed(0)
    fused = Stack("blocks", [FusedBlock(linear) for _ in range(layers)])
    split = Stack("h", [SplitBlock(order) for _ in range(layers)])
    fused.requires_grad_(False)
    split.requires_grad_(False)
    for block, other in zip(fused.blocks, split.h, strict=True):
        _copy(block.attn.qkv, *(other.mixer.get_submodule(f"{name}_lin") for name in "qkv"))
        _copy(block.attn.proj, other.mixer.out)
        _copy(block.mlp.fc, other.up)
        _copy(block.mlp.proj, other.down)
    _copy(fused.head, split.head)
    return fused.requires_grad_(True), split.requires_grad_(True)


def make_input() -> Tensor:
    """Make what the networks take."""
    return torch.randn(BATCH, TIME, WIDTH, generator=torch.Generator().manual_seed(1))


def _copy(whole: nn.Module, *parts: nn.Module) -> None:
    weight = whole.weight if isinstance(whole, nn.Linear) else whole.weight.T
    for part, piece, bias in zip(
        parts, weight.chunk(len(parts)), whole.bias.chunk(len(parts)), strict=True
    ):
        part.weight.copy_(piece)
        part.bias.copy_(bias)
