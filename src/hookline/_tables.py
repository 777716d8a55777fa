"""A table of plain values that prints as text, in a notebook, and through rich.

The text has no colour and fits the terminal: cells that are too long are cut in the middle. Knows
nothing of models.
"""

from __future__ import annotations

import html
import numbers
import shutil
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

_GAP = "  "
_CUT = "…"
_LEAST_WIDTH = 8
_WIDTH_WITHOUT_TERMINAL = 120
_CELL_STYLE = "padding: 2px 8px; text-align: {}"
_MONO_STYLE = "font-family: monospace; border-collapse: collapse"


def format_number(value: float) -> str:
    """Write whole numbers in full, others with three significant digits.

    >>> format_number(0.0000123456), format_number(2.0), format_number(1234567)
    ('1.23e-05', '2', '1234567')
    """
    return str(int(value)) if isinstance(value, numbers.Integral) else f"{value:.3g}"


def import_optional(name: str, *, extra: str = "") -> Any:
    """Import a module that hookline can do without, or say which extra installs it."""
    package = name.partition(".")[0]
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        wanted = f"hookline[{extra or package}]"
        raise ModuleNotFoundError(
            f'{package} is not installed; install it with: pip install "{wanted}"', name=package
        ) from error
    return import_module(name)


class Table:
    """Hold rows under named columns; iterating gives each row as a dict."""

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        title: str = "",
        notes: Sequence[str] = (),
    ) -> None:
        self.columns = tuple(columns)
        self.rows = tuple(tuple(row) for row in rows)
        self.title = title
        self.notes = tuple(notes)
        assert all(len(row) == len(self.columns) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, object]]:
        for row in self.rows:
            yield dict(zip(self.columns, row, strict=True))

    def __str__(self) -> str:
        width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
        return "\n".join([*self._heading(), *self._lines(width), *self.notes])

    __repr__ = __str__

    def to_pandas(self) -> Any:
        """Give a pandas DataFrame with the same columns."""
        return import_optional("pandas").DataFrame(list(self.rows), columns=list(self.columns))

    def to_polars(self) -> Any:
        """Give a polars DataFrame with the same columns."""
        columns = {name: [row[at] for row in self.rows] for at, name in enumerate(self.columns)}
        return import_optional("polars").DataFrame(columns, strict=False)

    def _repr_html_(self) -> str:
        """Write the table for a notebook, every cell in full."""
        aligned = ["right" if numeric else "left" for numeric in self._numeric()]
        head = _html_row("th", self.columns, aligned) if self.rows else ""
        body = "".join(_html_row("td", cells, aligned) for cells in self._cells())
        title = "".join(
            f'<caption style="text-align: left">{html.escape(line)}</caption>'
            for line in self._heading()
        )
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return (
            f'<div><table style="{_MONO_STYLE}">{title}<thead>{head}</thead>'
            f"<tbody>{body}</tbody></table>{notes}</div>"
        )

    def __rich__(self) -> Any:
        """Give what rich prints; rich alone calls this, so it is there."""
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        # Text, because rich would read `[0]` in a plain string as markup.
        heading = [Text(line) for line in self._heading()]
        notes = [Text(note) for note in self.notes]
        if not self.rows:
            return Group(*heading, *notes)
        table = RichTable(box=None, pad_edge=False)
        for column, numeric in zip(self.columns, self._numeric(), strict=True):
            table.add_column(Text(column), justify="right" if numeric else "left")
        for cells in self._cells():
            table.add_row(*map(Text, cells))
        return Group(*heading, table, *notes)

    def _heading(self) -> list[str]:
        if self.title or self.notes or self.rows:
            return [self.title] if self.title else []
        return ["no rows"]

    def _numeric(self) -> list[bool]:
        """Tell which columns hold numbers and nothing else."""
        columns = [[row[i] for row in self.rows] for i in range(len(self.columns))]
        filled = [[value for value in column if value is not None] for column in columns]
        return [bool(column) and all(map(_is_number, column)) for column in filled]

    def _cells(self) -> list[list[str]]:
        return [[_format(value) for value in row] for row in self.rows]

    def _lines(self, width: int) -> list[str]:
        if not self.rows:
            return []
        grid = [list(self.columns), *self._cells()]
        natural = [max(map(len, column)) for column in zip(*grid, strict=True)]
        widths = _fit(natural, width - len(_GAP) * (len(natural) - 1))
        numeric = self._numeric()
        lines = []
        for cells in grid:
            cut = [_cut(cell, limit) for cell, limit in zip(cells, widths, strict=True)]
            padded = [
                cell.rjust(limit) if is_number else cell.ljust(limit)
                for cell, limit, is_number in zip(cut, widths, numeric, strict=True)
            ]
            lines.append(_GAP.join(padded).rstrip())
        lines.insert(1, _GAP.join("-" * limit for limit in widths))
        return lines


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _format(value: object) -> str:
    if value is None:
        return ""
    if _is_number(value):
        return format_number(value)  # type: ignore[arg-type]
    text = str(value)
    # A line break or an escape sequence in a name would break the lines or colour the terminal.
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def _fit(widths: list[int], room: int) -> list[int]:
    """Lower the widest columns to one common limit until all of them fit."""
    limit = max(widths, default=0)
    while limit > _LEAST_WIDTH and sum(min(width, limit) for width in widths) > room:
        limit -= 1
    return [min(width, limit) for width in widths]


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    tail = (width - len(_CUT)) // 2
    return text[: width - len(_CUT) - tail] + _CUT + text[len(text) - tail :]


def _html_row(tag: str, cells: Sequence[str], aligned: list[str]) -> str:
    written = "".join(
        f'<{tag} style="{_CELL_STYLE.format(align)}">{html.escape(cell)}</{tag}>'
        for cell, align in zip(cells, aligned, strict=True)
    )
    return f"<tr>{written}</tr>"
