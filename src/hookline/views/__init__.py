"""Reports that people look at: as text, as JSON, as one HTML file.

    report.py       what is said about a run
    text.py         the same as text
    extremes.py     the largest numbers of a run
    page.py         the same as one HTML file
    payload.py      what that file holds
    pooling.py      many steps in few columns
    quantising.py   numbers in few bytes
    snippets.py     the code around a finding
    web/            the page itself: scripts that draw, and know no run folder

Knows runs and findings; knows no models.
"""

from __future__ import annotations

from hookline.views.page import write_html
from hookline.views.report import Report, read_report
from hookline.views.text import format_findings, format_report

__all__ = ["Report", "format_findings", "format_report", "read_report", "write_html"]
