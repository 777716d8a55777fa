"""Every snippet of the documentation runs and prints what the page says.

The Python blocks of one page run in order and share their names. A `text` block right after one is
what it prints, to the letter; one that prints has to say so.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

import hookline as hl

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "text", "sh"}


@dataclass(frozen=True)
class Snippet:
    """One Python block of a page."""

    code: str
    line: int
    """The line of the page its code begins on."""
    prints: str
    """What the page says it prints."""


def read_snippets(text: str) -> list[Snippet]:
    """List the Python blocks of a page with what is said to be their output."""
    found = []
    blocks = list(FENCE.finditer(text))
    for block, after in zip_longest(blocks, blocks[1:]):
        if block[1] != "python":
            continue
        is_output = (
            after is not None
            and after[1] == "text"
            and not text[block.end() : after.start()].strip()
        )
        line = text.count("\n", 0, block.start()) + 2
        found.append(Snippet(block[2], line, after[2] if after and is_output else ""))
    return found


def run_snippets(page: Path, snippets: list[Snippet]) -> None:
    """Run the snippets of a page in order, as one module, and compare what each prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for snippet in snippets:
        # Blank lines before the code make tracebacks, and readers of source, find the page's line.
        code = compile(
            "\n" * (snippet.line - 1) + snippet.code, str(page), "exec", dont_inherit=True
        )
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        lines = [line.rstrip() for line in printed.getvalue().splitlines()]
        assert lines == snippet.prints.splitlines(), f"{page.name}:{snippet.line}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_snippets_run_and_print_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    run_snippets(page, read_snippets(page.read_text(encoding="utf-8")))
    assert len(hl.inventory()) == 0, "the page leaves hooks on every module"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_known_language(page: Path) -> None:
    """So that no Python is left out by calling it something else."""
    text = page.read_text(encoding="utf-8")
    marks = re.findall(r"^\s*(?:```|~~~).*$", text, re.MULTILINE)
    blocks = FENCE.findall(text)
    assert len(marks) == 2 * len(blocks)
    assert {language for language, _ in blocks} <= LANGUAGES
    assert "<!--" not in text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_pages_are_found() -> None:
    assert {"README.md", "docs/index.md"} <= {name_of(page) for page in PAGES}
    assert read_snippets(PAGES[0].read_text(encoding="utf-8"))


def test_output_that_differs_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    snippets = read_snippets("```python\nx = 1\nprint(x)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:2"):
        run_snippets(page, snippets)


def test_output_that_the_page_does_not_show_fails(tmp_path: Path) -> None:
    snippets = read_snippets("```python\nprint(1)\n```\n\nProse.\n\n```text\n1\n```\n")
    with pytest.raises(AssertionError):
        run_snippets(tmp_path / "page.md", snippets)


def test_blocks_of_a_page_share_names(tmp_path: Path) -> None:
    text = "```python\nx = 1\n```\n\n```python\nprint(x)\n```\n```text\n1\n```\n"
    run_snippets(tmp_path / "page.md", read_snippets(text))


def test_error_names_the_line_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    with pytest.raises(ZeroDivisionError) as caught:
        run_snippets(page, read_snippets("# Page\n\n```python\nx = 1\n1 / 0\n```\n"))
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno) == (str(page), 4)
