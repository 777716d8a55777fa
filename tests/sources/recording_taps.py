"""Taps for tests: they write down what passes, and change it where told to."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from hookline.sources import rewrite

Change = Callable[[Any], Any]


def keep(value: Any) -> Any:
    """Leave a value as it is."""
    return value


def add_hundred(value: Any) -> Any:
    """Change numbers, and nothing else."""
    return value + 100 if isinstance(value, int) and not isinstance(value, bool) else value


class RecordingTaps:
    """Record `(name, value)` of every tap of a function and of the functions it calls."""

    def __init__(
        self,
        function: Callable[..., Any],
        wanted: set[str] | frozenset[str],
        change: Change = keep,
        *,
        prefix: str = "",
        seen: list[tuple[str, Any]] | None = None,
        is_method: bool | None = None,
    ) -> None:
        self.wanted = frozenset(wanted)
        self.change = change
        self.prefix = prefix
        self.seen: list[tuple[str, Any]] = [] if seen is None else seen
        self.opened: list[str] = []
        self.owners: list[Any] = []
        self.exchange: dict[int, Any] = {}
        self.function, self.table = rewrite(function, self.wanted, self, is_method=is_method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def values(self, name: str) -> list[Any]:
        return [value for seen, value in self.seen if seen == name]

    def scope(self, point: int, value: Any) -> Any:
        self.seen.append((self.prefix + self.table[point], value))
        return self.change(value)

    def begin(self, owner: Any) -> tuple[Any, Any]:
        self.opened.append("begin")
        self.owners.append(owner)
        return self.exchange.get(id(owner), owner), self.scope

    def enter(self) -> Any:
        self.opened.append("enter")
        return self.scope

    def iterate(self, scope: Any, shape: Any, values: Any) -> Iterator[Any]:
        for value in values:
            yield _pass(scope, shape, value)

    def call(self, scope: Any, name: str, callee: Any) -> Any:
        called = {name, name.rpartition(".")[0] + getattr(callee, "__name__", "")}
        wanted = {
            each[len(start) + 1 :]
            for each in self.wanted
            for start in called
            if each.startswith(f"{start}.")
        }
        if not wanted:
            return callee
        prefix = f"{self.prefix}{name}."
        return RecordingTaps(callee, wanted, self.change, prefix=prefix, seen=self.seen)

    def hand(self, scope: Any, name: str, callee: Any) -> Any:
        return self.call(scope, name, callee)

    @staticmethod
    def augment(name: str, left: Any, right: Any) -> Any:
        return getattr(operator, name)(left, right)

    def again(self, callee: Any) -> Any:
        return self.function

    def clean(self, names: Any) -> Any:
        kept = [name for name in names if not name.startswith("__hl_")]
        return {name: names[name] for name in kept} if isinstance(names, dict) else kept


def _pass(scope: Any, shape: Any, value: Any) -> Any:
    if isinstance(shape, tuple):
        return tuple(_pass(scope, part, each) for part, each in zip(shape, value, strict=True))
    return value if shape is None else scope(shape, value)
