"""Decorators taken off a function to reach the one inside, and put around another in its place."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from hookline.sources.readings import NoSource

_CALL_WITH_STARS = dis.opmap["CALL_FUNCTION_EX"]


def unwrap(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """List a function and what it wraps, step by step, down to the innermost Python function."""
    chain, seen = [function], {id(function)}
    while True:
        inner = _wrapped_by(chain[-1])
        if inner is None or id(inner) in seen:
            return chain
        chain.append(inner)
        seen.add(id(inner))


def _wrapped_by(function: Any) -> Any:
    if isinstance(function, (MethodType, staticmethod, classmethod)):
        return function.__func__
    # Looked up in the object's own dictionary, because an object may answer to any attribute.
    own = getattr(function, "__dict__", {})
    wrapped = own.get("__wrapped__")
    if wrapped is not None:
        return _held_wrapper_of(function, wrapped)
    if isinstance(function, (functools.partial, functools.partialmethod)):
        return function.func
    if isinstance(function, FunctionType):
        return _wrapped_without_saying(function)
    return None


def _held_wrapper_of(function: Any, wrapped: Any) -> Any:
    """Give what a wrapper really calls; its `__wrapped__` may skip other wrappers on the way.

    `functools.wraps` on a function that holds no other only borrows that one's name and docstring.
    """
    if not isinstance(function, FunctionType):
        return wrapped
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    is_default = any(each is wrapped for each in defaults)
    if set(function.__code__.co_freevars) <= {"__class__"} and not is_default:
        return None
    held = [each for each in _cell_values(function) if _is_function(each)]
    if any(each is wrapped for each in held):
        return wrapped
    between = [each for each in held if any(inner is wrapped for inner in _told_by(each))]
    return between[0] if len(between) == 1 else wrapped


def _told_by(function: Any) -> list[Any]:
    """List what is inside a function by the `__wrapped__` of each."""
    inside: list[Any] = []
    while function is not None and not any(function is each for each in inside):
        inside.append(function)
        function = getattr(function, "__dict__", {}).get("__wrapped__")
    return inside


def _wrapped_without_saying(function: FunctionType) -> Any:
    """Give the function that a decorator without `functools.wraps` closed over.

    A closure may also hold a function that it merely uses. A wrapper is told from that by taking
    the same arguments, or any, and passing them on.
    """
    own_scope = function.__code__.co_qualname.rpartition(".")[0]
    held = [
        each
        for each in _cell_values(function)
        if _is_function(each) and each.__code__.co_qualname.rpartition(".")[0] != own_scope
    ]
    if "<locals>" not in own_scope or len(held) != 1:
        return None
    code, inner = function.__code__, held[0].__code__
    takes_any = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    if takes_any and _CALL_WITH_STARS in code.co_code[::2]:
        return held[0]
    return held[0] if _parameters(code) == _parameters(inner) and code.co_argcount else None


def _is_function(value: Any) -> bool:
    """Tell a Python function, bound to an object or not."""
    function = value.__func__ if isinstance(value, MethodType) else value
    return isinstance(function, FunctionType)


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _cell_values(function: FunctionType) -> list[Any]:
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # a variable not assigned yet
            continue
    return values


def rewrap(chain: list[Callable[..., Any]], new: Callable[..., Any]) -> Callable[..., Any]:
    """Put copies of the wrappers of a chain around another function than its innermost one."""
    old = chain[-1]
    for wrapper in reversed(chain[:-1]):
        new, old = _exchange(wrapper, old, new), wrapper
    return new


def check_exchangeable(chain: list[Callable[..., Any]]) -> None:
    """Raise for a chain with a wrapper that `rewrap` cannot copy."""
    rewrap(chain, chain[-1])


class _Exchange:
    """Put one function in the place of another, and know whether that was met at all."""

    def __init__(self, old: Any, new: Any) -> None:
        self.old, self.new, self.is_met = old, new, False

    def __call__(self, value: Any) -> Any:
        # A method bound twice gives two objects that are equal.
        if value is self.old or (isinstance(value, MethodType) and value == self.old):
            self.is_met = True
            return self.new
        return value

    def each(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: self(value) for name, value in values.items()}

    def cell(self, cell: CellType) -> CellType:
        try:
            value = cell.cell_contents
        except ValueError:
            return cell
        new = self(value)
        return cell if new is value and new is not self.new else CellType(new)


def _exchange(wrapper: Any, old: Any, new: Any) -> Any:
    """Copy a wrapper so that it holds the new function wherever it holds the old one."""
    if isinstance(wrapper, MethodType):
        return MethodType(new, wrapper.__self__)
    if isinstance(wrapper, (staticmethod, classmethod)):
        return type(wrapper)(new)
    put = _Exchange(old, new)
    copied: Any = None
    if isinstance(wrapper, (functools.partial, functools.partialmethod)):
        make: Any = type(wrapper)
        copied = make(put(wrapper.func), *map(put, wrapper.args), **put.each(wrapper.keywords))
        vars(copied).update(put.each(vars(wrapper)) if put.is_met else {})
    elif isinstance(wrapper, FunctionType):
        cells = tuple(put.cell(cell) for cell in wrapper.__closure__ or ())
        copied = copy_function(wrapper, wrapper.__code__, cells)
        copied.__defaults__ = wrapper.__defaults__ and tuple(map(put, wrapper.__defaults__))
        copied.__kwdefaults__ = wrapper.__kwdefaults__ and put.each(wrapper.__kwdefaults__)
        vars(copied).update(put.each(vars(wrapper)) if put.is_met else {})
    if not put.is_met:
        name = type(wrapper).__name__
        if isinstance(wrapper, FunctionType):  # whose own name `functools.wraps` wrote over
            name = wrapper.__code__.co_qualname.partition(".<locals>")[0]
        raise NoSource(
            f"the decorator `{name}` does not hold the function where it can be exchanged"
        )
    return copied


def copy_function(
    function: FunctionType, code: CodeType, closure: tuple[CellType, ...] | None
) -> FunctionType:
    """Make a function of other code and cells that is the same in all else."""
    new = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    new.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    new.__qualname__ = function.__qualname__
    new.__module__ = function.__module__
    new.__doc__ = function.__doc__
    if getattr(function, "__annotate__", None) is not None:
        # From Python 3.14 on, reading the annotations evaluates them.
        new.__annotate__ = function.__annotate__  # type: ignore[attr-defined]
    else:
        new.__annotations__ = function.__annotations__
    if hasattr(function, "__type_params__"):
        new.__type_params__ = function.__type_params__  # type: ignore[attr-defined]
    vars(new).update(vars(function))
    return new
