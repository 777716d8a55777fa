"""What a case of the bench of comparisons is: a model as it should be, and one that was changed.

A change is a function that gets a copy of the model. It changes the copy, or gives another model,
or a `Side` where more than the model is other. The function's docstring says what was done.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a model, and what one step of it needs."""

    model: nn.Module
    """The model."""

    inputs: tuple[Any, ...] | dict[str, Any] = ()
    """Its arguments, by place or by name."""

    loss: Callable[[Any], Tensor] | None = None
    """Makes the loss of its output; None: no backward."""

    optimizer: Callable[[Any], Optimizer] | None = None
    """Makes the optimizer of its parameters; None: no update."""


Change = Callable[[nn.Module], nn.Module | Side | None]


@dataclass(frozen=True, slots=True)
class Case:
    """A changed model with what a comparison has to say about it."""

    name: str
    """What it is called."""

    example: str
    """Which model it is a change of."""

    change: Change
    """Makes the other side."""

    at: str | None = None
    """The path of the module that differs; None: the change is benign."""

    direction: str | None = None
    """Where it shows first; None: nowhere."""

    about: str = field(default="")
    """What was changed."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """What else `hl.diff` is told."""

    @property
    def is_bug(self) -> bool:
        """Whether a difference has to be found."""
        return self.at is not None


WAYS = ("tensors", "sketches", "floors")
"""How they are compared: live, from two recordings, from recordings with measured floors."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a comparison said of a case."""

    case: Case
    """The case."""

    way: str
    """How it was compared."""

    first: str | None
    """The module that it named; None: nothing differs."""

    direction: str | None = None
    """Where it saw the difference."""

    over: float = math.nan
    """The error over its limit: at the place found, or the largest of all where none was found."""

    sentence: str = ""
    """The answer."""

    seconds: float = 0.0
    """How long it took the processor."""

    @property
    def is_right(self) -> bool:
        """Whether that is what had to be said."""
        return self.first == self.case.at and self.direction == self.case.direction


EXAMPLES: dict[str, Callable[[], Side]] = {}
BUGS: dict[str, Case] = {}
BENIGN: dict[str, Case] = {}


def example(make: Callable[[], Side]) -> Callable[[], Side]:
    """Note a model as it should be."""
    EXAMPLES[make.__name__] = make
    return make


_seed = 0


def set_seed(seed: int) -> None:
    """Choose the weights and batches of the models that are made from now on."""
    global _seed
    _seed = seed
    make_reference.cache_clear()


@cache
def make_reference(name: str) -> Side:
    """Make the model of an example, the same each time until another seed is set."""
    with torch.random.fork_rng():
        torch.manual_seed(_seed)
        return EXAMPLES[name]()


def make_other(case: Case) -> Side:
    """Make the changed side of a case: what the change does not give is the reference's."""
    reference = make_reference(case.example)
    with torch.random.fork_rng():
        torch.manual_seed(_seed + 1)
        changed = case.change(copy.deepcopy(reference.model))
    if changed is None:
        raise TypeError(f"the change `{case.name}` has to give a model or a Side")
    if isinstance(changed, nn.Module):
        return replace(reference, model=changed)
    return Side(
        changed.model,
        changed.inputs or reference.inputs,
        changed.loss or reference.loss,
        changed.optimizer or reference.optimizer,
    )


def bug(of: str, at: str, direction: str = "forward", **options: Any) -> Callable[[Change], Change]:
    """Note a change of an example that lives in the module `at`."""

    def note(change: Change) -> Change:
        case = Case(change.__name__, of, change, at, direction, _about(change), options)
        _add(BUGS, case)
        return change

    return note


def benign(of: str, **options: Any) -> Callable[[Change], Change]:
    """Note a change of an example that computes the same up to rounding."""

    def note(change: Change) -> Change:
        case = Case(change.__name__, of, change, about=_about(change), options=options)
        _add(BENIGN, case)
        return change

    return note


def _add(cases: dict[str, Case], case: Case) -> None:
    if case.name in BUGS or case.name in BENIGN:
        raise ValueError(f"two cases are called `{case.name}`")
    cases[case.name] = case


def _about(change: Change) -> str:
    return (change.__doc__ or "").strip().rstrip(".")


def override(module: nn.Module, **methods: Callable[..., Any]) -> nn.Module:
    """Give one module other methods: those of a class of the same name, as another version has."""
    module.__class__ = type(type(module).__name__, (type(module),), methods)
    return module


def replace_module(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Put another module at a path of a model, and give the model."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
    return model
