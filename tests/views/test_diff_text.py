"""A difference as text."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
from compared_runs import BAD, CAUSE, EVIL, GRAFT, change_pair, compare_layers, list_layers

from hookline.diffs.difference import Difference
from hookline.views import format_diff
from hookline.views.diff_text import draw_bar


def test_text_begins_with_the_sentence_and_fits_eighty_columns() -> None:
    difference = compare_layers(steps=3, alone_a=tuple(f"a.{n}:output" for n in range(40)))
    text = format_diff(difference, width=80)
    assert " ".join(text.split("\n\n")[0].split()) == difference.sentence
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_text_names_the_place_and_the_cause() -> None:
    lines = format_diff(compare_layers(), width=80).splitlines()
    for line in (
        f"first    {BAD}:output",
        f"in A     {BAD}  GELU  model.py:48",
        f"in B     {BAD}  GELU  port.py:91",
        f"at       {BAD}/gelu",
        f"why      {CAUSE}",
        f"graft    {GRAFT}",
    ):
        assert line in lines


def test_window_shows_what_is_before_and_after_the_first_difference() -> None:
    lines = format_diff(compare_layers(), width=80).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("  site "))
    table = [re.split(r"  +", line.strip()) for line in lines[start + 1 : start + 11]]
    assert table[0] == ["+5 sites before it agree"]
    assert [row[0] for row in table[1:9]] == [
        "blocks.0:output",
        "blocks.1.attn:output",
        "blocks.1.mlp.fc1:output",
        f"> {BAD}:output",
        "blocks.1.mlp:output",
        "blocks.1:output",
        "blocks.2.attn:output",
        "blocks.2.mlp.fc1:output",
    ]
    assert [row[-1] for row in table[1:9]] == ["agrees"] * 3 + ["introduces"] + ["inherits"] * 4
    assert table[4][1:3] == ["2.2e-4", "2e-5"]
    assert table[9] == ["+33 sites after it: 28 inherit, 5 agree"]


def test_all_shows_every_pair() -> None:
    difference = compare_layers()
    text = format_diff(difference, width=100, all=True)
    for pair in difference.pairs:
        assert f" {pair.site} " in text
    assert "sites before" not in text


def test_values_that_were_shown_already_are_left_out_of_the_window() -> None:
    difference = change_pair(compare_layers(), "blocks.1:output", same_as="blocks.1.mlp:output")
    assert "blocks.1:output" not in format_diff(difference, width=80)
    assert "blocks.1:output" in format_diff(difference, width=80, all=True)


def test_other_name_stands_below_where_there_is_one() -> None:
    difference = change_pair(compare_layers(), "blocks.1.mlp:output", site_b="h.1.mlp:output")
    lines = format_diff(difference, width=80).splitlines()
    at = next(at for at, line in enumerate(lines) if "blocks.1.mlp:output" in line)
    assert lines[at + 1] == "    B: h.1.mlp:output"
    assert sum(line.startswith("    B: ") for line in lines) == 1


def test_same_runs_show_what_came_nearest_to_its_limit() -> None:
    difference = change_pair(compare_layers(bad=None), "head:output", r=1.5e-5)
    text = format_diff(difference, width=80)
    assert text.startswith("No difference: ")
    table = text.split("nearest to their limits\n")[1].splitlines()
    assert table[1].split() == ["head:output", "1.5e-5", "2e-5", "====|", "agrees"]
    assert ">" not in text
    assert "first" not in text


@pytest.mark.parametrize("bad", [None, BAD])
def test_a_difference_without_pairs_is_still_told(bad: str | None) -> None:
    text = format_diff(dataclasses.replace(compare_layers(bad=bad), pairs=()), width=80)
    assert text.splitlines()[-1] == "matched  nothing"


def test_alignment_and_lone_sites_are_summed_up() -> None:
    alone = tuple(f"blocks.{number}.drop:output" for number in range(6))
    difference = compare_layers(alone_a=alone, alone_b=("x:output",), notes=("a word",), steps=4)
    difference = change_pair(difference, "head:output", rule="order")
    lines = format_diff(difference, width=110).splitlines()
    assert "matched  45 by name, 1 by order, class and shape" in lines
    assert f"only A   6: {', '.join(alone[:4])} and 2 more" in lines
    assert "only B   1: x:output" in lines
    assert "compared A a (here) with B b (there)" in lines
    assert "steps    4 in common (0 to 3)" in lines
    assert lines[-1] == "note     a word"


def test_own_code_gradual_growth_and_candidates_are_told() -> None:
    own = compare_layers(is_own_code=True, before=f"{BAD}.x", candidates=(BAD, "", "head"))
    text = format_diff(own, width=100)
    assert f"blame    the code of {BAD} (GELU) itself, before it calls x" in text
    assert "or       the model, head" in text
    gradual = format_diff(compare_layers(is_gradual=True), width=100)
    assert "blame    no single place: the difference grows little by little" in gradual


@pytest.mark.parametrize(
    ("r", "shown"), [(math.inf, "inf"), (None, "-"), (0.0, "0"), (0.25, "0.25")]
)
def test_any_r_can_be_shown(r: float | None, shown: str) -> None:
    difference = change_pair(compare_layers(), "blocks.1.mlp:output", r=r, verdict="not compared")
    line = next(one for one in format_diff(difference).splitlines() if "blocks.1.mlp:" in one)
    assert line.split()[1] == shown


def test_second_visit_is_named() -> None:
    difference = change_pair(compare_layers(visit=2), f"{BAD}:output", visit=2)
    text = format_diff(difference, width=80)
    assert f"first    {BAD}:output #2" in text
    assert f"> {BAD}:output #2  2.2e-4" in text


def test_long_names_keep_their_end() -> None:
    prefix = "model.decoder.transformer.layers."
    layers = [(f"{prefix}{path}", kind) for path, kind in list_layers()]
    lines = format_diff(compare_layers(layers, bad=prefix + BAD), width=80).splitlines()
    row = next(line for line in lines if line.startswith("> "))
    assert row.startswith("> …")
    assert f"{BAD}:output  " in row
    assert len(row) <= 80


@pytest.mark.parametrize(
    ("far", "bar"),
    [
        (-math.inf, "    |    "),
        (-9.0, "    |    "),
        (-2.3, "==  |    "),
        (0.0, "====|    "),
        (0.01, "====|#   "),
        (2.6, "====|### "),
        (math.inf, "====|####"),
        (math.nan, "         "),
    ],
)
def test_bar_shows_the_powers_of_ten_from_the_limit(far: float, bar: str) -> None:
    assert draw_bar(far) == bar


def test_colour_changes_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    difference = compare_layers()
    coloured = format_diff(difference, width=80, color=True)
    assert "\x1b[1;31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == format_diff(difference, width=80)


def test_escape_sequences_do_not_reach_the_terminal() -> None:
    name = f"\x1b[31m{EVIL}\nnext"
    difference = compare_layers([(name, "GELU"), ("head", "Linear")], bad=name, causes=(name,))
    text = format_diff(difference, all=True)
    assert "\x1b" not in text
    assert "\nnext" not in text


def test_json_holds_all_that_the_text_says() -> None:
    """A program that reads `--json` can say the same."""
    difference = compare_layers(alone_a=("x:output",), notes=("a word",), steps=3)
    found = difference.to_dict()
    text = format_diff(difference, width=100)
    pair = next(one for one in found["pairs"] if one["site"] == found["site"])
    for word in (
        found["site"],
        found["source"],
        found["source_b"],
        found["operation"],
        found["causes"][0],
        found["graft"]["sentence"],
        found["alone_a"][0],
        found["notes"][0],
        pair["verdict"],
        *found["titles"],
    ):
        assert word in text
    assert Difference(same=True).to_dict().keys() == found.keys()


def test_text_counts_what_was_not_compared() -> None:
    whole = compare_layers()
    assert "sites compared" not in format_diff(whole)
    pairs = list(whole.pairs)
    pairs[0] = dataclasses.replace(pairs[0], verdict="not compared", r=None)
    partly = dataclasses.replace(whole, pairs=pairs, alone_b=("x:output",))
    count = len(pairs)
    words = f"{count - 1} of {count + 1} sites compared: 1 could not be, 1 has no counterpart"
    assert words in format_diff(partly, width=100)
