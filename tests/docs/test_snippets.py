"""Every snippet of the documentation runs and prints what the page says.

The Python blocks of one page run in order and share their names. A `text` block right after one is
what it prints, to the letter; one that prints has to say so.

A Python block that begins with `# train.py` is that file: it is written and not run. An `sh` block
with a `text` block right after it is run in the same folder, and prints what the page says but for
times and costs; a line `...` there stands for lines that are left out. Other `sh` blocks only show
how something is written.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

import hookline as hl
from hookline.rules import rule

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
LANGUAGES = {"python", "text", "sh"}

UNSTEADY = {
    r"took \d+\.\d\dx as long \(.*?\)": "took N.NNx as long",
    r"(?m)^(run   \S+)\n +\(": r"\1 (",  # the folder of a test is long enough to break the line
    r"[\d,.]+ samples/s": "N samples/s",
    r"\d{8}-\d{6}": "DATE-TIME",
    r"\d{4}-\d\d-\d\d \d\d:\d\d": "DATE TIME",
}
"""What a command says that is another each time."""


@dataclass(frozen=True)
class Snippet:
    """One block of a page that is run."""

    code: str
    line: int
    """The line of the page its code begins on."""
    prints: str
    """What the page says it prints."""
    is_shell: bool = False
    """Whether it is commands and not Python."""


def read_snippets(text: str) -> list[Snippet]:
    """List the blocks of a page that are run, with what is said to be their output."""
    found = []
    blocks = list(FENCE.finditer(text))
    for block, after in zip_longest(blocks, blocks[1:]):
        is_output = (
            after is not None
            and after[1] == "text"
            and not text[block.end() : after.start()].strip()
        )
        if block[1] != "python" and not (block[1] == "sh" and is_output):
            continue
        line = text.count("\n", 0, block.start()) + 2
        prints = after[2] if after and is_output else ""
        found.append(Snippet(block[2], line, prints, is_shell=block[1] == "sh"))
    return found


def run_snippets(page: Path, snippets: list[Snippet]) -> None:
    """Run the snippets of a page in order, as one module, and compare what each prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for snippet in snippets:
        if snippet.is_shell:
            run_commands(snippet.code, snippet.prints, where=f"{page.name}:{snippet.line}")
            continue
        if file := FILE.match(snippet.code):
            Path(file[1]).write_text(snippet.code, encoding="utf-8")
            continue
        # Blank lines before the code make tracebacks, and readers of source, find the page's line.
        code = compile(
            "\n" * (snippet.line - 1) + snippet.code, str(page), "exec", dont_inherit=True
        )
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        lines = [line.rstrip() for line in printed.getvalue().splitlines()]
        assert lines == snippet.prints.splitlines(), f"{page.name}:{snippet.line}"


def run_commands(code: str, prints: str, *, where: str) -> None:
    """Run `hookline` as a shell would, line by line, and compare what a terminal would show."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONUNBUFFERED": "1",  # as on a terminal: what is printed first comes first
        "OMP_NUM_THREADS": "1",
    }
    said = ""
    for words in (shlex.split(line, comments=True) for line in code.splitlines()):
        assert words[0] == "hookline", f"{where}: only hookline is run, not `{words[0]}`"
        done = subprocess.run(
            [sys.executable, "-m", *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        said += done.stdout
    lines = steady(said.replace(f"{Path.cwd()}{os.sep}", ""))
    wanted = steady(prints)
    assert fits(lines, wanted), "\n".join([f"{where}:", *lines, "is not", *wanted])


def steady(text: str) -> list[str]:
    """Split into lines, without what is another each time."""
    for pattern, name in UNSTEADY.items():
        text = re.sub(pattern, name, text)
    return [line.rstrip() for line in text.splitlines()]


def fits(lines: list[str], wanted: list[str]) -> bool:
    """Tell whether lines are those wanted, where `...` may be any, also none."""
    pattern = "".join("(?:.*\n)*?" if one == "..." else re.escape(one) + "\n" for one in wanted)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_snippets_run_and_print_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("MPLBACKEND", "agg")
    # A rule that a page registers is gone after the page.
    monkeypatch.setattr("hookline.rules.rule._registered", dict(rule._registered))
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


def test_block_that_names_a_file_is_written_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "```python\n# train.py\nraise ValueError\n```\n"
    run_snippets(tmp_path / "page.md", read_snippets(text))
    assert Path("train.py").read_text() == "# train.py\nraise ValueError\n"


def test_commands_run_where_the_page_shows_what_they_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = "```sh\nhookline ls nowhere\n```\n\n```text\nerror: there is no folder `{}`\n...\n```\n"
    run_snippets(tmp_path / "page.md", read_snippets(shown.format("nowhere")))
    with pytest.raises(AssertionError, match=r"page\.md:2"):
        run_snippets(tmp_path / "page.md", read_snippets(shown.format("elsewhere")))
    assert read_snippets("```sh\nhookline ls nowhere\n```\n\nProse.\n") == []


@pytest.mark.parametrize(
    ("wanted", "is_fitting"),
    [
        (["a", "b", "c"], True),
        (["a", "..."], True),
        (["...", "c"], True),
        (["a", "...", "b", "c"], True),
        (["a", "b"], False),
        (["...", "b"], False),
        (["a", "...", "c", "c"], False),
    ],
)
def test_dots_stand_for_lines_that_are_left_out(wanted: list[str], is_fitting: bool) -> None:
    assert fits(["a", "b", "c"], wanted) is is_fitting
