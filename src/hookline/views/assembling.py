"""One HTML file with everything in it: the page, its style, its scripts, its data.

It asks nothing of the network, runs no script but its own, and holds no text of a run as markup.
Knows no run: what a page says is given.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./[a-z]+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) )", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Parts:
    """Name the files that a page is put together from."""

    template: str
    """The page, with a place for each thing that is put in."""

    styles: tuple[str, ...]
    """The styles, the first of them shared by all pages."""

    modules: tuple[str, ...]
    """The scripts; each imports only from those before it."""


def assemble(parts: Parts, chunks: Iterable[bytes], **words: str) -> str:
    """Give the text of a page that holds some chunks of data; words are escaped."""
    script = join_modules(parts.modules)
    style = "".join(map(_read, parts.styles))
    return Template(_read(parts.template)).substitute(
        {name: html.escape(text) for name, text in words.items()},
        policy=_make_policy(script, style),
        style=style,
        data="\n".join(base64.b64encode(chunk).decode() for chunk in chunks),
        script=script,
    )


def join_modules(names: Sequence[str]) -> str:
    """Join modules of a page into one script.

    They are modules of the language as they lie there, so that a server can serve them one by
    one; all their names differ, so that here they can share one scope.
    """
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", _read(name))) for name in names)


def write_whole(text: str, path: str | os.PathLike[str]) -> Path:
    """Write a file that appears whole or not at all; one that was there is replaced."""
    target = Path(path).expanduser().absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


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
