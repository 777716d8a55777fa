"""Twins written by hand: each case says itself what its variables are, as it runs.

A case is a module class with a `forward` as people write them and a `twin` that computes the same
and calls `note(name, value)` where a variable is assigned. The notebook keeps what it is told,
with gradients by tensor hooks of torch itself, and doubles a value where a test asks for it. So a
twin is the oracle for values, counts, gradients and edits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Kind = TypeVar("Kind", bound=type[nn.Module])


class Base(nn.Module):
    """One linear layer, and a loss that reaches every output."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)


@dataclass
class Case:
    """A module class and the variables that its twin notes."""

    kind: type[nn.Module]
    names: tuple[str, ...]


CASES: dict[str, Case] = {}


def case(*names: str) -> Callable[[Kind], Kind]:
    """Add a class to the cases, with the variables to look at."""

    def add(kind: Kind) -> Kind:
        assert kind.__name__ not in CASES, f"two cases are called {kind.__name__}"
        CASES[kind.__name__] = Case(kind, names)
        return kind

    return add


def double(value: Any) -> Any:
    """Change a value: what an edit does in the tests."""
    if isinstance(value, (list, tuple)):
        return type(value)([double(one) for one in value])
    if isinstance(value, dict):
        return {name: double(one) for name, one in value.items()}
    return value * 2


@dataclass
class Noted:
    """A value as a twin noted it; the gradient comes with backward."""

    value: Any
    grad: Tensor | None = None

    def take_gradient(self, grad: Tensor | None) -> None:
        """Serve as a tensor hook; None comes for one of several results that was not used."""
        self.grad = None if grad is None else grad.clone()


@dataclass
class Notebook:
    """What a twin notes, by name, and which of it is doubled."""

    edited: str | None = None
    index: int | None = None
    noted: dict[str, list[Noted]] = field(default_factory=dict)

    def take(self, name: str, value: Any) -> Any:
        seen = self.noted.setdefault(name, [])
        if name == self.edited and self.index in (None, len(seen)):
            value = double(value)
        note = Noted(_copy(value))
        seen.append(note)
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            if value.is_leaf:
                value = value.view_as(value)  # the gradient of this name, not of the caller's
            value.register_hook(note.take_gradient)
        return value


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return type(value)([_copy(one) for one in value])
    if isinstance(value, dict):
        return {name: _copy(one) for name, one in value.items()}
    return value


_open: list[Notebook] = []


def note(name: str, value: Any) -> Any:
    """Tell the open notebook of a value; give the one that is assigned."""
    return _open[-1].take(name, value) if _open else value


@contextmanager
def noting(edited: str | None = None, index: int | None = None) -> Iterator[Notebook]:
    """Open a notebook that twins write to; double one of the values."""
    _open.append(Notebook(edited, index))
    try:
        yield _open[-1]
    finally:
        _open.pop()


def make(kind: type[nn.Module]) -> nn.Module:
    """Make a module with the same weights each time."""
    torch.manual_seed(3)
    return kind()


def make_input() -> Tensor:
    """Give the same input each time, one that has a gradient."""
    return torch.linspace(-1.0, 1.5, 12).reshape(3, 4).requires_grad_()


def leaves(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from leaves(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one)


def run(module: nn.Module, call: Callable[[Tensor], Any]) -> list[Tensor | None]:
    """Run a call forward and backward; give outputs, the input's and all parameters' gradients."""
    module.zero_grad()
    x = make_input()
    outputs = list(leaves(call(x)))
    assert outputs
    loss = sum((one.float().square().sum() for one in outputs), torch.zeros(()))
    if loss.requires_grad:
        loss.backward()
    grads = [x.grad, *(one.grad for one in module.parameters())]
    return [one if one is None else one.detach().clone() for one in [*outputs, *grads]]


def assert_same(left: Any, right: Any) -> None:
    """Raise unless two values are equal to the last bit, in type, structure and numbers."""
    assert type(left) is type(right), f"{type(left)} is not {type(right)}"
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right), f"off by {(left - right).abs().max()}"
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        assert_same(list(left.values()), list(right.values()))
    else:
        assert left == right
