"""What an alignment says: which sites of two traces belong together, and by which rule."""

from __future__ import annotations

from dataclasses import dataclass, field

RULES = ("name", "wrapper", "map", "order")
"""How sites were matched: by name; by name but for a prefix; by the user's map; by the order of
execution together with classes, shapes, parameters and values."""

WAYS = ("same", "concat", "transposed", "reshaped")
"""How the values of a match are laid out against each other."""


@dataclass(frozen=True, slots=True)
class Match:
    """Say that some sites of A and some of B are the same value."""

    a: tuple[int, ...]
    """The sites of A, usually one; several are put together along `dim`, in this order."""

    b: tuple[int, ...]
    """The sites of B, likewise; never several on both sides."""

    rule: str
    """One of `RULES`."""

    how: str = "same"
    """One of `WAYS`.

    `transposed`: one side, after it was put together, is the transpose of the other. `reshaped`:
    the same elements in the same order under another shape.
    """

    dim: int | None = None
    """The dimension of the pieces along which several are put together; None where none are."""

    @property
    def is_group(self) -> bool:
        """Tell whether one side is put together from several sites."""
        return len(self.a) > 1 or len(self.b) > 1


@dataclass(frozen=True, slots=True)
class Alignment:
    """Say which sites of two traces belong together, and which have no counterpart."""

    matches: list[Match]
    """The matches in the order of A's sites."""

    alone_a: list[int] = field(default_factory=list)
    """The sites of A whose value has no counterpart, each value where it is first shown."""

    alone_b: list[int] = field(default_factory=list)
    """Those of B."""

    names: dict[str, str] = field(default_factory=dict)
    """The modules of A by path, and the path of the counterpart in B."""

    notes: list[str] = field(default_factory=list)
    """What a reader should know before trusting it."""
