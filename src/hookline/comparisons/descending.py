"""Descend into a module that differs: the first of its operations that does, and its line.

Both modules run on A's input, and their operations are put side by side. The first one whose
result differs while what it was given agrees is the one; in backward the same from the end, by the
gradients.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hookline.addresses import format_place
from hookline.addresses.inside import canonical_operation
from hookline.addresses.pattern import escape
from hookline.comparisons.grafting import Graft
from hookline.comparisons.operations import Call
from hookline.comparisons.pairing import pair_calls, sizes_of
from hookline.comparisons.rerunning import rerun
from hookline.diffs.measuring import relative_error

_ROUNDINGS = 16
"""How many units of rounding an operation may differ by on the same input."""
_SHARE = 0.05
"""What part of the module's difference an operation must have to be the one."""
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.MatMult: "matmul",
    ast.Pow: "pow",
}
_MOST_CALLS = 20_000
"""A forward with more operations is not descended into."""


@dataclass(frozen=True, slots=True)
class Descent:
    """The operation where two modules part."""

    operation: str
    """Its address in A: `blocks.5.attn/softmax`."""

    source: str = ""
    """The line in A: `model.py:48`."""

    source_b: str = ""
    """The line in B."""

    causes: tuple[str, ...] = ()
    """What differs in how it is called."""

    variable: str = ""
    """The variable that its result is assigned to, as an address: `blocks.5.attn@scores`."""

    children: tuple[str, str] | None = None
    """The paths in A and B where it is a child of both modules."""

    number: int = 0
    """Which call of the child it is."""


def descend(
    graft: Graft,
    *,
    backward: bool,
    limit: float,
    error: float,
    names: Mapping[str, str] | None = None,
) -> Descent | None:
    """Find the operation that differs; None where none of the module's own does.

    `names` says what modules of A are called in B.
    """
    caught = graft.call
    gradients = caught.gradients if backward else None
    a = rerun(
        caught.module, caught, (caught.args, caught.kwargs), gradients=gradients, is_noted=True
    ).calls
    b = rerun(graft.module_b, caught, graft.arguments, gradients=gradients, is_noted=True).calls
    if max(len(a), len(b)) > _MOST_CALLS or not (a or b):
        return None
    if not a or not b:  # one of them hands on what it is given
        last = len(a) - 1 if a else None, len(b) - 1 if b else None
        return _tell(graft, last, (a, b), is_pair=False)
    own = {
        _tail(there, graft.path_b): _tail(here, caught.path)
        for here, there in (names or {}).items()
    }
    pairs = _Pairs(a, b, limit=limit, error=error, names=own)
    found = pairs.first_backward() if backward else pairs.first_forward()
    if found is None:
        return None
    is_pair = found[0] is not None and pairs.to_b.get(found[0]) == found[1]
    return _tell(graft, found, (a, b), is_pair=is_pair)


class _Pairs:
    """The operations of two forwards, side by side."""

    def __init__(
        self,
        a: Sequence[Call],
        b: Sequence[Call],
        *,
        limit: float,
        error: float,
        names: Mapping[str, str],
    ) -> None:
        self.a = a
        self.b = b
        self._limit = limit
        self._error = error
        self.to_b = pair_calls(a, b, names, self._agree)

    def _threshold(self, tensor: Tensor) -> float:
        unit = torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point else 0.0
        wanted = self._error * _SHARE if self._error < 1 else self._limit
        return max(_ROUNDINGS * unit / 2, min(wanted, self._limit))

    def _agree(self, one: Call, other: Call) -> bool:
        return all(
            relative_error(x, y.reshape(x.shape)) <= self._threshold(x)
            for x, y in zip(one.results, other.results, strict=False)
            if x is not None and y is not None
        )

    def differs(self, index: int) -> bool:
        """Tell whether the results of an operation of A and its partner differ."""
        one, other = self.a[index], self.b[self.to_b[index]]
        return sizes_of(one) != sizes_of(other) or not self._agree(one, other)

    def first_forward(self) -> tuple[int | None, int | None] | None:
        """Find the first operation that differs: its number in A and in B, None where alone."""
        for index in sorted(self.to_b):
            if not self.differs(index):
                continue
            other = self.to_b[index]
            to_a = {there: here for here, there in self.to_b.items()}
            lone_a = self._lone(self.a, index, self.to_b)
            lone_b = self._lone(self.b, other, to_a)
            if lone_a is None and lone_b is None:
                return index, other
            return lone_a, lone_b
        return self._first_alone()

    def _lone(self, calls: Sequence[Call], index: int, known: dict[int, int]) -> int | None:
        """Find the first operation without a partner that a result comes from."""
        waiting, seen, alone = list(calls[index].inputs), set(), []
        while waiting:
            one = waiting.pop()
            if one < 0 or one in seen or one in known:
                continue
            seen.add(one)
            alone.append(one)
            waiting += calls[one].inputs
        return min(alone, default=None)

    def _first_alone(self) -> tuple[int | None, int | None] | None:
        """Find the last operations without a partner, where all that have one agree."""
        a = [index for index in range(len(self.a)) if index not in self.to_b]
        taken = set(self.to_b.values())
        b = [index for index in range(len(self.b)) if index not in taken]
        if not a and not b:
            return None
        return (a[0] if a else None), (b[0] if b else None)

    def first_backward(self) -> tuple[int | None, int | None] | None:
        """Find the operation that sends another gradient to what it was given.

        A result whose gradient differs while those of all that was made of it agree: the one that
        it was given to is to blame; of several, one that is written otherwise.
        """
        stopped = self._first_stop()
        if stopped is not None:
            return stopped
        for index in sorted(self.to_b, reverse=True):
            if self._gradient_differs(index):
                return self._blame(index)
        # Only the gradients of the inputs differ: it is an operation that takes one.
        return self._blame(-1)

    def _first_stop(self) -> tuple[int | None, int | None] | None:
        """Find the first operation that lets no gradient through on one side alone."""
        for index, one in enumerate(self.a):
            other = self.to_b.get(index)
            if one.stops_gradient != (other is not None and self.b[other].stops_gradient):
                return index, other
        taken = set(self.to_b.values())
        for index, one in enumerate(self.b):
            if one.stops_gradient and index not in taken:
                return None, index
        return None

    def _gradient_differs(self, index: int) -> bool:
        one, other = self.a[index], self.b[self.to_b[index]]
        if bool(one.gradients) != bool(other.gradients):
            return True
        return any(
            number in other.gradients
            and grad.numel() == other.gradients[number].numel()
            and relative_error(grad, other.gradients[number].reshape(grad.shape))
            > self._threshold(grad)
            for number, grad in one.gradients.items()
        )

    def _blame(self, value: int) -> tuple[int | None, int | None] | None:
        partner = self.to_b.get(value, -1)
        takers = [at for at, one in enumerate(self.a) if value in one.inputs]
        takers_b = [at for at, one in enumerate(self.b) if partner in one.inputs]
        odd: list[tuple[int | None, int | None]] = []
        alike: list[tuple[int, int]] = []
        for at in takers:
            other = self.to_b.get(at)
            if other is None:
                odd.append((at, None))
            elif other in takers_b:  # else something stands between on one side
                takers_b.remove(other)
                is_alike = _is_alike(self.a[at], self.b[other])
                (alike if is_alike else odd).append((at, other))
        taken = {self.to_b[at] for at in takers if at in self.to_b}
        odd += [(None, at) for at in takers_b if at not in taken]
        if odd:
            return odd[0] if len(odd) == 1 else None
        children = [pair for pair in alike if self.a[pair[0]].is_child]
        chosen = children if len(children) == 1 else alike
        return chosen[0] if len(chosen) == 1 else None


def _is_alike(one: Call, other: Call) -> bool:
    return (
        (one.name == other.name or (one.is_child and other.is_child))
        and dict(one.arguments) == dict(other.arguments)
        and one.wants_gradient == other.wants_gradient
    )


def _tell(
    graft: Graft,
    found: tuple[int | None, int | None],
    calls: tuple[list[Call], list[Call]],
    *,
    is_pair: bool,
) -> Descent:
    at_a, at_b = found
    one = None if at_a is None else calls[0][at_a]
    other = None if at_b is None else calls[1][at_b]
    path = graft.call.path
    causes = []
    if one is None:
        assert other is not None
        causes.append(f"{_word(other)} only in B{_at(other.line.place)}")
    elif other is None:
        causes.append(f"{_word(one)} only in A{_at(one.line.place)}")
    elif one.name != other.name and not (is_pair and one.is_child and other.is_child):
        causes.append(f"{_word(one)} here, {_word(other)} there")
    else:
        causes += compare_arguments(one, other)
    told = one or other
    assert told is not None
    side = calls[0] if one is not None else calls[1]
    children = None
    if is_pair and one is not None and other is not None and one.is_child and other.is_child:
        children = _join(path, one.name), _join(graft.path_b, other.name)
    return Descent(
        operation=_address(path, told, side),
        children=children,
        number=told.number,
        source="" if one is None else (one.line.place or graft.call.line.place),
        source_b="" if other is None else (other.line.place or graft.line_b),
        causes=tuple(causes),
        variable=_variable(path, told),
    )


def _tail(path: str, above: str) -> str:
    """Give a path from a module on; one that is not below it stays as it is."""
    return path.removeprefix(f"{above}.") if above else path


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _word(call: Call) -> str:
    return f"`{call.name}`"


def _at(place: str) -> str:
    return f" ({place})" if place else ""


def _address(path: str, call: Call, side: Sequence[Call]) -> str:
    if call.is_child:
        return escape(_join(path, call.name))
    is_only = sum(1 for one in side if one.name == call.name) <= 1
    number = "" if is_only else f"[{call.number}]"
    return format_place(escape(path), f"/{call.name}{number}", ())


def compare_arguments(one: Call, other: Call) -> list[str]:
    """Say which plain arguments of an operation differ."""
    found = []
    for name in {**one.arguments, **other.arguments}:
        here, there = (call.arguments.get(name, "not given") for call in (one, other))
        if here != there or type(here) is not type(there):
            found.append(f"{name}={_show(here)} here, {_show(there)} there")
    return found


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value) if isinstance(value, torch.dtype) or value == "not given" else repr(value)


def _variable(path: str, call: Call) -> str:
    """Name the variable that an operation's result is assigned to, where one line says so."""
    try:
        [statement] = ast.parse(call.line.text).body
    except (SyntaxError, ValueError):
        return ""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return ""
    target, value = statement.targets[0], statement.value
    called = ""
    if isinstance(value, ast.BinOp):
        called = _OPERATORS.get(type(value.op), "")
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        called = canonical_operation(value.func.attr)
    if not isinstance(target, ast.Name) or called != call.name:
        return ""
    return f"{escape(path)}@{target.id}"
