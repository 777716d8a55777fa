"""Models that tests of extractions send samples through; importable by processes they start."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Layers(nn.Module):
    """Three layers; the forward counts which samples it was given, by their first number."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(width, 8)
        self.second = nn.Linear(8, 3)
        self.head = nn.Linear(3, 2)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=generator))
        self.seen: Counter[int] = Counter()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """Give the head's output."""
        self.seen.update(int(one) for one in x[:, 0])
        self.sizes.append(len(x))
        out: Tensor = self.head(self.second(self.first(x).tanh()).tanh())
        return out


def numbered(count: int, width: int = 4) -> Tensor:
    """Make samples whose first number is their position."""
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(count, width, generator=generator)
    samples[:, 0] = torch.arange(count)
    return samples


class Block(nn.Module):
    """Attention and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.after = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)
        )

    def forward(self, hidden: Tensor, is_padding: Tensor) -> Tensor:
        """Attend to all tokens but padding."""
        same = self.norm(hidden)
        found, _ = self.attention(same, same, same, key_padding_mask=is_padding, need_weights=False)
        hidden = hidden + found
        out: Tensor = hidden + self.after(hidden)
        return out


class Reader(nn.Module):
    """A small transformer, which attends to what the mask lets it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embed = nn.Embedding(50, width)
            self.block = Block(width)
            self.out = nn.Linear(width, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Read tokens."""
        hidden = self.embed(input_ids)
        hidden = self.block(hidden, attention_mask == 0)
        out: Tensor = self.out(hidden)
        return out


def texts(count: int) -> list[dict[str, list[int]]]:
    """Make samples of 1 to 17 tokens."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 18, (count,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(1, 50, (one,), generator=generator).tolist()} for one in lengths
    ]


class Falling(nn.Module):
    """A model whose process is killed at a sample, unless a file says that it was before."""

    def __init__(self, model: nn.Module, at: int, mark: Path, *, pause: float = 0.0) -> None:
        super().__init__()
        self.model, self.at, self.mark, self.pause = model, at, str(mark), pause

    def forward(self, x: Tensor) -> Any:
        """Fall, or run the model."""
        if self.at in x[:, 0].int().tolist() and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.pause)
        return self.model(x)


class Stopping(nn.Module):
    """A model that raises at some samples, until a file says that it is mended."""

    def __init__(self, bad: list[int], mended: Path) -> None:
        super().__init__()
        self.inner, self.bad, self.mended = Layers(), bad, str(mended)

    def forward(self, x: Tensor) -> Any:
        """Raise, or run the model."""
        if set(self.bad).intersection(x[:, 0].int().tolist()) and not Path(self.mended).exists():
            raise ValueError("no such word")
        return self.inner(x)
