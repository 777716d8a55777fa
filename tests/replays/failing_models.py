"""Models that make something non-finite, each in another way, and what runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookline.replays import KeptCall, Origin, find_origin, keep_call


class Applied(nn.Module):
    """A layer, and a function of what it gives."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


class Attention(nn.Module):
    """One head of attention, with a mask of -inf."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        scores = self.query(x) @ x.transpose(-1, -2)
        scores = scores.masked_fill(mask, float("-inf"))
        return F.softmax(scores, dim=-1) @ x


class Blocks(nn.Module):
    """Attention in blocks, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": Attention()}) for _ in range(3)])
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, masks: list[Tensor]) -> Tensor:
        for block, mask in zip(self.blocks, masks, strict=True):
            x = x + self.drop(block["attn"](x, mask=mask))
        return self.head(self.norm(x.flatten(0, 1)))


class Counting(nn.Module):
    """Fails at its third call alone; the count and the scale are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.calls = 0
        self.history: list[float] = []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.history.append(float(self.calls))
        h = self.fc(x)
        if self.calls == 3:
            h = h / (h - h)
        return h.sum()


class Drawn(nn.Module):
    """Divides by what dropout left, so that it depends on the random state where it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 64)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.drop(torch.ones(1))
        return self.fc(x) / kept


def run_once(
    model: nn.Module, *args: Any, backward: bool = False, prefix: str = "", **kwargs: Any
) -> tuple[KeptCall, Any]:
    """Keep a call and make it; with its backward, the gradients of its outputs are ones."""
    call = keep_call(model, args, kwargs, prefix=prefix)
    output = model(*args, **kwargs)
    if backward:
        output.backward(torch.ones_like(output))
        call.note_gradients({(): torch.ones_like(output)})
    return call, output


def origin_of(
    model: nn.Module, *args: Any, backward: bool = False, prefix: str = "", **kwargs: Any
) -> Origin | None:
    """Run a model once and find where something non-finite came from."""
    call, _ = run_once(model, *args, backward=backward, prefix=prefix, **kwargs)
    return find_origin([call], backward=backward)


def line_of(marker: str, file: str) -> int:
    """Give the number of the line of a file that holds a text, which it must hold once."""
    from pathlib import Path

    lines = Path(file).read_text(encoding="utf-8").splitlines()
    found = [number for number, line in enumerate(lines, 1) if marker in line]
    assert len(found) == 1, f"{marker!r} stands in {len(found)} lines"
    return found[0]
