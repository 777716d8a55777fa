"""What a replay notes of operations: where each was called, and what came of it.

An event is a non-finite value that was not there before; the tensors that carry it on refer to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hookline.addresses import format_place
from hookline.replays.places import SourceLine

BAD, LOW, MASK, RAW = "bad", "low", "mask", "raw"
"""Levels of an event: it is wrong; -inf that is wrong if more comes of it; infinities written on
purpose; memory that nobody has filled."""


class Execution:
    """One execution of a module's forward: how often each operation was called."""

    __slots__ = ("counts", "frame", "module", "number")

    def __init__(self, module: nn.Module | None, number: int, frame: int = 0) -> None:
        self.module = module
        self.number = number
        self.frame = frame
        self.counts: dict[str, int] = {}


@dataclass(slots=True, eq=False)
class Operation:
    """One operation that was called: what it is, and where."""

    name: str
    """Its name, as addresses have it; that of the autograd function it is inside of."""
    called: str
    """What torch calls it."""
    path: str
    """The address of the module whose forward calls it."""
    line: SourceLine
    """The line of the user's code."""
    execution: Execution
    """The execution of the module it is part of."""
    index: int = -1
    """Which call of that operation there it was; -1 where it has no address of its own."""

    def site(self, port: str = "", leaf: tuple[str | int, ...] = ()) -> str:
        """Write its address; the number is left out where there is no other."""
        if self.index < 0:
            return self.path
        is_only = self.execution.counts.get(f"/{self.name}", 0) <= 1
        number = "" if is_only else f"[{self.index}]"
        return format_place(self.path, f"/{self.name}{number}{port}", leaf, is_grad=bool(port))


@dataclass(slots=True, eq=False)
class Event:
    """A non-finite value that was not there before."""

    level: str
    kind: str
    """`nan` or `inf`."""
    cause: str
    """`operation`, `input` or `parameter`."""
    operation: Operation
    """The operation that made it, or met it first."""
    site: str = ""
    """The address of an input or a parameter; that of the operation otherwise."""
    why: str = ""
    inputs: list[dict[str, Any]] = field(default_factory=list)
    output: dict[str, Any] = field(default_factory=dict)
    evidence: list[str] = field(default_factory=list)
    has_left: bool = False
    """Whether an operation of another module was given it."""
    order: int = 0
    """Its place among the events of a replay."""
