"""Small modules that do what torch's own hooks trip over, and a run of each to compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence


class Calling(nn.Module):
    """Call a plain function of the arguments, with one parameter at hand."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Model(nn.Module):
    """Compute something, run the module under test as `inner`, and use what it gives."""

    def __init__(
        self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner
        self.call = call or (lambda inner, h: inner(h))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, self.first(x))


class Pair(tuple):
    """A tuple with another constructor, and an attribute."""

    def __new__(cls, items: tuple[Any, ...], tag: str = "?") -> Pair:
        pair = super().__new__(cls, items)
        pair.tag = tag
        return pair


class Named(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclasses.dataclass
class Out:
    logits: Tensor
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class FrozenOut:
    logits: Tensor


class Gru(nn.Module):
    """Hand a packed sequence in and out of a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return self.gru(packed)[0]


def _double_in_place(_: nn.Module, h: Tensor) -> Tensor:
    return h.mul_(2)


def _write_slice(_: nn.Module, h: Tensor) -> Tensor:
    h[:, :2] *= 3
    return h


def _keep_and_return(self: nn.Module, h: Tensor) -> Tensor:
    self.kept = h * 2
    return self.kept


def _write_part_of_view(_: nn.Module, h: Tensor) -> Tensor:
    view = h.view(-1)
    view[1:3].add_(1)
    return h * 2


def _use_output_in_place(inner: nn.Module, h: Tensor) -> Tensor:
    y = inner(h)
    y += 1
    return y * y


def _use_slice_in_place(inner: nn.Module, h: Tensor) -> Tensor:
    y = inner(h)
    y[:, 1:3] *= 2
    y[0].add_(1)
    return y * y


def _use_input_again(inner: nn.Module, h: Tensor) -> Tensor:
    return inner(h) + h * 3


def _pass_view_use_base(inner: nn.Module, h: Tensor) -> Tensor:
    y = inner(h[:2])
    return (h * h).sum() + y.sum()


def _pass_base_use_view(inner: nn.Module, h: Tensor) -> Tensor:
    view = h[1:]
    y = inner(h)
    return (view * view).sum() + y.sum()


def _sum_tree(tree: Any) -> Tensor:
    if isinstance(tree, Tensor):
        return (tree * tree).sum() if tree.is_floating_point() else tree.sum() * 0.0
    items = tree.values() if isinstance(tree, dict) else tree
    return sum((_sum_tree(item) for item in items), torch.zeros(()))


def _sum_leaves(inner: nn.Module, h: Tensor) -> Tensor:
    return _sum_tree(inner(h))


def _pack(inner: nn.Module, h: Tensor) -> Tensor:
    return inner(pack_sequence([h, h[:2]])).data


def _calling(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Calling(function)


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor] | None]

CASES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(4, 4), None),
    "output changed in place": (lambda: nn.Linear(4, 4), _use_output_in_place),
    "slice of output changed in place": (lambda: nn.Linear(4, 4), _use_slice_in_place),
    "in-place module": (lambda: nn.ReLU(inplace=True), None),
    "in-place module, input used again": (_calling(_double_in_place), _use_input_again),
    "slice of input written": (_calling(_write_slice), _use_input_again),
    "part of a view of the input written": (_calling(_write_part_of_view), _use_input_again),
    "view of a base passed and written": (_calling(_double_in_place), _pass_view_use_base),
    "base passed and written, view used": (_calling(_double_in_place), _pass_base_use_view),
    "returns its input": (nn.Identity, _use_input_again),
    "returns its input, changed later": (nn.Identity, lambda inner, h: inner(h).mul_(2)),
    "returns a view": (_calling(lambda m, h: h.view(2, -1)), None),
    "returns a view, changed later": (
        _calling(lambda m, h: (h * m.weight).view(2, -1)),
        lambda inner, h: inner(h).relu_() * 2,
    ),
    "returns a transposed tensor": (_calling(lambda m, h: (h * m.weight).t()), None),
    "returns an expanded tensor": (
        _calling(lambda m, h: (h.sum() * m.weight).expand(3, 4)),
        None,
    ),
    "returns its parameter": (_calling(lambda m, h: m.weight), lambda i, h: h * i(h)),
    "returns a tensor twice": (
        _calling(lambda m, h: (lambda y: (y, y))(h * m.weight)),
        lambda inner, h: (lambda a, b: a * 2 + b * 3)(*inner(h)),
    ),
    "returns a tensor and a view of it": (
        _calling(lambda m, h: (lambda y: (y, y[0]))(h * m.weight)),
        lambda inner, h: (lambda a, b: a * b)(*inner(h)),
    ),
    "keeps what it returns": (
        _calling(_keep_and_return),
        lambda inner, h: inner(h).add_(1) + inner.kept * 2,
    ),
    "unbinds": (_calling(lambda m, h: (h * m.weight).unbind(0)), _sum_leaves),
    "chunks, one changed later": (
        _calling(lambda m, h: [t.clone() for t in (h * m.weight).chunk(2)]),
        lambda inner, h: (lambda a, b: a.mul_(2).sum() + (b * b).sum())(*inner(h)),
    ),
    "list": (_calling(lambda m, h: [h * 2, h * m.weight]), _sum_leaves),
    "dict with integers": (
        _calling(lambda m, h: {"y": h * m.weight, "index": h.argmax(-1)}),
        _sum_leaves,
    ),
    "nested": (_calling(lambda m, h: (h * 2, {"a": [h * m.weight, None, 3]})[:1]), _sum_leaves),
    "named tuple": (_calling(lambda m, h: Named(h * 2, h * m.weight)), _sum_leaves),
    "tuple subclass": (_calling(lambda m, h: Pair((h * 2, h * m.weight), "T")), _sum_leaves),
    "torch.return_types": (_calling(lambda m, h: (h * m.weight).max(-1)), _sum_leaves),
    "dataclass": (
        _calling(lambda m, h: Out(h * m.weight)),
        lambda inner, h: inner(h).logits * 2,
    ),
    "frozen dataclass": (
        _calling(lambda m, h: FrozenOut(h * m.weight)),
        lambda inner, h: inner(h).logits * 2,
    ),
    "packed sequence": (Gru, _pack),
    "keyword arguments": (_calling(lambda m, h, *, by: h * by), lambda i, h: i(h, by=h.exp())),
    "one tensor as two arguments": (_calling(lambda m, a, b: a * b), lambda i, h: i(h, b=h)),
    "list argument": (_calling(lambda m, hs: hs[0] * hs[1]), lambda i, h: i([h, h.exp()])),
    "complex": (
        _calling(lambda m, h: torch.fft.rfft(h * m.weight)),
        lambda inner, h: inner(h).abs(),
    ),
    "called twice": (lambda: nn.Linear(4, 4), lambda inner, h: inner(inner(h).relu())),
    "one output unused": (
        _calling(lambda m, h: (h * 2, h * m.weight)),
        lambda inner, h: inner(h)[1],
    ),
    "input unused": (_calling(lambda m, h: m.weight * 2), lambda inner, h: inner(h) + h),
    "loss through an attribute": (
        _calling(_keep_and_return),
        lambda inner, h: (inner(h), inner.kept)[1] * 2,
    ),
}


def make(name: str) -> tuple[Model, Tensor]:
    """Make the model of a case and an input for it, always with the same numbers."""
    torch.manual_seed(0)
    inner, call = CASES[name]
    return Model(inner(), call), torch.randn(4, 4, requires_grad=True)


def results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Run forward and backward; give the output and every gradient."""
    y = model(x)
    (y * y).sum().backward()
    found = {"output": y.detach(), "x.grad": x.grad}
    found.update((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return found
