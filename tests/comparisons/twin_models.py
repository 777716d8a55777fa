"""Two models compared in both ways, for tests that make their own."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hookline as hl


def square(output: Any) -> Tensor:
    """Make a loss of an output, each element with another weight."""
    return (output * torch.linspace(0.5, 1.5, output.numel()).view(output.shape)).pow(2).sum()


def patch(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give one module another forward."""
    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def record_both(a: nn.Module, b: nn.Module, inputs: Any, folder: Path) -> hl.Difference:
    """Compare two models by recordings without floors."""
    for name, model in (("a", a), ("b", b)):
        hl.record(model, folder / name, inputs, loss=square, calibrate=False)
    return hl.diff(folder / "a", folder / "b")


def pair_blocks(a: nn.Module, b: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Put one block each between two layers of the same weights."""
    b.load_state_dict(a.state_dict())
    layers = nn.Linear(6, 6), nn.Linear(6, 3)
    make = (copy.deepcopy(one) for one in layers * 2)
    return nn.Sequential(next(make), a, next(make)), nn.Sequential(next(make), b, next(make))
