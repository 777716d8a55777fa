"""Small networks of many kinds, and data to train them on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 5
VOCABULARY = 32


def points(count: int = 32, width: int = 16, *, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Draw a batch of points around one centre for each class."""
    centres = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(7)) * spread
    labels = torch.randint(0, CLASSES, (count,))
    return centres[labels] + torch.randn(count, width), labels


def images(count: int = 16, size: int = 12) -> tuple[Tensor, Tensor]:
    """Draw images with a bright column, whose place is the class."""
    labels = torch.randint(0, CLASSES, (count,))
    pictures = 0.3 * torch.randn(count, 1, size, size)
    for number, label in enumerate(labels):
        pictures[number, 0, :, 2 * int(label)] += 1.5
    return pictures, labels


def texts(count: int = 8, length: int = 16) -> Tensor:
    """Draw sentences in which each token is the one before it plus a step that the row keeps."""
    start = torch.randint(0, VOCABULARY, (count, 1))
    stride = torch.randint(1, 4, (count, 1))
    return (start + stride * torch.arange(length)) % VOCABULARY


def mlp(
    width: int = 32,
    depth: int = 3,
    *,
    inputs: int = 16,
    outputs: int = CLASSES,
    act: type = nn.ReLU,
) -> nn.Sequential:
    """Make a perceptron with `depth` weighted layers."""
    layers: list[nn.Module] = []
    for number in range(depth - 1):
        layers += [nn.Linear(inputs if number == 0 else width, width), act()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class Residual(nn.Module):
    """A block of two convolutions around which its input goes."""

    def __init__(self, width: int, *, is_zero: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        if is_zero:
            nn.init.zeros_(self.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def convnet(width: int = 8, *, blocks: int = 0, is_zero: bool = False) -> nn.Sequential:
    """Make a small convolutional classifier, with residual blocks if asked."""
    body = [Residual(width, is_zero=is_zero) for _ in range(blocks)]
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *body,
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, CLASSES),
    )


class Attention(nn.Module):
    """Self-attention, written out, with a mask of -inf."""

    def __init__(self, width: int, *, heads: int = 2, is_causal: bool = True) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mask = Mask()

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5
        if self.is_causal:
            scores = self.mask(scores)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class Mask(nn.Module):
    """A module of its own, whose output is full of -inf."""

    def forward(self, scores: Tensor) -> Tensor:
        t = scores.shape[-1]
        return scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))


class Scale(nn.Module):
    """A factor for each channel, as small as it begins in deep image transformers."""

    def __init__(self, width: int, value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, *, is_causal: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, is_causal=is_causal)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale1 = nn.Identity() if scale is None else Scale(width, scale)
        self.scale2 = nn.Identity() if scale is None else Scale(width, scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1(self.attn(self.ln1(x)))
        return x + self.scale2(self.mlp(self.ln2(x)))


class GPT(nn.Module):
    """A small language model."""

    def __init__(self, width: int = 32, blocks: int = 3, *, is_tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Compute how badly each token is foreseen from those before it."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class ViT(nn.Module):
    """An image transformer whose branches begin almost closed."""

    def __init__(self, width: int = 32, blocks: int = 4, *, scale: float = 1e-6) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, stride=4)
        self.places = nn.Parameter(0.02 * torch.randn(1, 9, width))
        self.blocks = nn.Sequential(
            *(Block(width, is_causal=False, scale=scale) for _ in range(blocks))
        )
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.ln(self.blocks(x)).mean(1))


class Recurrent(nn.Module):
    """A recurrent network of any kind, and a classifier of its last state."""

    def __init__(self, kind: type = nn.LSTM, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.rnn = kind(16, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


class VAE(nn.Module):
    """An autoencoder that draws its code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.mean, self.spread = nn.Linear(32, 4), nn.Linear(32, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))

    def loss(self, x: Tensor) -> Tensor:
        return self(x)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        mean, log_var = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
        return F.mse_loss(self.decoder(z), x, reduction="sum") / len(x) + divergence


class Experts(nn.Module):
    """Several perceptrons, of which a gate chooses one for each input."""

    def __init__(self, count: int = 4, width: int = 16, *, is_sparse: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(mlp(32, 2, inputs=width, outputs=width) for _ in range(count))
        self.head = nn.Linear(width, CLASSES)
        self.is_sparse = is_sparse

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        weights = self.gate(h).softmax(-1)
        if not self.is_sparse:
            mixed = sum(weights[:, n : n + 1] * one(h) for n, one in enumerate(self.experts))
            return self.head(h + mixed)
        best = weights.argmax(-1)
        mixed = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            mixed[chosen] = expert(h[chosen]) * weights[chosen, number, None]
        return self.head(h + mixed)


class LowRank(nn.Module):
    """A frozen linear layer with a low-rank change beside it that begins at zero."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.b(self.a(x))
