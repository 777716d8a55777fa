"""A difference as one HTML file: the two runs next to each other in the order of execution."""

from __future__ import annotations

import html
import os
from pathlib import Path

from hookline.diffs.difference import Difference
from hookline.views.assembling import Parts, assemble, write_whole
from hookline.views.diff_payload import make_diff_payload
from hookline.views.diff_text import format_diff

PARTS = Parts(
    "diff.html",
    ("style.css", "diff.css"),
    (
        "numbers.js",
        "scales.js",
        "colours.js",
        "elements.js",
        "frame.js",
        "unpacking.js",
        "heatmap.js",
        "linechart.js",
        "diffdata.js",
        "rowlist.js",
        "pairdetails.js",
        "sidebyside.js",
        "place.js",
        "stepmap.js",
        "diffpage.js",
    ),
)
"""What the page is put together from."""


def write_diff_html(difference: Difference, path: str | os.PathLike[str]) -> Path:
    """Write a difference as one HTML file that needs nothing else; give its path.

    The file appears whole or not at all. One that was there is replaced.
    """
    return write_whole(render_diff_page(difference), path)


def render_diff_page(difference: Difference) -> str:
    """Give the text of the page."""
    payload = make_diff_payload(difference)
    names = " against ".join(difference.titles)
    return assemble(
        PARTS,
        [payload.pack_facts(), *payload.chunks],
        title=f"{names} - hookline",
        names=names,
        severity="fine" if difference.same else "error",
        sentence=difference.sentence,
        text=format_diff(difference, width=100),
    )


def diff_page_html(difference: Difference) -> str:
    """Give what a notebook shows of a difference: the report as text, without any script.

    A notebook keeps what it shows, so this is kept small; `to_html` writes the whole page.
    """
    sentence, _, rest = format_diff(difference, width=100).partition("\n\n")
    return (
        f'<div><p style="max-width: 62em"><b>{html.escape(sentence)}</b></p>'
        f'<pre style="line-height: 1.35">{html.escape(rest)}</pre></div>'
    )
