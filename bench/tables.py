"""The tables that a benchmark prints, and the page they are written to."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from timing import Measurement


@dataclass(slots=True)
class Table:
    """One group's figures, and what to know when reading them."""

    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """Write it as Markdown, with columns that line up in a terminal too."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        drawn = [_draw(line, widths) for line in lines]
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        notes = [f"\n{note}" for note in self.notes]
        return "\n".join([f"## {self.title}\n", drawn[0], rule, *drawn[1:], *notes])


def _draw(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cells[0].ljust(widths[0])]
    padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return "| " + " | ".join(padded) + " |"


def tabulate(title: str, measured: Measurement) -> Table:
    """Show each variant beside the model without hooks and beside what its target names."""
    header = ["variant", "CPU min us", "x plain min", "median", "wall median"]
    header += ["x by hand min", "median", "wall median", "target"]
    table = Table(title, header)
    for variant in measured.variants:
        plain = measured.ratio(variant.name, variant.base)
        row = [variant.name, f"{measured.timings[variant.name].best():.0f}"]
        row += [f"{one:.3f}" for one in (plain.best, plain.median, plain.wall)]
        if variant.against is None:
            row += ["", "", "", ""]
        else:
            hand = measured.ratio(variant.name, variant.against)
            row += [f"{one:.3f}" for one in (hand.best, hand.median, hand.wall)]
            row.append(judge(hand.median, variant.target))
        table.rows.append(row)
    for against in dict.fromkeys(v.against for v in measured.variants if v.against):
        names = [v.name for v in measured.variants if v.against == against]
        table.notes.append(f"By hand for {', '.join(f'*{one}*' for one in names)}: *{against}*.")
    return table


def judge(figure: float, target: float | None) -> str:
    """Say what the target is and whether the figure meets it."""
    if target is None:
        return ""
    return f"<= {target:.3g} {'met' if figure <= target else 'MISSED'}"


def judge_least(figure: float, target: float) -> str:
    """Say what the least is that is asked for, and whether the figure meets it."""
    return f">= {target:,.3g} {'met' if figure >= target else 'MISSED'}"


_GPU = "## On a GPU"


def write_page(path: Path, tables: list[Table], arguments: list[str]) -> None:
    """Write the tables with the date, the machine and the versions they are from.

    What the page says of a GPU is written by hand and stays.
    """
    import hookline

    old = path.read_text(encoding="utf-8") if path.exists() else ""
    by_hand = old[old.index(_GPU) :] if _GPU in old else ""

    head = [
        "# What hooks cost\n",
        f"Measured {datetime.date.today().isoformat()} by `python bench/run.py "
        f"{' '.join(arguments)}`".rstrip()
        + ".",
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"hookline {getattr(hookline, '__version__', '0.1.0')}, {read_cpu()}, 1 thread.",
        "",
        "All variants of a table run in one process, interleaved; ratios are of thread CPU time,",
        "in the table *watch* also of the monitor's own threads:",
        "`min` the best of all rounds over the best of all rounds, `median` the median of the",
        "ratios within each round, which is what targets are held to. Small models, on purpose:",
        "in a real one the same hooks cost a smaller share.\n",
    ]
    text = "\n".join(head) + "\n" + "\n\n".join(table.markdown() for table in tables) + "\n"
    path.write_text(text + (f"\n{by_hand}" if by_hand else ""), encoding="utf-8")


def read_cpu() -> str:
    """Name the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
