"""What ran inside a forward with an example: each value, how it looked, and from where it came.

Keeps no tensors: a value becomes a word or two as it passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline import _trees
from hookline.addresses import Inside, ModuleEntry, ModuleTree, parse_port
from hookline.hooks.frames import CALL_CODE
from hookline.hooks.junctions import Junction
from hookline.hooks.sessions import Session
from hookline.hooks.visits import Listener, Station, Visit
from hookline.sources.taps import TAPS
from hookline.surveys.examples import ExampleRun

_MOST_SHAPES = 3


class Spot(NamedTuple):
    """One line of one function on the way to a value."""

    file: str
    first_line: int
    """Where the function begins."""
    line: int
    is_tapped: bool
    """Whether it is a copy of the function that hands its variables over."""


class Event(NamedTuple):
    """One value inside a forward."""

    inside: Inside
    """The variable or operation, with its number."""
    visit: tuple[int, int | None]
    """The call of the model, and the execution of the module in it."""
    look: str
    """Its shape, or what it is."""
    spots: tuple[Spot, ...]
    """The lines that led to it, innermost first."""


class Trace:
    """What one module's forward did."""

    def __init__(self, entry: ModuleEntry, names: Sequence[str]) -> None:
        self.entry = entry
        self.ports = [*(f"@{name}" for name in names), "/*", "output"]
        self.prefixes = [name.removesuffix("**") for name in names if name.endswith(".**")]
        self.events: list[Event] = []
        self.visits: set[tuple[int, int | None]] = set()
        self.functions: dict[str, list[Callable[..., Any]]] = {}
        """The functions that were called under a name which alone does not tell."""

    def called(self, name: str) -> list[Callable[..., Any]]:
        """List the functions that were called under a name."""
        return self.functions.get(f"{name}.", [])

    def leave_out_operations(self) -> None:
        """Forget what ran, and listen to variables alone the next time."""
        self.ports = [port for port in self.ports if port[0] != "/"]
        self.events.clear()
        self.visits.clear()


class _Tracer(Listener):
    """Note what passes at one variable, or at every operation."""

    __slots__ = ("trace",)

    def __init__(self, session: Session, station: Station, port: str, trace: Trace) -> None:
        super().__init__(session, station, port, values=True, gradients=False, stage=2)
        self.trace = trace

    def on_value(self, visit: Visit, module: nn.Module, port: str, value: Any) -> Any:
        when = visit.call.index, visit.index
        self.trace.events.append(
            Event(parse_port(port), when, describe(value), _spots(sys._getframe(1)))
        )
        return value

    def on_output(
        self,
        visit: Visit,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        trace = self.trace
        trace.visits.add((visit.call.index, visit.index))
        if trace.prefixes:
            junction = self.station.junction or Junction.find(self.station.module)
            assert junction is not None
            for prefix in trace.prefixes:
                trace.functions[prefix] = junction.callees.called(prefix)
        return output


def trace_example(
    model: nn.Module, tree: ModuleTree, traces: Sequence[Trace], example: Any
) -> None:
    """Run the model once and fill the traces."""
    run = ExampleRun(model, tree, "hl.source")
    for trace in traces:
        station = run.session.station(trace.entry.names, trace.entry.module)
        for port in trace.ports:
            run.session.listen(_Tracer(run.session, station, port, trace))
    run.start(example)


def _spots(frame: FrameType | None) -> tuple[Spot, ...]:
    found = []
    while frame is not None and frame.f_code is not CALL_CODE:
        code = frame.f_code
        found.append(
            Spot(code.co_filename, code.co_firstlineno, frame.f_lineno, TAPS in code.co_freevars)
        )
        frame = frame.f_back
    return tuple(found)


def describe(value: Any) -> str:
    """Say in a word or two what a value is: `2x4x8`, `2x4 int64`, `(2x4, 2x4)`, `int`."""
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    tensors = [tensor for _, tensor in _trees.leaves(value)]
    kind = type(value).__name__
    if not tensors:
        return "None" if value is None else kind
    name = "" if kind in ("tuple", "list") else kind
    if len(tensors) > _MOST_SHAPES:
        return f"{name or kind} of {len(tensors)} tensors"
    return f"{name}({', '.join(map(_describe_tensor, tensors))})"


def _describe_tensor(tensor: Tensor) -> str:
    shape = "not initialized" if is_lazy(tensor) else "x".join(map(str, tensor.shape)) or "scalar"
    if tensor.dtype == torch.get_default_dtype():
        return shape
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
