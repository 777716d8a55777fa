"""Tensors inside nested values: what modules take and return.

A tree is a tensor, or a tuple, list, dict, dataclass, attrs class, namespace or a type registered
with torch's pytree that holds trees; everything else is a single opaque item. A path is a tuple of
names and indexes into a tree. Knows no modules and no addresses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Container, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from hookline._tracing import equal_text

Key = str | int
Path = tuple[Key, ...]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclasses.dataclass(frozen=True, slots=True)
class Opaque:
    """Stand in for an object that hookline does not look into and does not keep."""

    type_name: str
    """The class of the object that was there."""

    def __repr__(self) -> str:
        return f"<{self.type_name}: not kept>"


NO_KEY = ...
"""What `plain_key` gives for a key that equals nothing plain."""


def plain_key(key: Any) -> Any:
    """Give the text, number, True, False, None or tuple of these that a key of a dict equals.

    The compiler follows this, and `name_key`, where it traces a dict with such a key.
    """
    kind = type(key)
    if key is None or kind is str or kind is int or kind is bool:
        return key
    if kind is float:
        return key if key - key == 0 else NO_KEY  # an infinite one and NaN have no spelling
    if kind is tuple:
        parts = [plain_key(one) for one in key]
        return NO_KEY if NO_KEY in parts else tuple(parts)
    if isinstance(key, str):
        text = equal_text(key)
        return NO_KEY if text is None else text
    return 0 + key if isinstance(key, int) and 0 + key == key else NO_KEY


def name_key(key: Any, keys: Container[object]) -> Key:
    """Give the name of an item of a dict in a path; `keys` are all keys of that dict."""
    if type(key) is str or type(key) is int:
        return key
    plain = plain_key(key)
    if type(plain) is str or type(plain) is int:
        return plain
    name = repr(key if plain is NO_KEY else plain)
    return f"<{name}>" if name in keys else name


def children(tree: Any) -> list[tuple[Key, Any]] | None:
    """List the items of a container with their keys; None for anything else."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return list(enumerate(tree))
    if isinstance(tree, tuple) and kind is not torch.Size:
        names = getattr(tree, "_fields", None)
        return list(zip(names, tree, strict=True)) if names else list(enumerate(tree))
    if isinstance(tree, list):
        return list(enumerate(tree))
    if isinstance(tree, (dict, UserDict)):
        return [(name_key(key, tree), item) for key, item in tree.items()]
    if isinstance(tree, (Tensor, nn.Module, type, Opaque, *_PLAIN)):
        return None
    names = _field_names(tree)
    if names is not None:
        return [(name, getattr(tree, name)) for name in names if hasattr(tree, name)]
    if kind in _pytree.SUPPORTED_NODES:
        return list(enumerate(_pytree.SUPPORTED_NODES[kind].flatten_fn(tree)[0]))
    return None


def _field_names(tree: Any) -> list[str] | None:
    if dataclasses.is_dataclass(tree):
        return [field.name for field in dataclasses.fields(tree)]
    attributes = getattr(type(tree), "__attrs_attrs__", None)
    if attributes is not None:
        return [attribute.name for attribute in attributes]
    if isinstance(tree, SimpleNamespace):
        return list(vars(tree))
    return None


def rebuild(tree: Any, items: list[Any]) -> Any:
    """Make a container like `tree` that holds `items`, in the order `children` lists them."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind(items)
    if isinstance(tree, tuple):
        if hasattr(tree, "n_sequence_fields"):  # torch.return_types.*: made from one sequence
            return kind(items)
        # Subclasses may have any constructor: make the tuple itself and carry its attributes over.
        new = tuple.__new__(kind, items)
        if hasattr(tree, "__dict__"):
            new.__dict__.update(tree.__dict__)
        return new
    if isinstance(tree, list):
        copied = copy.copy(tree)
        copied[:] = items
        return copied
    if isinstance(tree, (dict, UserDict)):
        copied_dict = copy.copy(tree)
        for key, item in zip(tree, items, strict=True):
            copied_dict[key] = item
        return copied_dict
    names = _field_names(tree)
    if names is not None:
        copied_object = copy.copy(tree)
        present = [name for name in names if hasattr(tree, name)]
        for name, item in zip(present, items, strict=True):
            object.__setattr__(copied_object, name, item)
        return copied_object
    node = _pytree.SUPPORTED_NODES[kind]
    return node.unflatten_fn(items, node.flatten_fn(tree)[1])


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield every tensor of a tree with its path."""
    if isinstance(tree, Tensor):
        yield path, tree
        return
    items = children(tree)
    if items:
        for key, item in items:
            yield from leaves(item, (*path, key))


def replace_tensors(tree: Any, new: dict[int, Tensor]) -> Any:
    """Swap tensors by identity; give back the very same object where nothing changed."""
    if isinstance(tree, Tensor):
        return new.get(id(tree), tree)
    items = children(tree)
    if not items:
        return tree
    swapped = [replace_tensors(item, new) for _, item in items]
    if all(a is b for a, (_, b) in zip(swapped, items, strict=True)):
        return tree
    return rebuild(tree, swapped)


def map_tensors(tree: Any, change: Callable[[Path, Tensor], Any], path: Path = ()) -> Any:
    """Make a tree of the same structure with every tensor changed, other items as they are."""
    if isinstance(tree, Tensor):
        return change(path, tree)
    items = children(tree)
    if not items:
        return tree
    return rebuild(tree, [map_tensors(item, change, (*path, key)) for key, item in items])


def freeze(tree: Any, keep: Callable[[Path, Tensor], Any], path: Path = ()) -> Any:
    """Copy a tree: own containers, tensors through `keep`, and `Opaque` for unknown objects.

    The containers are copied because a model may change the list it returned later on.
    """
    if isinstance(tree, Tensor):
        return keep(path, tree)
    if isinstance(tree, _PLAIN):
        return tree
    items = children(tree)
    if items is None:
        return Opaque(type(tree).__qualname__)
    return rebuild(tree, [freeze(item, keep, (*path, key)) for key, item in items])


class NoSuchLeaf(LookupError):
    """Say that a path does not lead anywhere in this tree."""


def _index(items: list[tuple[Key, Any]], key: Key) -> int:
    for position, (name, _) in enumerate(items):
        if name == key and type(name) is type(key):
            return position
    # Names may be given by position: `output[0]` of a dict, dataclass or named tuple.
    if isinstance(key, int) and -len(items) <= key < len(items):
        return key % len(items)
    raise NoSuchLeaf(key)


def get(tree: Any, path: Path) -> Any:
    """Give the item at a path."""
    for key in path:
        items = children(tree)
        if items is None:
            raise NoSuchLeaf(key)
        tree = items[_index(items, key)][1]
    return tree


def put(tree: Any, path: Path, value: Any) -> Any:
    """Give a tree like this one with another item at a path."""
    if not path:
        return value
    items = children(tree)
    if items is None:
        raise NoSuchLeaf(path[0])
    position = _index(items, path[0])
    new = [item for _, item in items]
    new[position] = put(new[position], path[1:], value)
    return rebuild(tree, new)


def canonical(tree: Any, path: Path) -> Path:
    """Spell a path with the keys the containers themselves use."""
    spelled: list[Key] = []
    for key in path:
        items = children(tree)
        if items is None:
            raise NoSuchLeaf(key)
        name, tree = items[_index(items, key)]
        spelled.append(name)
    return tuple(spelled)
