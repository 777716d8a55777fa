"""A GPT small enough for tests, and functions that plant one bug each into a copy of it."""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, WORDS, LENGTH = 32, 4, 50, 12


class Attention(nn.Module):
    """Causal attention by plain operations."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
        scores = q @ k.transpose(-2, -1)
        scaled = scores * (1 / math.sqrt(WIDTH // HEADS))
        masked = scaled.masked_fill(~self.mask[:length, :length], -torch.inf)
        weights = masked.softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.proj(mixed)


class Mlp(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.act(self.fc1(x))))


class Block(nn.Module):
    """Attention and MLP, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln2 = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    """Embeddings, blocks, a norm and a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.wte(words) + self.wpe.weight[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_gpt(*, training: bool = False) -> Gpt:
    """Make the model; with the seed of the test, always the same one."""
    torch.manual_seed(0)
    return Gpt().train(training)


def make_words() -> Tensor:
    """Make a batch."""
    return torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_of(out: Tensor) -> Tensor:
    """Make a loss of the model's output."""
    return F.cross_entropy(
        out.reshape(-1, WORDS), torch.arange(out[..., 0].numel(), device=out.device) % WORDS
    )


def exchange_forward(module: nn.Module, forward: Any) -> None:
    """Give one module another forward."""
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def tanh_gelu(model: Gpt) -> None:
    model.blocks[1].mlp.act.approximate = "tanh"


def epsilon(model: Gpt) -> None:
    model.blocks[1].ln2.eps = 1e-6


def missing_residual(model: Gpt) -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return self.mlp(self.ln2(x))

    exchange_forward(model.blocks[1], forward)


def wrong_scale(model: Gpt) -> None:
    def forward(self: Attention, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
        scores = q @ k.transpose(-2, -1)
        scaled = scores * (1 / math.sqrt(WIDTH))
        masked = scaled.masked_fill(~self.mask[:length, :length], -torch.inf)
        weights = masked.softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.proj(mixed)

    exchange_forward(model.blocks[1].attn, forward)


def softmax_dim(model: Gpt) -> None:
    def forward(self: Attention, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
        scores = q @ k.transpose(-2, -1)
        scaled = scores * (1 / math.sqrt(WIDTH // HEADS))
        masked = scaled.masked_fill(~self.mask[:length, :length], -torch.inf)
        weights = masked.softmax(-2)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.proj(mixed)

    exchange_forward(model.blocks[1].attn, forward)


def extra_factor(model: Gpt) -> None:
    def forward(self: Mlp, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.act(self.fc1(x)) * 1.01))

    exchange_forward(model.blocks[1].mlp, forward)


def detached(model: Gpt) -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x).detach())
        return x + self.mlp(self.ln2(x))

    exchange_forward(model.blocks[1], forward)


class WrongRelu(torch.autograd.Function):
    """GELU forward, another slope backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x > 0)


def wrong_backward(model: Gpt) -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return WrongRelu.apply(x)

    exchange_forward(model.blocks[1].mlp.act, forward)


def dropout_on(model: Gpt) -> None:
    model.blocks[1].mlp.drop.train()


def missing_bias(model: Gpt) -> None:
    with torch.no_grad():
        model.blocks[1].mlp.fc2.bias.zero_()
