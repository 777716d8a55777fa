"""The models that are measured: small, so that what hooks cost is not lost in the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = 12
WIDTH = 64
HEADS = 4
LENGTH = 16
VOCABULARY = 128


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTC: Tensor) -> Tensor:
        batch, length, width = x_BTC.shape
        heads = self.qkv(x_BTC).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (width // HEADS) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        return self.proj(mixed)


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Twelve blocks of width 64: 114 modules."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


def make_gpt() -> tuple[GPT, Tensor]:
    """Make the model and one sequence of tokens, the same each time."""
    torch.manual_seed(0)
    return GPT(), torch.randint(0, VOCABULARY, (1, LENGTH))


def make_chain() -> tuple[nn.Sequential, Tensor]:
    """Make a chain of 24 small modules and an input that requires grad."""
    torch.manual_seed(0)
    pairs = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*pairs), torch.randn(4, 16, requires_grad=True)


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model that is trained is, and what it is trained on."""

    blocks: int
    width: int
    heads: int
    vocabulary: int

    length: int
    """Tokens in a sequence."""

    batch: int
    """Sequences in a step."""


class FusedAttention(nn.Module):
    """Causal self-attention in one call of torch."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        batch, length, width = x_BTC.shape
        heads = self.qkv(x_BTC).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """Two linear layers, with the GELU between them a module too."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.fc = nn.Linear(size.width, 4 * size.width)
        self.act = nn.GELU()
        self.proj = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.act(self.fc(x)))


class TrainedBlock(nn.Module):
    """A pre-norm transformer block: ten modules, itself counted."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = FusedAttention(size)
        self.ln_2 = nn.LayerNorm(size.width)
        self.mlp = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class TrainedGPT(nn.Module):
    """A GPT of any size, as it is trained: with 12 blocks, 126 modules and 149 parameters."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocabulary, size.width)
        self.wpe = nn.Embedding(size.length, size.width)
        self.h = nn.ModuleList(TrainedBlock(size) for _ in range(size.blocks))
        self.ln_f = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))
