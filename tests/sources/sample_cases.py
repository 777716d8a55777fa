"""The collection of functions that `sample_statements` and `sample_scopes` add to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A function, what to tap in it, the values that pass, and the result if 100 is added."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    name: str
    kind: str
    values: list[Any]
    edited: Any
    run: Callable[[Any], Any]


CASES: list[Case] = []


def case(
    *arguments: Any,
    name: str = "y",
    kind: str = "assignment",
    values: list[Any],
    edited: Any,
    run: Callable[[Any], Any] = lambda result: result,
) -> Callable[[Any], Any]:
    """Register a function; it stays what it is."""

    def register(function: Any) -> Any:
        CASES.append(Case(function, arguments, name, kind, values, edited, run))
        return function

    return register


class Box:
    """An object with attributes."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
