"""A function's source with labels in the margin, as text, in a notebook, and through rich.

Knows nothing of models: a page is lines, each with its labels.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_GAP = "  "
_PACKED_WIDTH = 28
"""How wide labels that have nothing to say may get side by side."""
_LABEL_STYLE = "color: #06c"
_NUMBER_STYLE = "color: #888"
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class Label(NamedTuple):
    """One name in the margin."""

    text: str
    """What follows the path in an address: `@q`, `/matmul[0]`."""
    look: str = ""
    """What was there, where an example ran."""


class Line(NamedTuple):
    """One line of source."""

    number: int
    code: str
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """The source of one function."""

    paths: tuple[str, ...]
    """The modules that share it."""
    heading: tuple[str, ...]
    """What stands above the source."""
    lines: tuple[Line, ...]
    """The source; none where there is none."""
    footing: tuple[str, ...]
    """What stands below it."""
    addresses: tuple[str, ...]
    """The addresses of its labels, in full."""


class SourceListing:
    """The source of forwards with the address of each value beside it.

    `.addresses` lists the addresses; `print` shows the source.
    """

    def __init__(self, pages: Sequence[Page]) -> None:
        self.pages = tuple(pages)

    @property
    def addresses(self) -> list[str]:
        """Give each address once, in the order of the source."""
        return list(dict.fromkeys(one for page in self.pages for one in page.addresses))

    def __str__(self) -> str:
        return "\n\n".join("\n".join(map("".join, _page_rows(page))) for page in self.pages)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Write the listing for a notebook."""
        pages = []
        for page in self.pages:
            lines = [
                _styled(margin, _LABEL_STYLE) + _styled(number, _NUMBER_STYLE) + html.escape(code)
                for margin, number, code in _page_rows(page)
            ]
            pages.append("\n".join(lines))
        joined = "\n\n".join(pages)
        return f"<pre>{joined}</pre>"

    def __rich__(self) -> Any:
        """Give what rich prints; rich alone calls this, so it is there."""
        from rich.text import Text

        text = Text()
        for at, page in enumerate(self.pages):
            text.append("\n\n" if at else "")
            for row, (margin, number, code) in enumerate(_page_rows(page)):
                text.append("\n" if row else "")
                text.append(margin, style="cyan").append(number, style="dim").append(code)
        return text


def _styled(text: str, style: str) -> str:
    return f'<span style="{style}">{html.escape(text)}</span>' if text.strip() else text


def _page_rows(page: Page) -> Iterator[tuple[str, str, str]]:
    """Write a page as rows of margin, line number and code."""
    for text in page.heading:
        yield "", "", text
    if page.lines:
        yield "", "", ""
        yield from _source_rows(page.lines)
    if page.footing:
        yield "", "", ""
    for text in page.footing:
        yield "", "", text


def _source_rows(lines: Sequence[Line]) -> Iterator[tuple[str, str, str]]:
    margins = [_margin(line.labels) for line in lines]
    names = max((len(name) for rows in margins for name, look in rows if look), default=0)
    looks = max((len(look) for rows in margins for _, look in rows), default=0)
    alone = max((len(name) for rows in margins for name, look in rows if not look), default=0)
    width = max(names + (len(_GAP) + looks if looks else 0), alone)
    digits = len(str(lines[-1].number))
    for line, rows in zip(lines, margins, strict=True):
        for at, (name, look) in enumerate(rows or [("", "")]):
            margin = f"{name.ljust(names)}{_GAP}{look}" if look else name
            number = "" if at else str(line.number)
            code = "" if at else line.code
            yield f"{margin.ljust(width)}{_GAP}", f"{number.rjust(digits)} |", f" {code}".rstrip()


def _margin(labels: Sequence[Label]) -> list[tuple[str, str]]:
    """Lay out the labels of a line, one a row; those with nothing to say side by side."""
    rows: list[tuple[str, str]] = []
    for label in labels:
        if rows and not label.look and not rows[-1][1]:
            together = f"{rows[-1][0]} {label.text}"
            if len(together) <= _PACKED_WIDTH:
                rows[-1] = together, ""
                continue
        rows.append((label.text, label.look))
    return rows


def clean(code: str) -> str:
    """Make a line of source fit to print: no line end, no control characters."""
    return _UNPRINTABLE.sub(" ", code.rstrip().expandtabs())
