"""The page of a difference as a file, and what it holds."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared_runs import (
    BAD,
    CAUSE,
    EVIL,
    KeptTrace,
    change_pair,
    compare_layers,
    list_layers,
    make_history,
)

from hookline.diffs.comparing import compare
from hookline.diffs.difference import Difference, History
from hookline.diffs.measuring import describe_error
from hookline.diffs.traces import ModuleFacts
from hookline.views import diff_page_html, format_diff, write_diff_html
from hookline.views.assembling import join_modules
from hookline.views.diff_order import order_rows
from hookline.views.diff_page import PARTS
from hookline.views.diff_payload import STATISTICS, make_diff_payload
from hookline.views.quantising import Packed, unpack


def find_row(difference: Difference, address: str) -> dict[str, Any]:
    """Give the row that the page has of a site."""
    rows = make_diff_payload(difference).facts["rows"]
    return next(
        row
        for row in rows
        if address in [(row[side] or {}).get("address") for side in row.keys() & {"a", "b"}]
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the page of two runs that differ."""
    path = tmp_path_factory.mktemp("page") / "a" / "diff.html"
    return write_diff_html(compare_layers(steps=5), path).read_text("utf-8")


def test_file_asks_for_nothing_from_outside(page: str) -> None:
    outside = re.findall(r"(?:src|href)=[\"']?(?!#)[^\"'>]+", page.split("<script")[0])
    assert outside == []
    assert set(re.findall(r"https?://[^\s\"'`<>]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"^(?:import|export) ", join_modules(PARTS.modules), re.M)


def test_policy_allows_exactly_the_script_and_the_style_of_the_page(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'; ")
    assert "unsafe" not in policy[1]
    for tag in ('<script type="module">', "<style>"):
        text = page.split(tag, 1)[1].split(f"</{tag[1:].split()[0].rstrip('>')}>", 1)[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]


def test_answer_is_there_without_any_script(page: str) -> None:
    assert "<h1>Runs agree to 1e-7 up to blocks.1.mlp.act (GELU) at step 0" in page
    text = page.split("<noscript>")[1].split("</noscript>")[0]
    assert "introduces" in text


def test_scripts_never_read_text_as_markup() -> None:
    text = join_modules(PARTS.modules)
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert name not in text, name
    assert "</script" not in text


def test_modules_come_after_what_they_import() -> None:
    web = Path(__file__).parents[2] / "src" / "hookline" / "views" / "web"
    for at, name in enumerate(PARTS.modules):
        found = re.findall(r'from "\./(\w+\.js)";', (web / name).read_text("utf-8"))
        assert set(found) <= set(PARTS.modules[:at]), name


def test_hostile_names_are_nowhere_markup(tmp_path: Path) -> None:
    difference = compare_layers(
        [(EVIL, EVIL), ("head", "Linear")], bad=EVIL, titles=(EVIL, EVIL), causes=(EVIL,)
    )
    text = write_diff_html(difference, tmp_path / "diff.html").read_text("utf-8")
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert "<img" not in diff_page_html(difference)


def test_notebook_shows_the_text_without_a_script() -> None:
    shown = diff_page_html(compare_layers())
    assert shown.count("<script") == 0
    assert "introduces" in shown
    assert len(shown) < 10_000


def test_rows_are_in_sections_in_the_order_of_execution() -> None:
    rows = order_rows(compare_layers())
    sections = list(dict.fromkeys(row.section for row in rows))
    assert sections == ["forward", "backward", "state", "parameter gradient"]
    forward = [row.site for row in rows if row.section == "forward"]
    assert forward == [f"{path}:output" for path, _ in list_layers()]
    assert [row.depth for row in rows[:5]] == [1, 3, 4, 4, 3]
    assert rows[len(forward) - 1].depth == 0


def test_lone_sites_stand_where_their_side_met_them() -> None:
    """Both sides have the same sites here, so what is taken out of the pairs has its own place."""
    whole = compare_layers()
    alone = ("blocks.0.mlp:output", "blocks.1.mlp:output")
    pairs = tuple(pair for pair in whole.pairs if pair.site not in alone)
    rows = order_rows(dataclasses.replace(whole, pairs=pairs, alone_a=alone[:1], alone_b=alone[1:]))
    assert [row.site for row in rows] == [pair.site for pair in whole.pairs]
    lone = [row for row in rows if row.pair is None]
    assert [(row.site, row.is_a) for row in lone] == [(alone[0], True), (alone[1], False)]


def test_what_is_missing_on_one_side_has_one_row() -> None:
    difference = compare_layers(alone_a=("head:output",))
    assert [row.site for row in order_rows(difference)].count("head:output") == 1


def test_rows_without_traces_are_still_rows() -> None:
    difference = compare_layers(keep=False, alone_a=("x:output",), alone_b=("y:output",))
    rows = make_diff_payload(difference).facts["rows"]
    assert len(rows) == len(difference.pairs) + 2
    assert not any("stats" in row or "detail" in row for row in rows)


def test_details_are_those_of_the_tensors() -> None:
    difference = compare_layers()
    detail = find_row(difference, f"{BAD}:output")["detail"]
    traces = difference.traces
    assert traces is not None
    at = next(one.id for one in traces[0].sites if one.address == f"{BAD}:output")
    exact = describe_error(*(trace.tensor(at, 0) for trace in traces))
    assert detail["largest"]["at"] == [2, 3]
    assert detail["largest"]["error"] == pytest.approx(exact.largest, rel=1e-3)
    assert (detail["largest"]["a"], detail["largest"]["b"]) == exact.values
    assert detail["cosine"] == exact.cosine
    for profile, values in zip(detail["profiles"], exact.profile.values(), strict=True):
        assert profile["values"] == pytest.approx(values, rel=1e-3)
    assert [one["size"] for one in detail["profiles"]] == [4, 6]
    assert [one["name"] for one in detail["profiles"]] == [
        "the first dimension",
        "the last dimension",
    ]


def test_statistics_are_of_both_sides() -> None:
    difference = compare_layers()
    stats = find_row(difference, "head:output")["stats"]
    traces = difference.traces
    assert traces is not None
    at = next(one.id for one in traces[0].sites if one.address == "head:output")
    for trace, found in zip(traces, stats, strict=True):
        tensor = trace.tensor(at, 0)
        assert tensor is not None
        named = dict(zip(STATISTICS, found, strict=True))
        assert named["rms"] == pytest.approx(float(tensor.square().mean().sqrt()), rel=1e-3)
        assert named["max"] == pytest.approx(float(tensor.max()), rel=1e-3)
        assert named["nan"] == 0


def test_only_what_a_reader_looks_at_first_has_details() -> None:
    difference = compare_layers(list_layers(40), bad="blocks.20.mlp.act")
    rows = make_diff_payload(difference).facts["rows"]
    detailed = [at for at, row in enumerate(rows) if "detail" in row]
    first = next(at for at, row in enumerate(rows) if row.get("isFirst"))
    assert len(detailed) == 60
    assert set(range(first - 15, first + 16)) <= set(detailed)


def test_settings_that_differ_are_listed_by_module() -> None:
    difference = compare_layers()
    assert difference.traces is not None
    for trace, eps in zip(difference.traces, ("1e-05", "1e-06"), strict=True):
        facts = ModuleFacts("LayerNorm", config={"eps": eps, "dim": "8"})
        other = ModuleFacts("Linear" if eps == "1e-05" else "Conv1D", config={"bias": eps})
        modules = {"head": facts, "embed": other}
        trace.facts = dataclasses.replace(trace.facts, modules=modules)
    settings = make_diff_payload(difference).facts["settings"]
    assert settings == {"head": [["eps", "1e-05", "1e-06"]]}


def test_environments_show_what_is_other() -> None:
    assert make_diff_payload(compare_layers()).facts["environment"] == [["torch", "2.13", "2.12"]]


def test_history_holds_the_ratios_of_every_pair() -> None:
    difference = compare_layers(steps=5)
    payload = make_diff_payload(difference)
    facts = payload.facts["history"]
    shape = (facts["rows"], facts["columns"])
    packed = Packed(payload.chunks[facts["chunk"]], shape, facts["base"], facts["steps"], False)
    assert difference.history is not None
    expected = (difference.history.r / difference.history.limits).T
    np.testing.assert_allclose(unpack(packed), expected, rtol=1e-3)
    rows = payload.facts["rows"]
    assert [rows[at]["a"]["address"] for at in facts["of"]] == [
        one.site for one in difference.pairs
    ]
    assert facts["shown"] == list(range(5))


def test_history_of_limits_that_are_zero_and_of_nothing_compared() -> None:
    difference = compare_layers(keep=False)
    count = len(difference.pairs)
    r = np.zeros((2, count))
    r[1, 1], r[:, 2] = 1.0, np.nan
    history = History((0, 1), r, np.zeros((2, count)))
    payload = make_diff_payload(dataclasses.replace(difference, history=history))
    facts = payload.facts["history"]
    packed = Packed(payload.chunks[0], (count, 2), facts["base"], facts["steps"], False)
    found = unpack(packed)
    assert found[0].tolist() == [0.0, 0.0]
    assert found[1, 1] == math.inf
    assert np.isnan(found[2]).all()


def test_a_long_history_is_pooled_to_its_largest() -> None:
    difference = compare_layers(keep=False)
    history = make_history(difference.pairs, 2500)
    payload = make_diff_payload(dataclasses.replace(difference, history=history))
    shown = payload.facts["history"]["shown"]
    assert len(shown) <= 1000
    assert shown[:2] == [0, 3]
    assert payload.size < 200_000


@pytest.mark.parametrize(("r", "written"), [(math.inf, "infinity"), (math.nan, "nan"), (0.0, 0.0)])
def test_any_number_reaches_the_page(r: float, written: float | str) -> None:
    difference = change_pair(compare_layers(introduced=r), "head:output", r=r)
    payload = make_diff_payload(difference)
    assert find_row(difference, "head:output")["r"] == written
    assert payload.facts["head"]["introduced"] == written
    assert zlib.decompress(payload.pack_facts())


def test_place_says_what_the_difference_says() -> None:
    difference = compare_layers(candidates=(BAD, ""), word="no gradient there")
    place = make_diff_payload(difference).facts["place"]
    assert place["causes"] == [CAUSE]
    assert place["candidates"] == ["(the model)"]
    assert place["word"] == "no gradient there"
    assert ["source", "model.py:48", "port.py:91"] in place["sides"]
    assert make_diff_payload(compare_layers(bad=None)).facts["place"] is None


def test_traces_are_left_as_they_were() -> None:
    difference = compare_layers()
    assert difference.traces is not None
    before = [
        [one.clone() for one in trace.tensors]
        for trace in difference.traces
        if isinstance(trace, KeptTrace)
    ]
    make_diff_payload(difference)
    for trace, tensors in zip(difference.traces, before, strict=True):
        assert isinstance(trace, KeptTrace)
        assert all(one.equal(other) for one, other in zip(trace.tensors, tensors, strict=True))


def test_a_comparison_that_was_really_made_is_shown(tmp_path: Path) -> None:
    made = compare_layers()
    assert made.traces is not None
    found = compare(*made.traces)
    assert found.site == f"{BAD}:output"
    assert f"> {BAD}:output" in format_diff(found, width=80)
    row = find_row(found, f"{BAD}:output")
    assert row["isFirst"]
    assert row["detail"]["largest"]["at"] == [2, 3]
    assert write_diff_html(found, tmp_path / "diff.html").stat().st_size < 200_000
