"""Train a small GPT on text made on the spot: a plain script that knows nothing of hookline.

    hookline run train_gpt.py --steps 100

Somewhere in the text is a line that this model cannot digest. Until the training comes to it, all
is well.
"""

from __future__ import annotations

import argparse
import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH, WIDTH, HEADS, BLOCKS, BATCH = 48, 64, 4, 4, 16
LETTERS = "abcdefghijklmnopqrstuvwxyz ."
PAD, VOCABULARY = len(LETTERS), len(LETTERS) + 1


class Attention(nn.Module):
    """Let each letter look at those before it that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, is_hidden: Tensor) -> Tensor:
        """Mix the letters of each line."""
        lines, length, _ = x.shape
        split = self.query_key_value(x).view(lines, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(dim=-1)
        return self.out((weights @ value).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Add attention, then an MLP, to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, is_hidden: Tensor) -> Tensor:
        """Go through both."""
        x = x + self.attn(self.attn_norm(x), is_hidden)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Guess each letter from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, lines: Tensor) -> Tensor:
        """Give the score of every letter at every place."""
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        is_hidden = later | (lines == PAD)[:, None, None, :]
        x = self.letters(lines) + self.places.weight
        for block in self.blocks:
            x = block(x, is_hidden)
        return self.head(self.norm(x))


def make_lines(count: int) -> list[str]:
    """Make up sentences; one line stays empty, as happens in text from the real world."""
    who = ["the cat", "a dog", "my aunt", "the old sailor", "nobody", "every student"]
    does = ["sees", "likes", "follows", "paints", "remembers", "never meets"]
    what = ["the sea", "a red boat", "two birds", "the moon", "a long letter", "the first snow"]
    lines = [
        f"{random.choice(who)} {random.choice(does)} {random.choice(what)}." for _ in range(count)
    ]
    lines[count * 5 // 8] = ""
    return lines


def to_batch(lines: list[str]) -> Tensor:
    """Number the letters and fill the lines up to one length."""
    numbers = [[LETTERS.index(letter) for letter in line[: LENGTH + 1]] for line in lines]
    return torch.tensor([one + [PAD] * (LENGTH + 1 - len(one)) for one in numbers])


def main() -> None:
    """Train, and say how the loss goes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="how many batches to train on")
    parser.add_argument("--lr", type=float, default=1e-3, help="the learning rate")
    given = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    lines = make_lines(given.steps * BATCH)
    for step in range(given.steps):
        batch = to_batch(lines[step * BATCH : (step + 1) * BATCH])
        scores = model(batch[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == given.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
