"""What reading a function gives: its assignments, its calls, and why there may be none."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Definition = ast.FunctionDef | ast.AsyncFunctionDef


class NoSource(Exception):
    """Say why a function cannot be read; the text reads on after "`X.forward`: "."""


class Point(NamedTuple):
    """One place in a function's source that binds a value to a name."""

    name: str
    """As written, dotted: `y`, `inner.y` in a nested function, `self.cache`, `return`."""
    line: int
    """The line in the file."""
    kind: str
    """`argument`, `assignment`, `attribute`, `comprehension`, `loop`, `match`, `return`, `walrus`
    or `with`."""
    is_certain: bool
    """Whether it runs exactly once in each execution of the outermost function, as far as
    statements tell: exceptions out of calls and abandoned generators are left aside."""


class Callee(NamedTuple):
    """One place in a function's source that calls something by name or attribute."""

    name: str
    """The last name of what is called, dotted as a point's: `softmax`, `inner.softmax`."""
    line: int
    """The line in the file."""
    expression: str
    """What is called, as source: `F.softmax`, `self._attn`, `super().forward`."""
    function: Callable[..., Any] | None
    """The function, where globals, closure, modules and classes tell; else None."""


@dataclass(frozen=True)  # without slots: `callees` are found when they are asked for
class Reading:
    """The assignments and calls of one function."""

    points: tuple[Point, ...]
    """Every reachable assignment in source order, arguments first, without a method's `self`."""
    names: dict[str, list[Point]]
    """The same points by name."""
    called: tuple[str, ...]
    """The names of what is called, as `Callee.name` has them."""
    find_callees: Callable[[], tuple[Callee, ...]]
    """What resolves the calls."""
    find_handed: Callable[[], tuple[Callee, ...]]
    """What resolves the names that calls get as arguments."""
    file: str
    """The file, as the running code names it."""
    first_line: int
    """The line in the file of the definition or its first decorator."""
    last_line: int
    """The line in the file where the definition ends."""
    lines: tuple[str, ...]
    """The source lines, decorators included."""
    node: Definition
    """The definition, with line numbers as in the file; not to be changed."""

    @functools.cached_property
    def callees(self) -> tuple[Callee, ...]:
        """Every call by name or attribute in source order, except of its own nested functions."""
        return self.find_callees()

    @functools.cached_property
    def handed(self) -> tuple[Callee, ...]:
        """Every name or attribute that a call gets as an argument: some are functions."""
        return self.find_handed()
