"""What a function without source computes, read from its bytecode: the operations behind a name.

A help for messages only. It follows one straight line through the instructions and knows which
operation left the value that is stored under a name.
"""

from __future__ import annotations

import dis
import types
from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

from hookline.sources import unwrap

_OPERATORS = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "div",
    "@": "matmul",
    "**": "pow",
    "//": "floor_divide",
    "%": "remainder",
    "&": "bitwise_and",
    "|": "bitwise_or",
    "^": "bitwise_xor",
}
_SUBSCRIPTS = ("BINARY_SUBSCR", "BINARY_SLICE")
_CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
_NAMES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")


class _Result(NamedTuple):
    operation: str
    number: int
    stored: str | None


def describe_operations(
    function: Callable[..., Any], name: str, path: str, modules: Container[str] = ()
) -> str:
    """Say which addresses reach what a function stores under a name: operations, or `modules`."""

    def write(one: _Result) -> str:
        if one.operation in modules:
            return f"`{path}.{one.operation}`" if path else f"`{one.operation}`"
        return f"`{path}/{one.operation}[{one.number}]`"

    code = getattr(unwrap(function)[-1], "__code__", None)
    if not isinstance(code, types.CodeType):
        return f"`{path}/*` lists those that run."
    results = list(_results(code))
    same = [one for one in results if one.stored == name]
    if same:
        shown = ", ".join(map(write, same))
        return f"{shown} is what is assigned to `{name}`."
    if not results:
        return f"`{path}/*` lists those that run."
    shown = ", ".join(map(write, results[:12]))
    return f"{shown}{', ...' if len(results) > 12 else ''}."


def list_operations(function: Callable[..., Any]) -> list[str]:
    """List what a function may call, by name, as far as its bytecode tells."""
    code = getattr(unwrap(function)[-1], "__code__", None)
    return [one.operation for one in _results(code)] if isinstance(code, types.CodeType) else []


def _results(code: types.CodeType) -> Iterator[_Result]:
    counts: Counter[str] = Counter()
    pending: str | None = None
    names: list[str] = []
    is_after_name = False
    for instruction in dis.get_instructions(code):
        operation = None
        was_after_name, is_after_name = is_after_name, instruction.opname in _NAMES
        if instruction.opname == "BINARY_OP" and was_after_name:
            names.pop()  # an operand, nothing that is called
        if instruction.opname == "BINARY_OP":
            sign = instruction.argrepr.removesuffix("=")
            operation = "getitem" if sign == "[]" else _OPERATORS.get(sign)
        elif instruction.opname in _SUBSCRIPTS:
            operation = "getitem"
        elif instruction.opname in _CALLS and names:
            operation = names.pop()
        elif instruction.opname in _NAMES:
            name = str(instruction.argval)
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and was_after_name:
                names[-1] = name
            else:
                names.append(name)
        elif instruction.opname.startswith("STORE_") and pending is not None:
            yield _Result(pending, counts[pending] - 1, str(instruction.argval))
            pending = None
            continue
        elif instruction.opname.startswith("RETURN") and pending is not None:
            yield _Result(pending, counts[pending] - 1, "return")
            pending = None
            continue
        if operation is not None:
            if pending is not None:
                yield _Result(pending, counts[pending] - 1, None)
            counts[operation] += 1
            pending = operation
    if pending is not None:
        yield _Result(pending, counts[pending] - 1, None)
