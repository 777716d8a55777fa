"""One HTML file with everything in it: the page, its style, its scripts, its data.

It asks nothing of the network, runs no script but its own, and holds no text of a run as markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
import secrets
from importlib.resources import files
from pathlib import Path
from string import Template

from hookline.runs import Run
from hookline.views.payload import Payload, make_payload
from hookline.views.report import Report, as_report
from hookline.views.text import format_findings

_MODULES = (
    "numbers.js",
    "scales.js",
    "colours.js",
    "elements.js",
    "data.js",
    "heatmap.js",
    "linechart.js",
    "exponents.js",
    "findings.js",
    "inspector.js",
    "explorer.js",
    "overview.js",
    "page.js",
)
"""The scripts of the page; each imports only from those before it."""

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./[a-z]+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) )", re.MULTILINE)


def write_html(given: Run | Report, path: str | os.PathLike[str]) -> Path:
    """Write a report as one HTML file that needs nothing else; give its path.

    The file appears whole or not at all. One that was there is replaced.
    """
    report = as_report(given)
    target = Path(path).expanduser().absolute()
    text = render_page(report, make_payload(report))
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def render_page(report: Report, payload: Payload) -> str:
    """Give the text of the page."""
    script, style = join_modules(), _read("style.css")
    name = Path(str(report.run["path"])).name
    chunks = [payload.pack_facts(), *payload.chunks]
    return Template(_read("page.html")).substitute(
        policy=_make_policy(script, style),
        title=html.escape(f"{name} - hookline"),
        severity=html.escape(report.severity or "fine"),
        verdict=html.escape(report.verdict),
        text=html.escape(format_findings(report.findings, width=100)),
        style=style,
        data="\n".join(base64.b64encode(chunk).decode() for chunk in chunks),
        script=script,
    )


def join_modules() -> str:
    """Join the modules of the page into one script.

    They are modules of the language as they lie there, so that a server can serve them one by
    one; all their names differ, so that here they can share one scope.
    """
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", _read(name))) for name in _MODULES)


def _make_policy(script: str, style: str) -> str:
    """Allow this script and this style by their hashes, and nothing else at all."""
    return (
        "default-src 'none'; "
        f"script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _read(name: str) -> str:
    return files("hookline.views").joinpath("web", name).read_text(encoding="utf-8")
