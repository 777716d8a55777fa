"""What a training of the rules' test bench is: a model, and a function that trains it one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Training:
    """A model with everything that is needed to train it."""

    model: nn.Module | Mapping[str, nn.Module]
    """What is watched."""

    step: Callable[[int], None]
    """Do the step of this number: forward, backward, the optimizer."""

    steps: int = 60
    """How many steps are enough to tell."""


@dataclass(frozen=True, slots=True)
class Case:
    """A training with what the rules have to say about it."""

    name: str
    """What it is called."""

    make: Callable[[], Training]
    """Make it, after the seed was set."""

    rules: tuple[str, ...] = ()
    """Broken: one finding at least has to be of these rules. Healthy: none."""

    site: str = ""
    """Where one of these findings has to be: the site begins so."""

    about: str = field(default="")
    """What is special about it."""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing may be found."""
        return not self.rules


HEALTHY: dict[str, Case] = {}
BROKEN: dict[str, Case] = {}

Make = Callable[[], Training]


def healthy(make: Make) -> Make:
    """Note a training in which nothing is wrong."""
    HEALTHY[make.__name__] = Case(make.__name__, make, about=_about(make))
    return make


def broken(*rules: str, site: str = "") -> Callable[[Make], Make]:
    """Note a training in which something is wrong, which one of these rules has to find."""

    def note(make: Make) -> Make:
        BROKEN[make.__name__] = Case(make.__name__, make, rules, site, _about(make))
        return make

    return note


def _about(make: Make) -> str:
    return (make.__doc__ or "").strip().rstrip(".")


def fit(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    optimizer: Optimizer | None = None,
    *,
    steps: int = 60,
    lr: float = 1e-3,
) -> Training:
    """Train a model the plain way: one loss, one optimizer (Adam if none is given)."""
    stepper = optimizer or torch.optim.Adam(model.parameters(), lr=lr)

    def step(number: int) -> None:
        stepper.zero_grad()
        loss_of(number).backward()
        stepper.step()

    return Training(model, step, steps)
