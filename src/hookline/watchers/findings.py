"""Findings as a list that reads well when it is printed."""

from __future__ import annotations

import html
from collections.abc import Iterable

from hookline._tables import Table
from hookline.rules import Finding, fold


class Findings(list[Finding]):
    """What rules found: a list, printed worst first."""

    def table(self) -> Table:
        """Give them as a table: errors first, what follows from one below it."""
        rows = []
        for group in fold(self):
            for number, one in enumerate((group.root, *group.follows)):
                mark = "  " if number else ""
                rows.append((one.severity, mark + one.rule, one.step, one.site, one.message))
        return Table(("severity", "rule", "step", "site", "message"), rows)

    def __str__(self) -> str:
        if not self:
            return "no findings"
        lines = []
        for group in fold(self):
            for number, one in enumerate((group.root, *group.follows)):
                lines.append(f"{'  ' if number else ''}{one}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{len(self)} findings>\n{self}" if self else "<no findings>"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def show_verdict(verdict: str, findings: Iterable[Finding]) -> str:
    """Show how a training stands, as HTML for a notebook."""
    table = Findings(findings).table()
    rows = table._repr_html_() if len(table) else ""
    return f"<p>{html.escape(verdict)}</p>{rows}"
