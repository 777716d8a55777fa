"""The functions that a forward calls and whose variables can be named: `@helper.w`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional

from hookline._errors import NoSuchSite
from hookline.addresses.variables import called_function
from hookline.sources import Callee, NoSource, Reading, read
from hookline.surveys.naming import is_of_torch, qualified_name

_WHEN_CALLED = "which function it is shows when it is called"


class Helper(NamedTuple):
    """One call of a function that can be entered."""

    name: str
    """What follows the `@`, without the variable."""
    call: str
    """The call as it is written: `F.softmax(...)`."""
    line: int
    note: str = ""
    is_of_torch: bool = False
    size: int = 0
    """How many variables it has."""


def find_function(
    module: nn.Module | None, reading: Reading, name: str, path: str
) -> Callable[..., Any] | None:
    """Find the function that forward calls under a name; None where only a call would tell."""
    for callee in reading.callees:
        if name == callee.name:
            return called_function(callee, module)
        if name.startswith(f"{callee.name}."):
            function = called_function(callee, module)
            if function is None:
                return None
            owner = module if callee.function is None else None
            rest = name[len(callee.name) + 1 :]
            return find_function(owner, read(function), rest, f"{path}@{callee.name}")
    names = list(dict.fromkeys(reading.called))
    if name in reading.names:
        reason = f"`{name}` is a variable of this forward; its source is shown with all of it"
    else:
        reason = f"this forward calls no `{name}`"
    shown = ", ".join(f"`{one}`" for one in names) or "nothing"
    raise NoSuchSite(f"`{path}@{name}`: {reason}. It calls: {shown}.")


def late_names(reading: Reading) -> list[str]:
    """List the calls of which only a run tells what is called."""
    return list(dict.fromkeys(callee.name for callee in reading.callees if _is_late(callee)))


def _is_late(callee: Callee) -> bool:
    return callee.function is None and callee.expression.isidentifier()


def list_helpers(
    module: nn.Module,
    reading: Reading,
    inside: str | None,
    late: Mapping[str, list[Callable[..., Any]]] | None,
) -> list[Helper]:
    """List the calls of functions that can be entered, each name once.

    `late` has the functions that a run found behind names; without a run, such a name is listed.
    """
    loops = {point.name for point in reading.points if point.kind in ("loop", "comprehension")}
    prefix = "" if inside is None else f"{inside}."
    found: dict[str, Helper] = {}
    for callee in reading.callees:
        if callee.name in found:
            continue
        for helper in _helpers_of(callee, module, loops, late, is_inner=inside is not None):
            found[callee.name] = helper._replace(name=prefix + helper.name)
    return list(found.values())


def _helpers_of(
    callee: Callee,
    module: nn.Module,
    loops: set[str],
    late: Mapping[str, list[Callable[..., Any]]] | None,
    *,
    is_inner: bool,
) -> Iterator[Helper]:
    helper = Helper(callee.name, f"{callee.expression}(...)", callee.line)
    function = called_function(callee, module)
    if function is None:
        if not _is_late(callee) or callee.name in loops:
            return
        if late is None or is_inner:
            yield helper._replace(note=_WHEN_CALLED)
            return
        for each in late.get(f"{callee.name}.", []):
            size = _count_variables(each)
            if size:
                note = f"called {qualified_name(each)} here"
                yield helper._replace(note=note, size=size)
        return
    size = _count_variables(function)
    if size and not is_of_torch(function):
        yield helper._replace(size=size)
    elif size and _is_public(function):
        yield helper._replace(is_of_torch=True, size=size)


def _count_variables(function: Callable[..., Any]) -> int:
    if isinstance(function, (nn.Module, type)):
        return 0
    try:
        return len(read(function).points)
    except NoSource:
        return 0


def _is_public(function: Callable[..., Any]) -> bool:
    """Tell whether a function of torch is one that computes, not one that looks after things."""
    name = qualified_name(function)
    is_there = getattr(functional, name, None) is function
    return is_there and name[0] != "_" and function.__module__ == functional.__name__
