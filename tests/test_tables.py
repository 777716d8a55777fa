"""Tables as text, in a notebook, through rich, and read by a program."""

from __future__ import annotations

import math

import pytest

from hookline._tables import Table, format_number


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print as to a file, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setattr("sys.__stdout__", None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0000123456, "1.23e-05"),
        (0.5, "0.5"),
        (123.456, "123"),
        (1234567, "1234567"),
        (0, "0"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_format_number_keeps_three_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_text_aligns_words_left_and_numbers_right() -> None:
    table = Table(
        ["name", "norm"], [["fc1", 0.5], ["layers.0", 123456.0]], title="norms", notes=["!"]
    )
    assert str(table).splitlines() == [
        "norms",
        "name          norm",
        "--------  --------",
        "fc1            0.5",
        "layers.0  1.23e+05",
        "!",
    ]
    assert repr(table) == str(table)


def test_text_leaves_none_empty_and_writes_booleans() -> None:
    lines = str(Table(["a", "b"], [[None, True], [3, False]])).splitlines()
    assert lines[2:] == ["   True", "3  False"]


def test_long_cells_are_cut_in_the_middle_to_fit() -> None:
    table = Table(["path", "n"], [["a" * 200 + "z" * 200, 1], ["b", 22]])
    lines = str(table).splitlines()
    assert max(map(len, lines)) == 120
    assert lines[2].startswith("aaa")
    assert "…" in lines[2]
    assert lines[2].endswith("zzz   1")


def test_width_follows_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, str(Table(["x", "y"], [["a" * 50, "b" * 50]])).splitlines())) == 40


def test_text_without_colour_or_line_breaks() -> None:
    assert str(Table(["x"], [["a\nb\x1b[31m"]])).splitlines()[2] == "a b [31m"


def test_program_reads_rows_as_dicts_and_tuples() -> None:
    table = Table(["a", "b"], [[1, (2, 3)], [4, None]])
    assert len(table) == 2
    assert list(table) == [{"a": 1, "b": (2, 3)}, {"a": 4, "b": None}]
    assert table.rows == ((1, (2, 3)), (4, None))


def test_empty_table_says_its_notes_alone() -> None:
    assert str(Table(["a"], [], title="hooks", notes=["no hooks"])) == "hooks\nno hooks"
    assert str(Table(["a"], [])) == "no rows"


def test_html_escapes_everything() -> None:
    evil = "<script>alert(1)</script>"
    text = Table([evil], [[evil]], title=evil, notes=[evil])._repr_html_()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") == 4


def test_html_shows_cells_in_full() -> None:
    assert "a" * 500 in Table(["x"], [["a" * 500]])._repr_html_()


def test_rich_prints_brackets_as_they_are() -> None:
    console = pytest.importorskip("rich.console").Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(Table(["x [b]", "n"], [["lstm:output[0]", 1]], title="[red]t", notes=["[n]"]))
    shown = captured.get()
    for text in ("[red]t", "x [b]", "lstm:output[0]", "[n]"):
        assert text in shown


def test_rich_prints_an_empty_table() -> None:
    console = pytest.importorskip("rich.console").Console(width=80)
    with console.capture() as captured:
        console.print(Table(["x"], [], notes=["no hooks"]))
    assert captured.get().strip() == "no hooks"
