"""Reports that people look at: as text, as JSON, as one HTML file.

    report.py         what is said about a run
    text.py           the same as text
    extremes.py       the largest numbers of a run
    page.py           the same as one HTML file
    payload.py        what that file holds
    pooling.py        many steps in few columns
    quantising.py     numbers in few bytes
    snippets.py       the code around a finding
    diff_text.py      two runs compared, as text
    diff_page.py      the same as one HTML file
    diff_payload.py   what that file holds
    diff_order.py     the sites of both runs in one order
    lines.py          lines of text with a style
    assembling.py     a page out of its parts
    web/              the pages themselves: scripts that draw, and know no run folder

Knows runs, findings and differences; knows no models.
"""

from __future__ import annotations

from hookline.views.diff_page import diff_page_html, write_diff_html
from hookline.views.diff_text import format_diff
from hookline.views.page import write_html
from hookline.views.report import Report, read_report
from hookline.views.text import format_findings, format_report

__all__ = [
    "Report",
    "diff_page_html",
    "format_diff",
    "format_findings",
    "format_report",
    "read_report",
    "write_diff_html",
    "write_html",
]
