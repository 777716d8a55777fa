"""What a nested value was made of, as the text says that was written while a graph was traced."""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from hookline._trees import Opaque, Path

Find = Callable[[Path], Any]
"""What gives the item at a path."""


@functools.cache
def _read(text: str) -> Any:
    return ast.literal_eval(text)


def build(text: str, find: Find) -> Any:
    """Make the value anew, with what `find` gives for each tensor."""
    return _build(_read(text), find, (), [])


def imagine(text: str) -> Any:
    """Give a value of this structure with empty tensors, to name what is in it."""
    return build(text, lambda _: _EMPTY)


_EMPTY = Tensor()


def links(text: str) -> dict[Path, Path]:
    """Give the places of tensors that stand in an earlier place too, with that place."""
    found: dict[Path, Path] = {}
    _link(_read(text), (), [], found)
    return found


def _link(node: Any, path: Path, met: list[Path], found: dict[Path, Path]) -> None:
    if node == "T":
        met.append(path)
    elif isinstance(node, tuple):
        kind, items = node
        if kind == "=":
            found[path] = met[items[0][1]]
        elif kind not in ("str", "opaque"):
            for key, item in items:
                _link(item, (*path, key), met, found)


def _build(node: Any, find: Find, path: Path, met: list[Any]) -> Any:
    if node == "T":
        met.append(find(path))
        return met[-1]
    if not isinstance(node, tuple):
        return node
    kind, items = node
    if kind == "=":
        return met[items[0][1]]
    if kind == "str":
        return items[0][0]
    if kind == "opaque":
        return Opaque(items[0][0])
    return _make(kind, {key: _build(item, find, (*path, key), met) for key, item in items})


def _make(kind: str, items: dict[str | int, Any]) -> Any:
    """Make a container of a class that is known by its name; a plain one where it is not found."""
    if kind in ("tuple", "torch:Size"):
        return tuple(items.values())
    if kind == "list":
        return list(items.values())
    if kind == "dict":
        return items
    found = _find_class(kind)
    named: dict[str, Any] = {str(key): item for key, item in items.items()}
    if found is None:
        return items if not all(isinstance(key, int) for key in items) else tuple(items.values())
    if hasattr(found, "n_sequence_fields"):  # torch.return_types.*: made from one sequence
        return found(list(items.values()))
    if issubclass(found, tuple):
        return tuple.__new__(found, list(items.values()))
    if issubclass(found, list):
        return list(items.values())
    if found is SimpleNamespace:
        return SimpleNamespace(**named)
    if found is OrderedDict:
        return OrderedDict(items)
    if issubclass(found, dict):
        # A ModelOutput of transformers is a dataclass too, whose fields are its keys.
        return found(**named) if dataclasses.is_dataclass(found) else items
    made = object.__new__(found)
    for name, item in named.items():
        object.__setattr__(made, name, item)
    return made


def _find_class(name: str) -> type | None:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None
