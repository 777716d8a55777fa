"""What a rewritten function calls: the two names put into it, and what stands behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

TAPS = "__hl_taps__"
"""The free variable of a rewritten function that holds its `Taps`."""

SCOPE = "__hl_scope__"
"""The local variable that holds what `begin` or `enter` gave for this one execution."""

HELD = "__hl_held_"
"""How names begin that hold a value until it is tapped."""

Shape = int | None | tuple["Shape", ...]
"""A comprehension's target: the number of a tapped name, None for another, or a tuple of these."""


class Scope(Protocol):
    """One execution of a rewritten function."""

    def __call__(self, point: int, value: Any, /) -> Any:
        """Take a value about to be bound to a name of the table; return the one to bind."""


class Taps(Protocol):
    """The other end of every tap in a rewritten function."""

    def begin(self, owner: Any, /) -> tuple[Any, Scope]:
        """Open a scope for a call of a method; give the object to work on, and the scope."""

    def enter(self) -> Scope:
        """Open a scope for a call of a plain function."""

    def end(self, scope: Scope, /) -> None:
        """Close a scope; called where `rewrite` was told so."""

    def iterate(self, scope: Scope, shape: Shape, values: Iterable[Any], /) -> Iterable[Any]:
        """Give what a comprehension runs over, each tapped variable passed through the scope."""

    def call(self, scope: Scope, name: str, callee: Any, /) -> Callable[..., Any]:
        """Give what to call in place of a function of which variables are wanted."""

    def hand(self, scope: Scope, name: str, callee: Any, /) -> Any:
        """Give what to hand over in place of a function of which variables are wanted."""

    def augment(self, operator: str, left: Any, right: Any, /) -> Any:
        """Do what an augmented assignment does: `iadd` for `+=`, as `operator` names it."""

    def again(self, callee: Any, /) -> Callable[..., Any]:
        """Give what to call where a plain function calls itself by name."""

    def clean(self, names: Any, /) -> Any:
        """Leave the two names above out of what `locals()`, `vars()` or `dir()` returned."""
