"""What a step of a model is: its arguments, what is made of its output, and the random states.

Reads what a user gives for them, and says whose code it was that raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.replays.randomness import RandomStates

Loss = Callable[[Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, slots=True, eq=False)
class StepCall:
    """One call of a model, and the loss that is made of what it gives."""

    args: tuple[Any, ...] = ()
    """The positional arguments."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The named ones."""

    loss: Loss | None = None
    """Makes a scalar of the output; None: no backward."""

    optimizer: MakeOptimizer | None = None
    """Makes an optimizer of parameters; None: no update."""

    random: RandomStates | None = None
    """What random numbers follow from; None: the seed says."""


def read_pair(given: Any, name: str) -> tuple[Any, Any]:
    """Read a function for both models, or a pair of them."""
    if given is None or callable(given):
        return given, given
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2
    if is_pair and all(one is None or callable(one) for one in given):
        return given[0], given[1]
    examples = {
        "loss": "the model's output, such as `lambda out: out.mean()`",
        "optimizer": "parameters, such as `lambda p: torch.optim.SGD(p, lr=0.1)`",
    }
    raise TypeError(
        f"`{name}` is a function of {examples[name]}, or a pair of them, one for each model; "
        f"not {given!r}"
    )


@contextmanager
def naming_model(name: str, kind: str) -> Iterator[None]:
    """Let errors of a model's code say which of the two it was."""
    try:
        yield
    except Exception as error:
        note = f"raised while hookline ran {name} ({kind})"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise
