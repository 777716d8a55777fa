"""The report of a run as one HTML file."""

from __future__ import annotations

import os
from pathlib import Path

from hookline.runs import Run
from hookline.views.assembling import Parts, assemble, write_whole
from hookline.views.payload import Payload, make_payload
from hookline.views.report import Report, as_report
from hookline.views.text import format_findings

PARTS = Parts(
    "page.html",
    ("style.css",),
    (
        "numbers.js",
        "scales.js",
        "colours.js",
        "elements.js",
        "frame.js",
        "unpacking.js",
        "data.js",
        "heatmap.js",
        "linechart.js",
        "exponents.js",
        "findings.js",
        "inspector.js",
        "explorer.js",
        "overview.js",
        "page.js",
    ),
)
"""What the page is put together from."""


def write_html(given: Run | Report, path: str | os.PathLike[str]) -> Path:
    """Write a report as one HTML file that needs nothing else; give its path.

    The file appears whole or not at all. One that was there is replaced.
    """
    report = as_report(given)
    return write_whole(render_page(report, make_payload(report)), path)


def render_page(report: Report, payload: Payload) -> str:
    """Give the text of the page."""
    name = Path(str(report.run["path"])).name
    return assemble(
        PARTS,
        [payload.pack_facts(), *payload.chunks],
        title=f"{name} - hookline",
        severity=report.severity or "fine",
        verdict=report.verdict,
        text=format_findings(report.findings, width=100),
    )
