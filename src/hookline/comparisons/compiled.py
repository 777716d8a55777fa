"""Confirm a difference of models that are compiled: are they the same without their graphs?

Modules that are run by themselves run eagerly, and say nothing of what a graph does. So both models
make the step once more without graphs. Where they agree then, the compiler made the difference;
where they differ alike, the modules are asked as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from hookline.comparisons.confirming import Compare, confirm
from hookline.comparisons.locating import Pair
from hookline.diffs.difference import Difference
from hookline.hooks.eagerly import stance

_BY_COMPILER = "the compiled graph does that: without torch.compile both give the same"
_NOT_BY_COMPILER = "it is the same without torch.compile, by which the modules were asked"

Again = Callable[[], tuple[Difference, Compare]]
"""Compares both models without their graphs; gives that, and what compares them once more."""


def confirm_compiled(difference: Difference, pair: Pair, compare_eagerly: Again) -> Difference:
    """Add to a difference whether the compiler made it; if not, what the modules say."""
    if difference.same:
        return difference
    with running_eagerly():
        eager, again = compare_eagerly()
        if eager.same:
            return replace(difference, causes=(_BY_COMPILER, *difference.causes))
        # Without graphs more gradients are heard, so it may be known to be a module around's own.
        is_within = f"{difference.first}.".startswith(f"{eager.first}." if eager.first else "")
        if is_within and eager.direction == difference.direction:
            found = confirm(eager, pair, again)
            return replace(found, notes=(*found.notes, _NOT_BY_COMPILER))
    where = f"`{eager.first}`" if eager.first else "the model's own code"
    note = f"without torch.compile the first difference is another one, in {where}"
    return replace(difference, notes=(*difference.notes, note))


@contextmanager
def running_eagerly() -> Iterator[None]:
    """Have compiled models run without their graphs."""
    stance.take()
    try:
        yield
    finally:
        stance.leave()
