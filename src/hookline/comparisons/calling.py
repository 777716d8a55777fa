"""What a step of a model is: its arguments, what is made of its output, and the random states.

Reads what a user gives for them, and says whose code it was that raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hookline.replays.randomness import RandomStates

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class StepCall:
    """One call of a model, and the loss that is made of what it gives."""

    args: tuple[Any, ...] = ()
    """The positional arguments."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The named ones."""

    loss: Loss | None = None
    """Makes a scalar of the output; None: no backward."""

    random: RandomStates | None = None
    """What random numbers follow from; None: the seed says."""


def read_losses(loss: Any) -> tuple[Loss | None, Loss | None]:
    """Read the loss: one function for both models, or a pair of them."""
    if loss is None or callable(loss):
        return loss, loss
    if isinstance(loss, (tuple, list)) and len(loss) == 2 and all(map(callable, loss)):
        return loss[0], loss[1]
    raise TypeError(
        "`loss` is a function of the model's output, such as `lambda out: out.mean()`, or a pair "
        f"of them, one for each model; not {loss!r}"
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
