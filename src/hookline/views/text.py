"""A report as text: for a terminal, a log, a pull request.

Without colour it is plain words in plain lines; with colour it has the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hookline._tables import Table, format_number
from hookline.rules import SEVERITIES, Finding, Group, fold
from hookline.runs import Run
from hookline.views.extremes import find_extremes
from hookline.views.lines import Line, Span, choose_width, make_printable, render, wrap
from hookline.views.report import Report, as_report, describe_cost

_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan", "": "bold green"}
_MOST_SITES = 4
_MOST_FOLLOWING = 8


def format_report(given: Run | Report, *, width: int | None = None, color: bool = False) -> str:
    """Write a report: the verdict, the findings by root cause, the largest numbers, the cost."""
    report = as_report(given)
    wide = choose_width(width)
    lines: list[Line] = wrap(report.verdict, wide, style=_STYLES[report.severity])
    if report.findings:
        lines += [[], [(_count(report), "bold")]]
    for group in report.groups:
        lines += [[], *_describe_group(group, wide, said=report.verdict)]
    extremes = find_extremes(report.source)
    if len(extremes):
        lines += [[], *_describe_table(extremes, wide)]
    lines += [[], *_describe_run(report, wide)]
    return render(lines, wide, color=color)


def format_findings(
    findings: Iterable[Finding], *, width: int | None = None, color: bool = False
) -> str:
    """Write findings alone, folded by root cause; empty where there are none."""
    wide = choose_width(width)
    lines: list[Line] = []
    for group in fold(list(findings)):
        lines += [*([[]] if lines else []), *_describe_group(group, wide)]
    return render(lines, wide, color=color)


def _count(report: Report) -> str:
    """Say how many findings there are of each severity."""
    counts = [(report.count(severity), severity) for severity in SEVERITIES]
    return ", ".join(_plural(count, name) for count, name in counts if count)


def _plural(count: int, name: str) -> str:
    return f"{count} {name}{'s' if count != 1 and name != 'info' else ''}"


def _describe_group(group: Group, width: int, *, said: str = "") -> Iterator[Line]:
    """Describe a root cause, then what follows from it in one line each.

    What was `said` just above is not said again.
    """
    root = group.root
    yield from _head(root, width)
    if root.message != said:
        yield from wrap(root.message, width, indent="  ")
    for line in root.evidence:
        yield from wrap(line, width, indent="    ", first="  - ", style="dim")
    if root.hint:
        yield from wrap(root.hint, width, indent="       ", first="  try: ")
    if root.source:
        yield [("  at   ", "dim"), (make_printable(root.source), "")]
    if root.others:
        yield from wrap(
            _list_sites(root.others), width, indent="       ", first="  also ", style="dim"
        )
    for one in group.follows[:_MOST_FOLLOWING]:
        text = f"{one.rule} at {one.site or 'the training'}, step {one.step}: {one.message}"
        yield from wrap(text, width, indent="       ", first="  then ", style="dim")
    if len(group.follows) > _MOST_FOLLOWING:
        yield [(f"  and {len(group.follows) - _MOST_FOLLOWING} more that follow", "dim")]


def _head(finding: Finding, width: int) -> list[Line]:
    """Name a finding in one line, or two where it is long."""
    severity: Span = (f"{finding.severity:<8}", _STYLES.get(finding.severity, "bold"))
    site = make_printable(finding.site) or "the training"
    words = [finding.rule, site, f"step {finding.step}"]
    if finding.others:
        words.append(f"+{len(finding.others)} sites")
    spans: Line = [
        (word, style) for word, style in zip(words, ("bold", "", "", "dim"), strict=False)
    ]
    if sum(map(len, words)) + 2 * len(words) + len(severity[0]) <= width:
        return [[severity, *_join(spans)]]
    return [[severity, *_join([spans[0], *spans[2:]])], [("  ", ""), spans[1]]]


def _join(spans: Sequence[Span]) -> Line:
    line: Line = []
    for span in spans:
        line += [*([("  ", "")] if line else []), span]
    return line


def _list_sites(sites: Sequence[str]) -> str:
    few = ", ".join(sites[:_MOST_SITES])
    more = len(sites) - _MOST_SITES
    return f"{few} and {more} more" if more > 0 else few


def _describe_table(table: Table, width: int) -> list[Line]:
    """Write a table within a width; its own text asks the terminal."""
    grid = [
        [format_number(one) if isinstance(one, float) else make_printable(str(one)) for one in row]
        for row in (table.columns, *table.rows)
    ]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    over = sum(widths) + 2 * (len(widths) - 1) - width
    widths[1] = max(12, widths[1] - max(0, over))
    lines: list[Line] = []
    for number, (what, site, step, value) in enumerate(grid):
        shown = site if len(site) <= widths[1] else f"…{site[1 - widths[1] :]}"
        cells = (what.ljust(widths[0]), shown.ljust(widths[1]), step.rjust(widths[2]))
        text = "  ".join([*cells, value.rjust(widths[3])])
        lines.append([(text.rstrip(), "dim" if number == 0 else "")])
    return lines


def _describe_run(report: Report, width: int) -> list[Line]:
    """Say where things are, what they cost and what to know about them."""
    run = report.run
    reach = "no steps"
    if run["steps"]:
        reach = f"{run['steps']} steps ({run['first_step']} to {run['last_step']})"
    about = f"{_shorten(run['path'])} ({run['status']}, {reach}, {run['sites']} sites)"
    rows = [("run", about), ("cost", describe_cost(report.cost))]
    rows += [("note", note) for note in report.notes]
    lines: list[Line] = []
    for name, text in rows:
        if text:
            lines += wrap(text, width, indent="      ", first=f"{name:<6}", style="dim")
    return lines


def _shorten(path: str) -> str:
    """Write a path from the current folder on, where it is below that."""
    try:
        here = Path.cwd()
    except OSError:  # it was removed meanwhile
        return path
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
