"""The modules that random models are made of; each takes and gives a (2, 4, 4) tensor.

All classes stand at the top of this file, so that models made of them can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SIZE = 4


@dataclass
class Pair:
    first: Tensor
    second: Tensor | None
    label: str = "pair"


class Couple(NamedTuple):
    left: Tensor
    right: Tensor


# Ways to pack two tensors; the tests have their own way to look into these.
PACKINGS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda a, b: (a, b),
    lambda a, b: [a, b],
    lambda a, b: {"a": a, "b": b, "note": "plain"},
    lambda a, b: Pair(a, b),
    lambda a, b: Couple(a, b),
    lambda a, b: {"outer": [(a, None), {"inner": Couple(b, a)}], "count": 2},
    lambda a, b: (a, a),
    lambda a, b: [Pair(a, None), (), {}, b],
]


def unpack(tree: Any) -> list[Tensor]:
    """List the distinct tensors of a packing, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Pair):
        tree = [tree.first, tree.second]
    elif isinstance(tree, dict):
        tree = list(tree.values())
    found: dict[int, Tensor] = {}
    for item in tree if isinstance(tree, (list, tuple)) else ():
        found.update({id(tensor): tensor for tensor in unpack(item)})
    return list(found.values())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor, /, *, shift: Tensor | None = None) -> Tensor:
        y = x * self.weight
        return y if shift is None else y + shift


class Weights(nn.Module):
    """Return an own parameter, which is a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


class UseWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = Weights()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weights(x)
        return x * weight + weight.tanh()


class AddInplace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        x += self.bias
        return x


class MulInplace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.3)


class SliceInplace(nn.Module):
    """Change part of the input through a view."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, :2].mul_(0.7)
        return x


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class View(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, SIZE).view(-1, SIZE, SIZE)


class Slice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :]


class Splitter(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(2, dim=-1)


class Chunk(nn.Module):
    """Change the halves that a module returned as two views of one tensor."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.split = Splitter()
        self.tanh = nn.ReLU(inplace=True) if inplace else nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.split(x)
        return torch.cat([self.tanh(right), left], dim=-1)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, inplace: bool) -> None:
        super().__init__()
        self.inner = inner
        self.inplace_sum = inplace

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.inplace_sum:
            y += x
            return y
        return x + y


class Shared(nn.Module):
    """Call one module several times."""

    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__()
        self.inner = inner
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.inner(x) * 0.5
        return x


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.inner = inner
        self.last = nn.Linear(SIZE, SIZE)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class Producer(nn.Module):
    def __init__(self, inner: nn.Module, packing: int) -> None:
        super().__init__()
        self.inner = inner
        self.packing = packing

    def forward(self, x: Tensor) -> Any:
        return PACKINGS[self.packing](self.inner(x), x.sin())


class Consumer(nn.Module):
    """Take a container by position and another one by name, and leave an argument out."""

    def forward(self, packed: Any, *rest: Any, other: Any, mask: Tensor | None = None) -> Tensor:
        first, *others = unpack(packed)
        total = first * 1.1
        for tensor in (*others, *unpack(other), *unpack(rest)):
            total = total + tensor.cos()
        return total if mask is None else total * mask


class Containers(nn.Module):
    def __init__(self, inner: nn.Module, packing: int) -> None:
        super().__init__()
        self.make = Producer(inner, packing)
        self.use = Consumer()

    def forward(self, x: Tensor) -> Tensor:
        packed = self.make(x)
        first = unpack(packed)[0]
        result: Tensor = self.use(packed, x, None, other=[first], mask=None)
        if isinstance(packed, list):
            packed.clear()  # what a module returned is not what it stays
        return result


class Named(nn.Module):
    """Pass tensors by keyword, and None for an optional one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.scale = Scale()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.scale(x, shift=None), shift=self.inner(x))


class Cut(nn.Module):
    """Run a part whose gradient is cut before it, after it, or by a block without grad."""

    def __init__(self, inner: nn.Module, where: int) -> None:
        super().__init__()
        self.inner = inner
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == 0:
            return x + self.inner(x.detach().clone())
        if self.where == 1:
            return x + self.inner(x.clone()).detach()
        with torch.no_grad():
            y = self.inner(x.clone())
        return x * y


class Checkpoint(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on and x.requires_grad and torch.is_grad_enabled():
            return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return self.inner(x)


class Aside(nn.Module):
    """Leave a tensor on itself besides what it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.side: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.side = y.cos()
        return y * 0.9


class UseAside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.aside = Aside(inner)

    def forward(self, x: Tensor) -> Tensor:
        y = self.aside(x)
        side, self.aside.side = self.aside.side, None
        return y + side


class Partly(nn.Module):
    """Use one of two results, and never call one of the parts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.make = Producer(inner, 0)
        self.unused = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.make(x)[1]
