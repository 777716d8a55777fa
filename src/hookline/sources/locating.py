"""A definition cut out of its file, with the line numbers and the indentation it has there.

Parsing a file of some thousand lines takes longer than all the rest, so only the lines from the
first one of the running code to the end of the definition are parsed.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from types import CodeType, FunctionType

from hookline.sources.compiling import nested_codes, quiet_compile
from hookline.sources.readings import Definition, NoSource

CHANGED = "its file was changed since it was imported, or a tool rewrote the function on import"

_TRIES = 40
"""How many ends are tried before the file is taken to have changed."""


def file_lines(function: FunctionType) -> list[str]:
    """Read the lines of a function's file, or of the notebook cell it was typed in."""
    file = function.__code__.co_filename
    linecache.checkcache(file)
    lines = linecache.getlines(file, function.__globals__)
    if lines:
        return lines
    if file.startswith("<"):
        raise NoSource("there is no source (made by exec or typed in `python -c`)")
    raise NoSource("there is no source (its file cannot be read)")


def locate(lines: list[str], code: CodeType) -> tuple[str, Definition]:
    """Find the definition that a code object comes from; give the text to parse again, and it."""
    start = code.co_firstlineno - 1
    if not 0 <= start < len(lines):
        raise NoSource(CHANGED)
    # Empty lines in front keep the numbers, and a block of its own keeps the indentation.
    is_indented = start > 0 and lines[start][:1].isspace()
    front = "\n" * (start - 1) + "if 1:\n" if is_indented else "\n" * start
    for end in _possible_ends(lines, start, _last_line(code)):
        text = front + "".join(lines[start:end])
        try:
            return text, parse(text, code)
        except SyntaxError:
            continue
    raise NoSource(CHANGED)


def parse(text: str, code: CodeType) -> Definition:
    """Parse a text that `locate` gave."""
    tree = quiet_compile(text, code, ast.PyCF_ONLY_AST)
    node = tree.body[0] if tree.body else None
    if isinstance(node, ast.If):
        node = node.body[0]
    if not isinstance(node, Definition) or node.name != code.co_name:
        raise NoSource(CHANGED)
    return node


def _last_line(code: CodeType) -> int:
    last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
    return max([last, *map(_last_line, nested_codes(code))])


def _possible_ends(lines: list[str], start: int, last: int) -> Iterator[int]:
    """List where a definition may end: before a line as far left as itself, or with the file.

    Such a line can also stand inside a bracket or a string; the text before it does not parse then.
    """
    own, tries = _indentation(lines[start]), 0
    for at in range(min(last, len(lines)), len(lines)):
        text = lines[at].strip()
        if text and not text.startswith("#") and _indentation(lines[at]) <= own:
            yield at
            tries += 1
            if tries == _TRIES:
                return
    yield len(lines)


def _indentation(line: str) -> int:
    space = re.match(r"\s*", line)
    assert space is not None
    return len(space[0].rpartition("\f")[2].expandtabs())
