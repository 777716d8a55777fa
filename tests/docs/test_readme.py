"""What the README says of the package and of the repository is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hookline as hl

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def read_tree() -> list[str]:
    """List the paths of the annotated tree at the end of the README."""
    block = re.findall(r"^```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[-1]
    parents: list[str] = []
    paths = []
    for line in block.splitlines():
        indent = len(line) - len(line.lstrip())
        name = line.split()[0]
        parents[indent // 2 :] = [name]
        paths.append("".join(parents))
    return paths


def files_under(folder: str, *patterns: str) -> set[str]:
    found = {path for pattern in patterns for path in (ROOT / folder).glob(pattern)}
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


def test_tree_names_nothing_that_is_not_there() -> None:
    assert [path for path in read_tree() if not (ROOT / path).exists()] == []


def test_tree_names_each_path_once() -> None:
    paths = read_tree()
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize(
    ("folder", "patterns"),
    [
        ("src/hookline", ["*.py", "*/*.py"]),
        ("bench", ["*.py"]),
        ("docs", ["**/*.md"]),
        ("tests", ["*.py"]),
    ],
)
def test_tree_has_a_line_for_each_file(folder: str, patterns: list[str]) -> None:
    files = files_under(folder, *patterns)
    assert files
    doors = {path for path in files if re.fullmatch(r"src/hookline/\w+/__init__\.py", path)}
    missing = files - doors - set(read_tree())
    assert not missing, f"give these a line in the tree of README.md: {sorted(missing)}"


@pytest.mark.parametrize("folder", ["src/hookline", "tests"])
def test_tree_has_a_line_for_each_folder(folder: str) -> None:
    folders = {path.rpartition("/")[0] + "/" for path in files_under(folder, "*/*.py")}
    missing = folders - set(read_tree())
    assert not missing, f"give these a line in the tree of README.md: {sorted(missing)}"


def test_every_line_of_the_tree_says_something() -> None:
    """But for folders whose files do."""
    block = re.findall(r"^```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[-1]
    bare = [line for line in block.splitlines() if len(line.split()) == 1]
    assert all(line.endswith("/") for line in bare), bare


def test_table_has_every_public_name_once() -> None:
    rows = re.findall(r"^\| (`hl\..*?) \|", README, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`hl\.(\w+)", row)]
    assert sorted(names) == sorted(hl.__all__)


def test_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = re.findall(r"`?make (\w+)", README)
    assert {"demo", "test"} <= set(commands)
    assert set(commands) <= set(targets)
