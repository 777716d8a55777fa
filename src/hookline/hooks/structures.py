"""What a nested value was made of, as the text says that was written while a graph was traced."""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from hookline._errors import UnsupportedModel
from hookline._trees import Key, Opaque, Path
from hookline.hooks.nested import DICT, name_item

PLAIN_KEYS = (
    "Inside a graph that torch.compile made the keys of a dict can be texts without control "
    "characters, numbers, True, False, None and tuples of these"
)

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


def refuse_unwritten(text: str, where: str) -> None:
    """Raise where a key could not be written."""
    key = next(_find_unwritten(_read(text)), None)
    if key is not None:
        raise unwritten_key(key, where)


def unwritten_key(key: str, where: str) -> UnsupportedModel:
    """Make the error for a key that could not be written."""
    return UnsupportedModel(
        f"{where}: it has the key {key}. {PLAIN_KEYS}. "
        'Ask for the model to be run eagerly: compiled="eager"'
    )


def _find_unwritten(node: Any) -> Iterator[str]:
    if isinstance(node, tuple):
        kind, items = node
        if kind not in ("=", "str", "opaque"):
            for key, item in items:
                if isinstance(key, list):
                    yield key[0]
                yield from _find_unwritten(item)


def _link(node: Any, path: Path, met: list[Path], found: dict[Path, Path]) -> None:
    if node == "T":
        met.append(path)
    elif isinstance(node, tuple):
        kind, items = node
        if kind == "=":
            found[path] = met[items[0][1]]
        elif kind not in ("str", "opaque"):
            for _, name, item in _named(items):
                _link(item, (*path, name), met, found)


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
    named = _named(items)
    return _make(kind, {key: _build(item, find, (*path, name), met) for key, name, item in named})


def _named(items: Any) -> Iterator[tuple[Any, Key, Any]]:
    """Yield the key of each item, its name in a path, and the item."""
    for key, item in items:
        name = name_item(key, items)
        yield (name if isinstance(key, list) else key), name, item


def _make(kind: str, items: dict[Any, Any]) -> Any:
    """Make a container of a class that is known by its name; a plain one where it is not found."""
    is_dict = kind.startswith(DICT)
    kind = kind.removeprefix(DICT)
    if kind in ("tuple", "torch:Size"):
        return tuple(items.values())
    if kind == "list":
        return list(items.values())
    if kind == "dict":
        return items
    found = _find_class(kind)
    named: dict[str, Any] = {str(key): item for key, item in items.items()}
    if found is None:
        is_sequence = not is_dict and all(isinstance(key, int) for key in items)
        return tuple(items.values()) if is_sequence else items
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
