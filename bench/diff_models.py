"""Small transformers written out, so that a bug is a method written otherwise."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 40


class Attention(nn.Module):
    """Attention with three projections, step by step."""

    def __init__(self, width: int = 32, heads: int = 4, *, is_causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        later = torch.ones(16, 16, dtype=torch.bool).triu(1) if is_causal else None
        self.register_buffer("later", later)

    def split(self, x: Tensor) -> Tensor:
        """Give each head its part, [batch, head, place, channel]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        """Put the parts of the heads together."""
        return x.transpose(1, 2).flatten(2)

    def turn(self, x: Tensor) -> Tensor:
        """Turn queries and keys by their places; here they stay as they are."""
        return x

    def hide(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Hide the places that come later, and those of the mask."""
        if self.later is not None:
            size = scores.shape[-1]
            scores = scores.masked_fill(self.later[:size, :size], -torch.inf)
        return scores if mask is None else scores.masked_fill(mask, -torch.inf)

    def weigh(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Make the weights of the values."""
        return self.hide(q @ k.mT / math.sqrt(q.shape[-1]), mask).softmax(-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Mix the values."""
        return self.weigh(q, k, mask) @ v

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Attend to the memory, or to `x` itself."""
        memory = x if memory is None else memory
        q, k = self.turn(self.split(self.q(x))), self.turn(self.split(self.k(memory)))
        return self.out(self.merge(self.attend(q, k, self.split(self.v(memory)), mask)))


class Perceptron(nn.Module):
    """Two layers around an activation."""

    def __init__(self, width: int = 32, inner: int = 64) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Go up and down."""
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """A block of a GPT: norms first."""

    def __init__(self, width: int = 32, *, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, is_causal=True)
        self.norm2, self.mlp = nn.LayerNorm(width), Perceptron(width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the perceptron."""
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A language model whose head is its table of tokens."""

    def __init__(self, depth: int = 4, *, width: int = 32, drop: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(16, width)
        self.drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList(Block(width, drop=drop) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.3)
        self.head.weight = self.tokens.weight

    def embed(self, ids: Tensor) -> Tensor:
        """Give the vectors of tokens and places."""
        return self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))

    def forward(self, ids: Tensor) -> Tensor:
        """Give the logits of the next tokens."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RMSNorm(nn.Module):
    """A norm by the root of the mean square."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Bring each vector to one length."""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Rotary(Attention):
    """Attention in which queries and keys are turned by their place."""

    def __init__(self, width: int = 32, heads: int = 4, *, theta: float = 1e4) -> None:
        super().__init__(width, heads, is_causal=True)
        self.theta = theta
        size = width // heads
        self.register_buffer("rates", theta ** -(torch.arange(0, size, 2) / size))

    def turn(self, x: Tensor) -> Tensor:
        """Turn pairs of channels."""
        angles = torch.arange(x.shape[-2])[:, None] * self.rates
        left, right = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Router(nn.Module):
    """Chooses experts for each token, and says how much each counts."""

    def __init__(self, width: int, experts: int, chosen: int = 2) -> None:
        super().__init__()
        self.gate, self.chosen = nn.Linear(width, experts, bias=False), chosen

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Give the shares and the numbers of the experts."""
        shares, numbers = self.gate(x).softmax(-1).topk(self.chosen, -1)
        return shares / shares.sum(-1, keepdim=True), numbers


class Mixture(nn.Module):
    """Experts of which each token meets two."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.router = Router(width, experts)
        self.experts = nn.ModuleList(Perceptron(width, 48) for _ in range(experts))

    def collect(self, x: Tensor, shares: Tensor, numbers: Tensor) -> Tensor:
        """Add up what the chosen experts give."""
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (shares * (numbers == number)).sum(-1, keepdim=True)
            total = total + share * expert(x)
        return total

    def forward(self, x: Tensor) -> Tensor:
        """Route, and collect."""
        return self.collect(x, *self.router(x))


class MixtureBlock(nn.Module):
    """A block with turned attention and experts."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.attn = RMSNorm(width), Rotary(width)
        self.norm2, self.moe = RMSNorm(width), Mixture(width)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the experts."""
        x = x + self.attn(self.norm1(x))
        return x + self.moe(self.norm2(x))


class MixtureModel(nn.Module):
    """A language model of experts."""

    def __init__(self, depth: int = 3, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(MixtureBlock(width) for _ in range(depth))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Give the logits of the next tokens."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class FusedAttention(nn.Module):
    """Attention with one projection, by torch's own function."""

    def __init__(self, width: int = 32, heads: int = 4, drop: float = 0.0) -> None:
        super().__init__()
        self.heads, self.drop = heads, drop
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Give queries, keys and values by head."""
        parts = self.qkv(x).chunk(3, -1)
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Mix the values."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend to `x`, where the mask allows it."""
        return self.out(self.attend(*self.project(x), mask).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A layer of an encoder: norms last."""

    def __init__(self, width: int = 32, drop: float = 0.1) -> None:
        super().__init__()
        self.attention, self.norm1 = FusedAttention(width), nn.LayerNorm(width)
        self.ff, self.norm2 = Perceptron(width), nn.LayerNorm(width)
        self.drop1, self.drop2 = nn.Dropout(drop), nn.Dropout(drop)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Add and norm, twice."""
        x = self.norm1(x + self.drop1(self.attention(x, mask)))
        return self.norm2(x + self.drop2(self.ff(x)))


class Embeddings(nn.Module):
    """Tokens, places and segments."""

    def __init__(self, width: int = 32, drop: float = 0.1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(16, width)
        self.segments = nn.Embedding(2, width)
        self.norm, self.drop = nn.LayerNorm(width, eps=1e-12), nn.Dropout(drop)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        """Add the three."""
        places = self.places(torch.arange(ids.shape[1]))
        return self.drop(self.norm(self.words(ids) + places + self.segments(segments)))


class Encoder(nn.Module):
    """A classifier of texts, as BERT is."""

    def __init__(self, depth: int = 3, width: int = 32, drop: float = 0.1) -> None:
        super().__init__()
        self.embeddings = Embeddings(width, drop)
        self.layers = nn.ModuleList(Layer(width, drop) for _ in range(depth))
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, 5)

    def pool(self, x: Tensor) -> Tensor:
        """Give the vector of the text: that of its first token."""
        return x[:, 0]

    def make_mask(self, ids: Tensor) -> Tensor:
        """Tell which tokens are there: the number 0 is none."""
        return (ids != 0)[:, None, None, :]

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        """Give the logits of the classes."""
        mask = self.make_mask(ids)
        x = self.embeddings(ids, segments)
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(torch.tanh(self.pooler(self.pool(x))))
