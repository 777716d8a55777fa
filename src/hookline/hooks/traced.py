"""What the compiler traces in the place of hookline's hooks: the same values, by operators.

Dynamo follows every line here and guards what it reads, so this is plain code over a few
attributes: no session, no visit, no frame. What a value means is found out when the graph runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline._errors import UnsupportedModel
from hookline.hooks.operators import (
    BEGIN,
    END,
    announce,
    hand_both,
    hand_one,
    pass_both,
    pass_one,
    write_mode,
    write_step,
)


class TracedEar:
    """What is asked at one port, as far as the compiler has to know."""

    def __init__(
        self,
        key: Tensor,
        *,
        leaf: tuple[str | int, ...] = (),
        values: bool = True,
        gradients: bool = False,
        is_passing: bool = False,
    ) -> None:
        self.key = key
        """The key of the ear that hears it."""
        self.leaf = leaf
        """The only part of the value that is asked for; none for all of it."""
        self.values = values
        """Whether it is told of values."""
        self.gradients = gradients
        """Whether it is told of gradients."""
        self.is_passing = is_passing
        """Whether it looks at values in passing, and needs no execution to put them in."""

    def flow(self, port: str, value: Any) -> Any:
        """Tell of a value; give what flows on."""
        return _at(self, value, self.leaf, port)

    def tell(self, value: Tensor, place: str) -> Tensor:
        """Tell of one tensor; give what flows on in its place."""
        with_grad = self.gradients and value.requires_grad and torch.is_grad_enabled()
        place = write_mode(place)
        if self.is_passing:
            if with_grad:
                return pass_both(value, self.key, place, self.values)
            return pass_one(value, self.key, place) if self.values else value
        if with_grad:
            return hand_both(value, self.key, place)
        return hand_one(value, self.key, place)


def _at(ear: Any, value: Any, leaf: tuple[str | int, ...], place: str) -> Any:
    """Go to the part that is asked for, and tell of all tensors in it."""
    if not leaf:
        return _tell_all(ear, value, place)
    key = leaf[0]
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        index = _index(names, key) if names is not None else key
        items = list(value)
        items[index] = _at(ear, items[index], leaf[1:], write_step(place, _name(names, index)))
        return _like(value, items, names)
    if isinstance(value, list):
        value[key] = _at(ear, value[key], leaf[1:], write_step(place, key))
        return value
    if isinstance(value, dict):
        if isinstance(key, int) and key not in value:
            key = list(value)[key]
        value[key] = _at(ear, value[key], leaf[1:], write_step(place, key))
        return value
    names = _fields(value)
    if names is None:
        return value
    name = names[key] if isinstance(key, int) else key
    setattr(value, name, _at(ear, getattr(value, name), leaf[1:], write_step(place, name)))
    return value


def _tell_all(ear: Any, value: Any, place: str) -> Any:
    if isinstance(value, Tensor):
        return ear.tell(value, place)
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        items = []
        for index, item in enumerate(value):
            items.append(_tell_all(ear, item, write_step(place, _name(names, index))))
        return _like(value, items, names)
    if isinstance(value, list):
        for index in range(len(value)):
            value[index] = _tell_all(ear, value[index], write_step(place, index))
        return value
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _tell_all(ear, value[key], write_step(place, key))
        return value
    names = _fields(value)
    if names is not None:
        for name in names:
            item = getattr(value, name)
            new = _tell_all(ear, item, write_step(place, name))
            if new is not item:
                setattr(value, name, new)
    return value


def _fields(value: Any) -> list[str] | None:
    fields = getattr(value, "__dataclass_fields__", None)
    return None if fields is None else list(fields)


def _index(names: Any, key: str | int) -> int:
    return key if isinstance(key, int) else list(names).index(key)


def _name(names: Any, index: int) -> str | int:
    return index if names is None else names[index]


def _like(value: Any, items: list[Any], names: Any) -> Any:
    return tuple(items) if names is None else type(value)(*items)


class Traced:
    """What is asked of one module, for the compiler."""

    def __init__(
        self,
        *,
        beginning: tuple[TracedEar, ...],
        ending: tuple[TracedEar, ...],
        inputs: tuple[Any, ...],
        outputs: tuple[Any, ...],
        inside: tuple[Any, ...],
        argument_names: tuple[str, ...],
        rest_name: str,
    ) -> None:
        self.beginning = beginning
        """Those who count executions of the module."""
        self.ending = ending
        """Those who are told when the root returns."""
        self.inputs = inputs
        self.outputs = outputs
        self.inside = inside
        """Those who ask for variables and operations."""
        self.argument_names = argument_names
        """What the arguments are called that are passed by position."""
        self.rest_name = rest_name
        """What those are called that come after them."""

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what a pre hook does."""
        for ear in self.beginning:
            announce(ear.key, write_mode(BEGIN))
        if not self.inputs:
            return None
        for ear in self.inputs:
            args, kwargs = self._flow_in(ear, args, kwargs)
        return args, kwargs

    def _flow_in(self, ear: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wanted = ear.leaf[0] if ear.leaf else None
        names = self.argument_names
        new_args = []
        for index, value in enumerate(args):
            is_named = index < len(names)
            name = names[index] if is_named else self.rest_name
            if wanted is not None and name != wanted:
                new_args.append(value)
                continue
            place = write_step("input", name)
            leaf = ear.leaf[1:]
            if not is_named:
                number = index - len(names)
                if leaf and leaf[0] != number:
                    new_args.append(value)
                    continue
                place, leaf = write_step(place, number), leaf[1:]
            new_args.append(_at(ear, value, leaf, place))
        new_kwargs = {}
        for name, value in kwargs.items():
            if wanted is not None and name != wanted:
                new_kwargs[name] = value
            else:
                new_kwargs[name] = _at(ear, value, ear.leaf[1:], write_step("input", name))
        return tuple(new_args), new_kwargs

    def leave(self, output: Any) -> Any:
        """Do what a post hook does; give the output that flows on."""
        for ear in self.outputs:
            output = ear.flow("output", output)
        for ear in self.ending:
            announce(ear.key, END)
        return output


class Refused:
    """Stand for what cannot be asked of a graph: say so when one is traced."""

    def __init__(self, why: str) -> None:
        self.why = why

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Say it."""
        raise UnsupportedModel(self.why)

    def leave(self, output: Any) -> Any:
        """Say it."""
        raise UnsupportedModel(self.why)
