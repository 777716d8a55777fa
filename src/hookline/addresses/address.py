"""Read and write addresses: the strings that name a place in a model.

    layers.3.mlp                    a module, or a parameter
    layers.3.mlp:input              a port: `input` or `output`
    layers.3.mlp:output[0]["a b"].x a leaf of the value there
    layers.3.mlp:input.mask.grad    the gradient of that leaf
    layers.3.mlp.weight:grad        the accumulated gradient of a parameter, over all ranks
    layers.3.mlp.weight:local_grad  what this rank alone computed of it, in one backward
    layers.3.attn@scores[1]         a variable of its forward; `@scores:grad` its gradient
    layers.3.attn/softmax:input[0]  an argument of an operation in its forward

An address is parsed once and kept. This file knows text only: it has seen no model.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass

from hookline._errors import AddressError
from hookline.addresses.inside import MARKS, Inside, is_inside, read_inside
from hookline.addresses.pattern import REGEX_PREFIX, escape, is_regex, read_path, unescape

Leaf = tuple[str | int, ...]

PARAMETER_PORTS = ("grad", "local_grad")
"""What follows the name of a parameter."""

PORTS = ("input", "output", *PARAMETER_PORTS)

_NAME = re.compile(r"[^\W\d]\w*")
_STEP = re.compile(
    r"""\.(?P<name>[^\W\d]\w*)
      | \[(?P<index>-?[0-9]+)\]
      | \[(?P<quote>["'])(?P<key>(?:\\.|(?!(?P=quote))[^\\])*)(?P=quote)\]""",
    re.VERBOSE | re.DOTALL,
)
_AFTER_REGEX = re.compile(
    r"""(?=[:@/])  # an `@` or `/` of the expression itself has a backslash before it
        (?:(?<!\\)[@/][\w*?.]+(?:\[-?[0-9]+\])?(?:\.grad)?)?
        (?::(?:input|output|grad|local_grad)
        (?:\.[^\W\d]\w*|\[-?[0-9]+\]|\["(?:\\.|[^"\\])*"\]|\['(?:\\.|[^'\\])*'\])*)?\Z""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Address:
    """Hold the parts of an address."""

    path: str
    """The path or path pattern as written; the empty path is the root."""

    port: str | None = None
    """`input`, `output`, `grad` or `local_grad`; None where none is written."""

    leaf: Leaf = ()
    """The names and indexes that lead from the port's value to one leaf."""

    is_grad: bool = False
    """Whether it names the gradient of what the other parts name."""

    inside: Inside | None = None
    """The variable or operation of the module's `forward`; its port is None, or `input`."""

    @property
    def suffix(self) -> str:
        """Write what follows the path: port, leaf and gradient."""
        if self.inside is not None:
            return format_place("", str(self.inside), self.leaf, is_grad=self.is_grad)
        if self.port is None:
            return ""
        if self.port in PARAMETER_PORTS:
            return f":{self.port}"
        return format_place("", self.port, self.leaf, is_grad=self.is_grad)

    def __str__(self) -> str:
        return self.path + self.suffix


def format_place(path: str, port: str, leaf: Leaf = (), *, is_grad: bool = False) -> str:
    """Write an address of a path that is escaped already, and a port of the module there.

    >>> format_place("attn", "output", (0,), is_grad=True)
    'attn:output[0].grad'
    >>> format_place("attn", "@scores[1]", is_grad=True)
    'attn@scores[1]:grad'
    """
    if not is_inside(port):
        return f"{path}:{port}{format_leaf(leaf)}{'.grad' if is_grad else ''}"
    has_port = port.endswith(":input")
    if not leaf and not has_port and (is_grad or not port.endswith(".grad")):
        return f"{path}{port}{':grad' if is_grad else ''}"
    output = "" if has_port else ":output"
    return f"{path}{port}{output}{format_leaf(leaf)}{'.grad' if is_grad else ''}"


def format_parameter(path: str, *, is_grad: bool = False, is_local: bool = False) -> str:
    """Write the address of a parameter or of its gradient.

    >>> format_parameter("fc.weight", is_grad=True, is_local=True)
    'fc.weight:local_grad'
    """
    return escape(path) + (":local_grad" if is_local else ":grad" if is_grad else "")


def parse(text: str) -> Address:
    """Read an address; raise AddressError with the position where it breaks the grammar."""
    if not isinstance(text, str):
        raise AddressError(f"an address is a string, not `{type(text).__name__}`: {text!r}")
    return _parse(text)


def parse_leaf(text: str) -> Leaf:
    """Read a leaf alone, such as `.x[0]["a b"]`.

    >>> parse_leaf('.x[0]["a b"]')
    ('x', 0, 'a b')
    """
    return _read_leaf(text, 0, len(text))


def format_leaf(leaf: Leaf) -> str:
    """Write a leaf so that it reads back the same.

    >>> format_leaf(("x", 0, "a b"))
    '.x[0]["a b"]'
    """
    return "".join(_format_step(step) for step in leaf)


def _format_step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{int(step)}]"
    # `.grad` at the end means the gradient, so a leaf of that name is always quoted.
    if step != "grad" and _NAME.fullmatch(step):
        return f".{step}"
    escaped = step.replace("\\", "\\\\").replace('"', '\\"')
    return f'["{escaped}"]'


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Address:
    _reject_outer_whitespace(text)
    path = _read_regex(text) if is_regex(text) else read_path(text).text
    end = len(path)
    if end == len(text):
        return Address(path)
    if text[end] not in MARKS:
        port, leaf, is_grad = _read_port(text, end)
        return Address(path, port, leaf, is_grad)
    inside, end = read_inside(text, end)
    if end == len(text) and inside.name.endswith(".grad"):
        inside, _ = read_inside(text[: -len(".grad")], len(path))
        return Address(path, is_grad=True, inside=inside)
    if text[end:] == ".grad":
        return Address(path, is_grad=True, inside=inside)
    if end == len(text):
        return Address(path, inside=inside)
    if text[end] != ":":
        raise AddressError(
            "after the name comes which one (`[0]`), a port (`:output`) or `:grad`", text, end
        )
    port, leaf, is_grad = _read_port(text, end)
    if port == "local_grad":
        raise AddressError("`:local_grad` is of parameters alone; write `:grad`", text, end)
    if port == "input":
        if inside.mark == "@":
            raise AddressError(
                "a variable has no input; the arguments of an operation are `/name:input`",
                text,
                end,
            )
        inside = inside._replace(is_input=True)
    return Address(path, None, leaf, is_grad, inside)


def _read_port(text: str, start: int) -> tuple[str, Leaf, bool]:
    """Read what stands from the colon of a port to the end: port, leaf, whether a gradient."""
    start += 1
    found = _NAME.match(text, start)
    port = found[0] if found else ""
    if found is None or port not in PORTS:
        raise AddressError(_explain_port(port), text, min(start, len(text) - 1))
    end = found.end()
    if port in PARAMETER_PORTS:
        if end < len(text):
            raise AddressError(f"nothing follows `:{port}`, the gradient of the whole", text, end)
        return port, (), True
    is_grad = text.endswith(".grad") and len(text) - len(".grad") >= end
    leaf = _read_leaf(text, end, len(text) - len(".grad") if is_grad else len(text))
    return port, leaf, is_grad


def _read_regex(text: str) -> str:
    after = _AFTER_REGEX.search(text, len(REGEX_PREFIX))
    path = text[: after.start()] if after else text
    try:
        re.compile(path[len(REGEX_PREFIX) :])
    except re.error as error:
        position = len(REGEX_PREFIX) + (error.pos or 0)
        raise AddressError(
            f"the regular expression is wrong: {error.msg}", text, position
        ) from None
    return path


def _read_leaf(text: str, start: int, end: int) -> Leaf:
    leaf: list[str | int] = []
    at = start
    while at < end:
        step = _STEP.match(text, at, end)
        if step is None:
            raise AddressError(_explain_leaf(text, at, end), text, at)
        if step["name"] == "grad":
            raise AddressError(
                '`.grad` comes last and once; a leaf called grad is written `["grad"]`', text, at
            )
        if step["index"] is not None:
            leaf.append(int(step["index"]))
        else:
            leaf.append(step["name"] or unescape(step["key"]))
        at = step.end()
    return tuple(leaf)


def _reject_outer_whitespace(text: str) -> None:
    if text[:1].isspace():
        raise AddressError("an address does not start with whitespace", text, 0)
    backslashes = len(text) - 1 - len(text[:-1].rstrip("\\"))
    if text[-1:].isspace() and backslashes % 2 == 0:
        raise AddressError("an address does not end with whitespace", text, len(text) - 1)


def _explain_port(port: str) -> str:
    ports = "`input`, `output`, `grad` and `local_grad`"
    if not port:
        return f"a port follows `:`, one of {ports}"
    near = difflib.get_close_matches(port, PORTS, n=1)
    return f"unknown port `{port}`; the ports are {ports}." + (
        f" Nearest: `{near[0]}`." if near else ""
    )


def _explain_leaf(text: str, at: int, end: int) -> str:
    if text[at:end] == ":grad":
        return "the gradient of an item is written `.grad`"
    if text[at] == "[":
        if "]" not in text[at:end]:
            return "`[` is not closed"
        return 'brackets hold an index or a quoted key: `[0]`, `["name"]`'
    if text[at] == ".":
        return 'a name follows the dot; any other key is written `["key"]`'
    return 'a leaf is written `.name`, `[0]` or `["key"]`'
