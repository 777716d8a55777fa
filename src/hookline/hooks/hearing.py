"""Who hears what the operators of a compiled graph deliver, and how a place is written for them."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline._compiler import run_uncompiled
from hookline._torch import is_capturing_cuda_graph
from hookline._trees import Path
from hookline.hooks.together import BETWEEN

BREAK = "\x01"
"""What stands between the parts of a place that is written as one string."""
_INNER = "\x02"
"""What stands there in a place that is a part of another one."""
WITHOUT = "\x03"
"""What stands before a place in code that is traced without grad."""
RESERVED = "\0" + BREAK + _INNER + WITHOUT + BETWEEN
"""What cannot stand in a name. None of them ends a line, as some others do to who writes code."""

BEGIN = "begin"
"""The place of no value: an execution of a module begins."""
AGAIN = "again"
"""The place of no value: one begins inside of another execution of the same module."""
BACK = "back"
"""The place of no value: such a one ends."""
BESIDE = "beside"
"""The place of no value: one begins, unless a hook that runs beside the graph said so already."""
END = "end"
"""The place of no value: an execution of the root ends."""
SHAPE = "shape"
"""The place of no value: what a nested value is made of."""
MISSING = "missing"
"""The place of no value: a nested value has no such part; what it is made of."""
REASON = "reason"
"""The place of no value: why a tensor can have no gradient."""
FAULT = "fault"
"""The place of no value: why what was asked for cannot be done with this value."""
GRADIENT = "gradient:"
"""What stands before the port of a value of which only the gradient is asked for."""


class Place(NamedTuple):
    """Where in an execution of a module a value is."""

    port: str
    """The port: `input`, `output`, or a name inside forward such as `@scores[1]`."""
    leaf: Path
    """The way to the tensor in a nested value."""
    has_grad: bool = True
    """Whether grad was on where the value is made; while a graph runs torch does not tell."""


def write_step(path: str, name: str | int) -> str:
    """Add a name to a written path. Runs while a graph is traced, so it is as plain as can be."""
    if isinstance(name, str):
        return path + BREAK + "." + name
    return path + BREAK + "#" + str(name)


def write_mode(place: str) -> str:
    """Add whether grad is on. Runs while a graph is traced, after all steps were written."""
    return place if torch.is_grad_enabled() else WITHOUT + place


def write_about(what: str, place: str, text: str) -> str:
    """Write something about a place, in the place of no value. Runs while a graph is traced."""
    return write_mode(what + BREAK + "." + text + BREAK + "." + place.replace(BREAK, _INNER))


def read_about(about: Place) -> tuple[str, Place]:
    """Read what `write_about` wrote: the text, and the place that it is about."""
    text, place = about.leaf
    return str(text), read_place(str(place).replace(_INNER, BREAK))


@functools.cache
def read_place(text: str) -> Place:
    """Read what the steps of `write_step` wrote after a port."""
    port, *steps = text.removeprefix(WITHOUT).split(BREAK)
    leaf = tuple(int(one[1:]) if one[0] == "#" else one[1:] for one in steps)
    return Place(port, leaf, not text.startswith(WITHOUT))


Gradient = Callable[[Tensor], None]
"""Who is told the gradient of a value that was handed over."""


Ready = Callable[[Sequence[Tensor]], bool]
"""Hear values that have come together before, in few steps; false where that takes more."""


class Ear:
    """Whoever hears what operators with its key deliver."""

    __slots__ = ("__weakref__", "key", "number", "ready", "told")

    made = 0
    """How many there have been: with another one, an address may be that of another key."""

    def __init__(self, device: torch.device) -> None:
        self.number = next(_numbers)
        with torch.inference_mode(False):  # it goes into graphs with grad
            self.key = torch.full((1,), self.number, dtype=torch.int64, device=device)
        """Tells at run time whose a delivery is: by where it lies in memory, and, where hooks on
        saved tensors have made a copy, by the number in it. That is negative when it has ended."""
        self.ready: dict[tuple[str, tuple[int, ...]], tuple[int, Ready]] = {}
        """Who hears values that come together, where this is the first of their ears."""
        self.told: OrderedDict[int, Gradient] | None = None
        """By ticket, who is to be told of a gradient; of tickets that may have been copied."""
        Ear.made += 1
        address = self.key.data_ptr()
        _ears[address] = self
        _numbered[self.number] = self
        if device.type != "cpu":
            _keys[address] = self.key
        dynamo = sys.modules.get("torch._dynamo")
        if device.type == "cuda" and dynamo is not None:
            dynamo.mark_static_address(self.key, guard=False)  # CUDA graphs need not copy it

    def hear(self, tensor: Tensor, place: Place) -> None:
        """Receive a value or a gradient (its port ends in `.grad`), in passing."""

    @classmethod
    def hear_all(cls, heard: Sequence[tuple[Any, Tensor, Place]]) -> Ready | None:
        """Have ears of this kind receive values that come together.

        Gives who can hear the same next time without asking them one by one, if somebody can.
        """
        for ear, tensor, place in heard:
            ear.hear(tensor, place)
        return None

    def take(self, tensor: Tensor, place: Place) -> Gradient | None:
        """Receive a value; give who is to be told its gradient."""
        self.hear(tensor, place)
        return lambda grad: self.hear(grad, Place(f"{place.port}.grad", place.leaf))

    def note(self, place: Place, shape: Sequence[int]) -> None:
        """Learn that something is done to a value of this shape, inside the graph."""


_numbers = itertools.count(1)
_ears: weakref.WeakValueDictionary[int, Ear] = weakref.WeakValueDictionary()
"""By where their keys lie in memory."""
_numbered: weakref.WeakValueDictionary[int, Ear] = weakref.WeakValueDictionary()
_keys: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""The keys that cannot be read without a wait for the device, by where they lie in memory."""
_address = Tensor.data_ptr


def find_ear(key: Tensor) -> Ear | None:
    """Give the ear of a key, if there is one still."""
    address = key.data_ptr()
    ear = _ears.get(address)
    if ear is not None or address in _keys:  # else the ear has ended, or this is a copy
        return ear
    if key.dtype != torch.int64 or key.numel() != 1 or is_capturing_cuda_graph(key):
        return None
    return _numbered.get(abs(int(key)))


@run_uncompiled
def show(value: Tensor, key: Tensor, place: str) -> None:
    """Show a value to the ear with a key."""
    ear = find_ear(key)
    if ear is not None:
        ear.hear(value, read_place(place))


@run_uncompiled
def show_all(values: Sequence[Tensor], keys: Sequence[Tensor], places: str) -> None:
    """Show several values at once; the compiler puts this in the place of several calls."""
    called = places, tuple(map(_address, keys))
    first = _ears.get(called[1][0])
    ready = None if first is None else first.ready.get(called)
    if ready is not None and ready[0] == Ear.made and ready[1](values):
        return
    made = Ear.made
    for kind, group in itertools.groupby(_find_all(values, keys, places), lambda one: type(one[0])):
        heard = list(group)
        new = kind.hear_all(heard)
        if new is not None and len(heard) == len(keys):
            _keep_ready(heard[0][0], called, (made, new))


def _find_all(
    values: Sequence[Tensor], keys: Sequence[Tensor], places: str
) -> Iterator[tuple[Ear, Tensor, Place]]:
    for value, key, place in zip(values, keys, _read_places(places), strict=True):
        ear = find_ear(key)
        if ear is not None:
            yield ear, value, place


def _keep_ready(ear: Ear, called: tuple[str, tuple[int, ...]], ready: tuple[int, Ready]) -> None:
    if any(one[0] != ready[0] for one in tuple(ear.ready.values())):
        ear.ready = {}
    ear.ready[called] = ready


@functools.cache
def _read_places(text: str) -> tuple[Place, ...]:
    return tuple(map(read_place, text.split(BETWEEN)))
