"""Names inside a module's `forward`: a variable `@scores[1]`, an operation `/softmax[0]`.

    @scores          every assignment of a variable; `@scores[1]` the second, `@scores[-1]` the last
    @inner.z         a variable of a function that forward defines or calls
    @return  @x      what forward returns; an argument
    @self.cache      what forward assigns to an attribute
    /softmax         every call of an operation; `/softmax[1]` the second, `/softmax:input` its
                     arguments
    @*  @inner.*  /* many; `*` stays inside one name, `@**` takes those of inner functions too

Where a site needs one word for the place of a value, its port, a name inside is written as above:
the ports of a module are `input`, `output`, `@scores[1]`, `/softmax[0]`, `/softmax[0]:input`.
This file knows text only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from hookline._errors import AddressError
from hookline.addresses.pattern import compile_path

MARKS = ("@", "/")
_INPUT = ":input"
_SYNONYMS = {
    "absolute": "abs",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "true_divide": "div",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "multiply": "mul",
    "negative": "neg",
    "subtract": "sub",
    "rsub": "sub",
}
_REFLECTED = frozenset(
    [
        "add",
        "sub",
        "mul",
        "matmul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
        "div",
    ]
)
"""Operators that Python also knows reversed (`__radd__`) and in place (`__iadd__`)."""

_NAME = re.compile(r"[\w*?]+(?:\.[\w*?]+)*")
_INDEX = re.compile(r"\[(-?[0-9]+)\]")


class Inside(NamedTuple):
    """Hold the parts of a name inside `forward`."""

    mark: str
    """`@` for a variable, `/` for an operation."""

    name: str
    """Its name, or a pattern of names."""

    number: int | None = None
    """Which assignment or call within one visit; None for every one."""

    is_input: bool = False
    """Whether it is the arguments of an operation, not its result."""

    def __str__(self) -> str:
        number = "" if self.number is None else f"[{self.number}]"
        return f"{self.mark}{self.name}{number}{_INPUT if self.is_input else ''}"

    @property
    def is_exact(self) -> bool:
        """Whether it names one variable or operation, not a pattern of them."""
        return "*" not in self.name and "?" not in self.name

    @property
    def matches(self) -> Callable[[str], object]:
        """Give a test that is true for the names it means."""
        return self.name.__eq__ if self.is_exact else compile_path(self.name)


def canonical_operation(name: str) -> str:
    """Give the one name of an operation that torch and Python know under several.

    >>> canonical_operation("__rtruediv__"), canonical_operation("true_divide_")
    ('div', 'div_')
    """
    if name.startswith("__") and name.endswith("__"):
        bare = name.strip("_")
        if bare[1:] in _REFLECTED:
            return canonical_operation(bare[1:]) + ("_" if bare[0] == "i" else "")
        return _SYNONYMS.get(bare, bare)
    bare = name.removesuffix("_")
    return _SYNONYMS.get(bare, bare) + name[len(bare) :]


def is_inside(port: str) -> bool:
    """Tell whether a port is a name inside `forward`."""
    return port[0] in MARKS


@functools.lru_cache(maxsize=4096)
def parse_port(port: str) -> Inside:
    """Read a port that is a name inside `forward`.

    >>> parse_port("/softmax[1]:input")
    Inside(mark='/', name='softmax', number=1, is_input=True)
    """
    is_input = port.endswith(_INPUT)
    inside, _ = read_inside(port.removesuffix(_INPUT), 0)
    return inside._replace(is_input=is_input)


def read_inside(text: str, start: int) -> tuple[Inside, int]:
    """Read the name inside `forward` that starts at a mark; give it and where it ends."""
    mark = text[start]
    what = "a variable" if mark == "@" else "an operation"
    found = _NAME.match(text, start + 1)
    if found is None:
        raise AddressError(
            f"the name of {what} follows `{mark}`, as in `attn@scores` or `attn/softmax`; "
            rf"if `{mark}` is part of a module's name, write `\{mark}`",
            text,
            min(start + 1, len(text) - 1),
        )
    name, end = found[0], found.end()
    if mark == "/" and "." in name.removesuffix(".grad"):
        raise AddressError(
            "an operation has one name, without dots, as in `attn/softmax`", text, start + 1
        )
    digit = next((part for part in name.split(".") if part[0].isdigit()), None)
    if digit is not None:
        raise AddressError(
            f"`{digit}` is no name; a module is written before `{mark}`", text, start + 1
        )
    if mark == "/" and not name.endswith(".grad"):
        name = canonical_operation(name)
    index = _INDEX.match(text, end)
    if index is None:
        if text[end : end + 1] == "[":
            raise AddressError(
                f"brackets after the name of {what} hold which one it is: `[0]`, `[-1]`; "
                "an item of its value is written `:output[0]`",
                text,
                end,
            )
        return Inside(mark, name), end
    return Inside(mark, name, int(index[1])), index.end()
