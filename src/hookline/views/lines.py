"""Lines of text whose pieces have a style: wrapped to a width, with or without colour.

Colour needs rich, and is left out where that is missing or `NO_COLOR` is set. The words are the
same with it and without. Knows no report.
"""

from __future__ import annotations

import io
import os
import shutil
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec

_WIDTH_WITHOUT_TERMINAL = 100
_NARROWEST = 40
_WIDEST = 110
"""Longer lines of prose are hard to read."""

Span = tuple[str, str]
"""A piece of text, and its style."""

Line = list[Span]
"""Pieces that stand in one line."""


def choose_width(width: int | None) -> int:
    """Give a width that can be read: the one asked for, or the terminal's."""
    if width is None:
        width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
    return max(_NARROWEST, min(width, _WIDEST))


def wrap(
    text: str, width: int, *, indent: str = "", first: str | None = None, style: str = ""
) -> list[Line]:
    """Break a text into lines; a name or a path is never broken inside."""
    lines = textwrap.wrap(
        make_printable(text),
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [[(line, style)] for line in lines]


def make_printable(text: str) -> str:
    """Take out what would break lines or colour the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def render(lines: Sequence[Line], width: int, *, color: bool) -> str:
    """Give the text of some lines."""
    if not color or os.environ.get("NO_COLOR") or find_spec("rich") is None:
        return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)
    from rich.console import Console
    from rich.text import Text

    buffer = io.StringIO()
    console = Console(
        file=buffer, force_terminal=True, color_system="standard", width=width, highlight=False
    )
    for line in lines:
        # Text and no markup: a site may be called `blocks[0]`.
        console.print(Text.assemble(*line), soft_wrap=True)
    return buffer.getvalue().rstrip("\n")
