"""Nested values where the compiler looks on: the way to a part, and every tensor in it.

Dynamo follows each line, so this is plain code over the containers that modules take and return.
What a value is made of is written down as text while it is traced, and read again by
`hookline.hooks.structures` when the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from hookline._tracing import list_attributes
from hookline._trees import NO_KEY, name_key, plain_key
from hookline.hooks.hearing import BREAK, FAULT, RESERVED, write_about, write_step
from hookline.hooks.operators import Way, announce

TENSOR = "'T'"
"""How a tensor is written."""
DICT = "{}"
"""What stands before the class of a dict that is no plain one."""


def way_to(value: Tensor, way: Way, received: Any) -> Way:
    """Choose how a gradient is heard of: what came in from outside has other users too."""
    for one in received:
        if one is value:
            return "part"
    return way


class Silent:
    """Go through a value and tell nobody."""

    is_editing = False
    is_passing = False

    def tell(self, value: Tensor, place: str, way: Way) -> Tensor:
        return value


class _Replacing:
    """Put what flows on into every place where a tensor stands."""

    is_editing = False
    is_passing = False

    def __init__(self, seen: list[tuple[Tensor, Tensor]]) -> None:
        self.seen = seen

    def tell(self, value: Tensor, place: str, way: Way) -> Tensor:
        for old, new in self.seen:
            if old is value:
                return new
        return value


class Walk:
    """One value, as an ear goes through it."""

    def __init__(self, ear: Any, way: Way, received: list[Tensor]) -> None:
        self.ear = ear
        self.way = way
        """How gradients are heard of."""
        self.received = received
        """What came in from outside, which others use too: of that a part is heard."""
        self.is_copying = ear.is_editing or way in ("part", "spent")
        """Whether containers are made anew, because others must not see what is put in."""
        self.seen: list[tuple[Tensor, Tensor]] = []
        """The tensors met, and what flows on in their place: one may stand in several places."""
        self.unwritten = ""
        """A key that cannot be written as text, if there is one where all tensors are told of."""

    def go(self, value: Any, leaf: tuple[str | int, ...], place: str) -> tuple[Any, str, str]:
        """Go to a part; give what flows on, what the part is made of, and its place.

        An empty text says that there is no such part.
        """
        if not leaf:
            new, text = self.tell(value, place)
            return new, text, place
        items = children(value)
        index = -1 if items is None else _find(items, leaf[0])
        if items is None or index < 0:
            return value, "", place
        key, item = items[index]
        new, text, found = self.go(item, leaf[1:], write_step(place, name_item(key, items)))
        if not text:
            return value, text, found
        changed = [one for _, one in items]
        changed[index] = new
        return self._rebuild(value, items, changed), text, found

    def hear_everywhere(self, value: Any) -> Any:
        """Have gradients of the tensors met heard wherever else they stand in a value, too."""
        if self.way != "part" and not self.received:
            return value
        return Walk(_Replacing(self.seen), self.way, []).tell(value, "")[0]

    def tell(self, value: Any, place: str) -> tuple[Any, str]:
        """Tell of every tensor; give what flows on, and what it is made of."""
        if isinstance(value, Tensor):
            return self._tell_one(value, place)
        items = children(value)
        if items is None:
            return value, _write_plain(value)
        texts = []
        changed = []
        for key, item in items:
            if type(key) is list:
                self.unwritten = key[0]
                if self.ear.is_passing:
                    announce(self.ear.key, write_about(FAULT, place, key[0]))
                    changed.append(item)
                    continue
            new, text = self.tell(item, write_step(place, name_item(key, items)))
            changed.append(new)
            texts.append("(" + _write_key(key) + "," + text + ")")
        text = "(" + _write_kind(value) + ",(" + "".join([one + "," for one in texts]) + "))"
        return self._rebuild(value, items, changed), text

    def describe(self, value: Any) -> str:
        """Say what a value is made of."""
        return self.tell(value, "")[1]

    def _tell_one(self, value: Tensor, place: str) -> tuple[Tensor, str]:
        for number, (old, new) in enumerate(self.seen):
            if old is value:
                # Who puts values together knows by the text. Its gradient was heard of already.
                if self.ear.is_passing and self.ear.values:
                    self.ear.split()[0].tell(new, place, "own")
                return new, "('=',((''," + str(number) + "),))"
        new = self.ear.tell(value, place, way_to(value, self.way, self.received))
        self.seen.append((value, new))
        return new, TENSOR

    def _rebuild(self, value: Any, items: list[tuple[Any, Any]], changed: list[Any]) -> Any:
        """Give a container with other items: the same one, unless others would notice."""
        if isinstance(value, tuple):
            if hasattr(value, "n_sequence_fields"):  # torch.return_types.*
                return type(value)(list(changed))
            return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
        if isinstance(value, list):
            if self.is_copying:
                return list(changed)
            for index, item in enumerate(changed):
                value[index] = item
            return value
        if self.is_copying:
            value = _copy(value)
        if isinstance(value, dict):
            for key, item in zip(list(value), changed, strict=True):
                value[key] = item
            return value
        for (name, _), item in zip(items, changed, strict=True):
            object.__setattr__(value, name, item)
        return value


def _copy(value: Any) -> Any:
    """Give another object with the same items, so that whoever has this one sees no change."""
    if type(value) is dict:
        return dict(value)
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**vars(value))
    if isinstance(value, dict):
        if hasattr(type(value), "__dataclass_fields__"):  # a ModelOutput of transformers
            return type(value)(**dict(value.items()))
        return type(value)(list(value.items()))
    new = object.__new__(type(value))
    for name in list_attributes(value):
        object.__setattr__(new, name, value.__dict__[name])
    return new


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """List the items of a container with their keys; None for anything else.

    A key of a dict is the plain one that it equals; where there is none, a list with a name for it.
    """
    if isinstance(value, tuple):
        # The compiler of torch 2.11 tells of fields that a torch.return_types.* does not have.
        names = None if hasattr(value, "n_sequence_fields") else getattr(value, "_fields", None)
        if names is None:
            return list(enumerate(value))
        return list(zip(names, value, strict=True))
    if isinstance(value, list):
        return list(enumerate(value))
    if isinstance(value, dict):
        found = enumerate(value.items())
        return [(_plain_or_named(key, index), item) for index, (key, item) in found]
    if isinstance(value, SimpleNamespace):
        return list(vars(value).items())
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is None or isinstance(value, type):
        return None
    return [(name, getattr(value, name)) for name in list(fields)]


def _plain_or_named(key: Any, index: int) -> Any:
    if type(key) is int or (type(key) is str and key.isprintable()):  # nearly always
        return key
    plain = plain_key(key)
    if plain is NO_KEY:
        name = "." + key.name if isinstance(key, Enum) else " " + str(index)
        return ["<" + type(key).__qualname__ + name + ">"]
    if type(plain) is str and not _is_writable(plain):
        return [repr(plain)]
    return plain


def _is_writable(text: str) -> bool:
    """Tell whether a text can be part of a place, and be given to an operator."""
    return not any(one in RESERVED or "\ud800" <= one <= "\udfff" for one in text)


def name_item(key: Any, items: Sequence[tuple[Any, Any]]) -> str | int:
    """Give the name in a path of an item with this key, of these with theirs."""
    if type(key) is str or type(key) is int:
        return key
    if type(key) is list:
        name: str = key[0]
        return name
    return name_key(key, [other for other, _ in items])


def _find(items: list[tuple[Any, Any]], wanted: str | int) -> int:
    for index, (key, _) in enumerate(items):
        name = name_item(key, items)
        if isinstance(name, str) == isinstance(wanted, str) and name == wanted:
            return index
    if isinstance(wanted, int) and -len(items) <= wanted < len(items):
        return wanted % len(items)
    return -1


def get(value: Any, leaf: tuple[str | int, ...]) -> tuple[bool, Any]:
    """Tell whether there is such a part in a value, and give it."""
    for key in leaf:
        items = children(value)
        index = -1 if items is None else _find(items, key)
        if items is None or index < 0:
            return False, None
        value = items[index][1]
    return True, value


def tensors(value: Any) -> list[Tensor]:
    """List the tensors in a nested value."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for _, item in children(value) or []:
        found.extend(tensors(item))
    return found


def _write_plain(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, str):
        return "('str',((" + _quote(value) + ",None),))"
    # A number may be a size that differs from call to call, so it is not looked at.
    if isinstance(value, int):
        return "('opaque',(('int',None),))"
    if isinstance(value, float):
        return "('opaque',(('float',None),))"
    return "('opaque',(('object',None),))"


def _write_kind(value: Any) -> str:
    kind = type(value)
    if kind is tuple:
        return "'tuple'"
    if kind is list:
        return "'list'"
    if kind is dict:
        return "'dict'"
    if isinstance(value, dict):
        return _quote(DICT + kind.__module__ + ":" + kind.__qualname__)
    return _quote(kind.__module__ + ":" + kind.__qualname__)


def _write_key(key: Any) -> str:
    if type(key) is str:
        return _quote(key)
    return str(key) if type(key) is int else repr(key)


def _quote(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + text.replace("\n", "\\n").replace("\r", "\\r").replace(BREAK, " ") + "'"
