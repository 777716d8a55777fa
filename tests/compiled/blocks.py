"""A small model of blocks, the ways to compile it, and what its values are without a compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import hookline as hl

SITES = ("", ".norm", ".wide", ".act", ".narrow")
"""The modules of a block, after its own path."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(self.act(self.wide(self.norm(x))))
        return out


class Stack(nn.Module):
    """Blocks one after the other, each in a checkpoint if asked for."""

    def __init__(self, depth: int, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(depth))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def _wrap(model: Stack, counter: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=counter, fullgraph=True)


def _in_place(model: Stack, counter: Any) -> Callable[..., Any]:
    model.compile(backend=counter, fullgraph=True)
    return model


def _function(model: Stack, counter: Any) -> Callable[..., Any]:
    return torch.compile(lambda x: model(x) * 1, backend=counter, fullgraph=True)


def _each_in_place(model: Stack, counter: Any) -> Callable[..., Any]:
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    return model


def _each_wrapped(model: Stack, counter: Any) -> Callable[..., Any]:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=counter, fullgraph=True)
    return model


WAYS: dict[str, Callable[[Stack, Any], Callable[..., Any]]] = {
    "torch.compile(model)": _wrap,
    "model.compile()": _in_place,
    "a function": _function,
    "each block in place": _each_in_place,
    "each block wrapped": _each_wrapped,
}
"""How a model is compiled: each gives what is called."""


def count(backend: str) -> CompileCounterWithBackend:
    """Make a backend that counts how often something is compiled."""
    return CompileCounterWithBackend(backend)


def run_eagerly(model: Stack, *inputs: Tensor) -> hl.Captured:
    """Give what a copy of a model computes without a compiler, and the gradients."""
    twin = copy.deepcopy(model)
    with hl.capture(twin, "blocks.**", grads=True) as got:
        sum(twin(x).square().sum() for x in inputs).backward()  # type: ignore[union-attr]
    return got


def assert_same(got: hl.Captured, expected: hl.Captured, depth: int) -> None:
    """Require the values and gradients of every module, call by call."""
    assert len(got.calls) == len(expected.calls)
    for mine, theirs in zip(got.calls, expected.calls, strict=True):
        for number in range(depth):
            for name in SITES:
                path = f"blocks.{number}{name}"
                torch.testing.assert_close(mine[path].output, theirs[path].output)
                grad = mine[path].output.grad
                assert grad is not None, path
                torch.testing.assert_close(grad, theirs[path].output.grad)
