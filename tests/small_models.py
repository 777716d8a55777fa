"""Models small enough to work out by hand, shared by the tests of hooks, captures and edits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Weighing(nn.Module):
    """Weigh by what it computes, under a name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.inner(x).softmax(-1)
        return scores * x.sum()


class Net(nn.Module):
    """Two linear layers with a tanh between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 4)
        self.act = nn.Tanh()
        self.fc2 = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Twice(nn.Module):
    """One layer that runs twice in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x).tanh())


class Mixer(nn.Module):
    """Several inputs, by position and by keyword, through several operations."""

    def forward(self, x: Tensor, y: Tensor, *, scale: Any = None, extra: Any = None) -> Tensor:
        out = (x * 2).tanh() + y.exp()
        if scale is not None:
            out = out * scale
        if extra is not None:
            out = out + extra["a"] * extra["b"][0]
        return out


class Wrapped(nn.Module):
    """A root that hands everything to one inner module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Branches(nn.Module):
    """Return a nested value: a dict of a tensor, a tuple and plain values."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": x + 1, "b": (x * 2, [x * 3]), "n": 7, "none": None}


class Lazy(nn.Module):
    """A forward that is a generator."""

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield x * 2


class WithLazy(nn.Module):
    """A model with a generator module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = Lazy()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(next(self.lazy(x)))


def is_clean(model: nn.Module) -> bool:
    """Tell whether no hook, no replaced forward and no changed class is left on a model."""
    return not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._forward_hooks_with_kwargs
        or module._forward_pre_hooks_with_kwargs
        or module._forward_hooks_always_called
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or any(p._post_accumulate_grad_hooks or p._backward_hooks for p in module.parameters())
        for module in model.modules()
    )


def same(left: Tensor, right: Tensor) -> bool:
    """Tell whether two tensors are equal to the last bit."""
    return left.dtype == right.dtype and torch.equal(left, right)
