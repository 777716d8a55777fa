"""Train a small GPT compiled by inductor, plain and watched, and tell where their bits part.

Run by itself as `python compared_bits.py DEVICE DTYPE MODE STEPS`, since some of what makes a GPU
deterministic is read when CUDA starts; prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl

WIDTH, HEADS, LENGTH, BATCH, WORDS = 64, 4, 32, 4, 100


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS)
        mixed = F.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class GatedBlock(nn.Module):
    """A block with a gate: its values are read once, twice and by products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm_2, self.up = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.gate, self.act = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(approximate="none")
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        y = self.norm_2(x)
        out: Tensor = x + self.down(self.act(self.gate(y)) * self.up(y))
        return out


class SmallGPT(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Outcome:
    """What a training gave: its losses, the first gradients, the last parameters, the watch."""

    def __init__(self, *, device: str, dtype: str, mode: str, steps: int, is_watched: bool) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = SmallGPT().to(device)
        if dtype == "bfloat16":
            model.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = torch.randint(0, WORDS, (8, BATCH, LENGTH + 1)).to(device)
        if mode != "eager":
            model.compile(fullgraph=True, mode=None if mode == "default" else mode)
        autocast = torch.autocast(device, torch.bfloat16, enabled=dtype == "autocast")
        self.watch = hl.watch(model, keep=max(100, steps)) if is_watched else None
        self.losses: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}
        with self.watch or contextlib.nullcontext():
            for number in range(steps):
                batch = batches[number % len(batches)]
                optimizer.zero_grad()
                with autocast:
                    logits = model(batch[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
                loss.backward()
                if not number:
                    named = model.named_parameters()
                    self.gradients = {
                        name: one.grad.clone() for name, one in named if one.grad is not None
                    }
                optimizer.step()
                self.losses.append(loss.detach())
        self.parameters = {name: one.detach() for name, one in model.named_parameters()}


def compare_outcomes(one: Outcome, other: Outcome) -> dict[str, Any]:
    """Tell where two trainings part: the first loss, and the names of the others."""
    losses = zip(one.losses, other.losses, strict=True)
    differing = [number for number, (a, b) in enumerate(losses) if not torch.equal(a, b)]
    found: dict[str, Any] = {"loss": differing[0] if differing else None}
    for kind in ("gradients", "parameters"):
        mine, theirs = getattr(one, kind), getattr(other, kind)
        found[kind] = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    return found


SAME = {"loss": None, "gradients": [], "parameters": []}
"""What is told of two trainings that are the same to the last bit."""


def main(device: str, dtype: str, mode: str, steps: int) -> None:
    """Compare a plain training with another one, and with a watched one."""
    torch.use_deterministic_algorithms(True)
    options: Any = {"device": device, "dtype": dtype, "mode": mode, "steps": steps}
    plain, again, watched = (
        Outcome(**options, is_watched=is_watched) for is_watched in (False, False, True)
    )
    assert watched.watch is not None
    told = {
        "control": compare_outcomes(plain, again),
        "watched": compare_outcomes(plain, watched),
        "measured": len(watched.watch.history.steps),
        "notes": [str(note) for note in watched.watch.notes],
        "first": plain.losses[0].item(),
        "last": plain.losses[-1].item(),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
