"""The page of a difference in a real browser: it opens without a word, and does what it shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compared_runs import BAD, CAUSE, EVIL, GRAFT, change_pair, compare_layers, list_layers
from opened_pages import Visit, needs_browser

from hookline.views import write_diff_html

pytestmark = needs_browser


class DiffVisit(Visit):
    """A page of a difference that is open."""

    def rows(self) -> list[list[str]]:
        """Give the words of every row that is an element at the moment, from the top."""
        rows = self.page.locator(".row").all()
        return [row.inner_text().split("\n") for row in rows]

    def names(self) -> list[str]:
        """Give the names of the first side in the rows."""
        return [name for name in self.page.locator(".row-a").all_inner_texts() if name]

    def row(self, address: str) -> Any:
        """Find the row of a site."""
        return self.page.locator(".row-pair", has=self.page.locator(f'[title="{address}"]'))

    def place(self, address: str) -> float:
        """Tell how far below the top of the list the row of a site is, as a share of its height."""
        host = self.page.locator(".rows").bounding_box()
        row = self.row(address).bounding_box()
        return float((row["y"] - host["y"]) / host["height"])


def make_broken(folder: Path) -> Path:
    """Write the page of two runs that differ, each with sites that the other lacks."""
    difference = compare_layers(
        list_layers(8),
        bad="blocks.4.mlp.act",
        steps=10,
        alone_a=tuple(f"blocks.{number}.drop:output" for number in range(14)),
        alone_b=("extra:output",),
        notes=("step 7 is missing in b",),
    )
    difference = change_pair(difference, "head:output", r=float("inf"), word="NaN there")
    difference = change_pair(difference, "blocks.5:output", same_as="blocks.5.mlp:output")
    difference = change_pair(
        difference, "blocks.5.attn:output", site_b="h.5.attention:output", rule="order"
    )
    return write_diff_html(difference, folder / "diff.html")


FIRST = "blocks.4.mlp.act:output"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the page of two runs that differ."""
    return make_broken(tmp_path_factory.mktemp("diff"))


@pytest.fixture
def visit(browser: Any, broken: Path) -> Iterator[DiffVisit]:
    """Give the open page of two runs that differ; it must have stayed silent at the end."""
    opened = DiffVisit(browser, broken)
    yield opened
    assert opened.problems == []
    assert opened.requests == [opened.url]
    opened.context.close()


def test_page_opens_in_silence_at_the_first_difference(visit: DiffVisit) -> None:
    assert visit.text("h1").startswith("Runs agree to 1e-7 up to blocks.4.mlp.act")
    assert visit.text("#verdict-kind") == "They differ"
    assert visit.text(".site-name") == FIRST
    assert visit.row(FIRST).get_attribute("aria-selected") == "true"
    assert 0 < visit.place(FIRST) < 1
    assert "step 7 is missing in b" in visit.text("#footer")
    assert "2.13" in visit.text("#footer")


def test_place_tells_both_sides_and_the_cause(visit: DiffVisit) -> None:
    text = visit.text("#place")
    for part in ("model.py:48", "port.py:91", "blocks.4.mlp.act/gelu", CAUSE, GRAFT):
        assert part in text


def test_rows_have_both_names_r_and_a_verdict(visit: DiffVisit) -> None:
    other = visit.row("blocks.5.attn:output")
    assert other.inner_text().split("\n") == [
        "blocks.5.",
        "attn:output",
        "2e\u22124",
        "inherits",
        "h.5.",
        "attention:output",
    ]
    first = visit.row(FIRST).locator(".row-r")
    before = visit.row("blocks.4.mlp.fc1:output").locator(".row-r")
    read = "one => getComputedStyle(one).backgroundColor"
    assert first.evaluate(read) != before.evaluate(read)
    assert visit.row("head:output").locator(".row-r").inner_text() == "Inf"


def test_what_agrees_is_folded_and_opens(visit: DiffVisit) -> None:
    folds = visit.page.locator(".row-fold")
    assert folds.first.inner_text().startswith("+ 21 sites agree to 1.")
    assert "blocks.0.attn:output" not in visit.names()
    folds.first.click()
    visit.page.locator(".rows").evaluate("one => { one.scrollTop = 0; }")
    visit.row("blocks.0.attn:output").wait_for()


def test_depth_is_shown_by_the_indent(visit: DiffVisit) -> None:
    left = {
        name: visit.row(name).locator(".row-tail").first.bounding_box()["x"]
        - visit.row(name).locator(".row-path").first.bounding_box()["width"]
        for name in ("blocks.4.mlp.act:output", "blocks.4.mlp:output", "blocks.4:output")
    }
    assert left["blocks.4.mlp.act:output"] > left["blocks.4.mlp:output"] > left["blocks.4:output"]


def test_lone_sites_are_listed_with_their_side(visit: DiffVisit) -> None:
    visit.page.fill("#filter", "extra")
    visit.page.locator(".row-verdict", has_text="alone").first.wait_for()
    assert visit.page.locator(".row-pair").count() == 1
    visit.page.locator(".row-pair").click()
    visit.wait_for_site("extra:output")
    assert "only in B" in visit.text(".inspector")
    assert "blocks.0.drop:output" in visit.text("#alignment")
    visit.page.get_by_text("and 2 more").click()
    assert "blocks.13.drop:output" in visit.text("#alignment")


def test_click_on_a_row_shows_its_numbers(visit: DiffVisit) -> None:
    visit.row("blocks.4.mlp.fc1:output").click()
    visit.wait_for_site("blocks.4.mlp.fc1:output")
    text = visit.text(".inspector")
    for part in (
        "limit 2e\u22125",
        "floor 6e\u22127",
        "agrees",
        "from the tensors",
        "matched by name",
    ):
        assert part in text
    for part in ("Largest error", "Cosine", "ULP apart", "rms"):
        assert part in text
    assert visit.page.locator(".inspector .chart-line").count() == 2
    path = visit.page.locator(".inspector .chart-line").first.get_attribute("d") or ""
    assert path.count("L") == 3


def test_largest_error_has_its_coordinate_and_both_values(visit: DiffVisit) -> None:
    text = visit.text(".pair-measures")
    assert "at [2, 3]:" in text
    assert text.count(" in A, ") == 1


def test_filter_and_modes_choose_the_rows(visit: DiffVisit) -> None:
    visit.page.fill("#filter", "blocks.5 output")
    visit.page.get_by_text("10 of 121 sites").wait_for()
    visit.choose("Differing")
    visit.page.get_by_text("10 of 121 sites").wait_for()
    visit.choose("All")
    visit.page.get_by_text("11 of 121 sites").wait_for()
    assert "blocks.5:output" in {
        row.get_attribute("title") for row in visit.page.locator(".row-a").all()
    }
    visit.page.fill("#filter", "")
    visit.choose("Differing")
    assert set(visit.page.locator(".row-verdict").all_inner_texts()) <= {
        "introduces",
        "inherits",
        "alone",
    }


def test_button_leads_back_to_the_first_difference(visit: DiffVisit) -> None:
    visit.page.fill("#filter", "embed")
    visit.page.locator(".row-pair").first.click()
    visit.wait_for_site("embed:output")
    visit.page.click("#to-first")
    visit.wait_for_site(FIRST)
    assert visit.page.input_value("#filter") == ""
    assert 0.2 < visit.place(FIRST) < 0.5


def test_keys_move_between_rows_and_differences(visit: DiffVisit) -> None:
    visit.page.locator(".rows").focus()
    visit.page.keyboard.press("ArrowDown")
    visit.wait_for_site("blocks.4.mlp:output")
    assert visit.text("#announce").startswith("blocks.4.mlp:output, r 2e\u22124, inherits")
    visit.page.keyboard.press("n")
    visit.wait_for_site("blocks.4:output")
    visit.page.keyboard.press("p")
    visit.page.keyboard.press("p")
    visit.wait_for_site(FIRST)
    visit.page.keyboard.press("Home")
    visit.page.keyboard.press("ArrowDown")
    assert "sites agree" in visit.text("#announce")
    visit.page.keyboard.press("Enter")
    visit.page.keyboard.press("Home")
    visit.page.keyboard.press("ArrowDown")
    visit.wait_for_site("embed:output")
    visit.page.keyboard.press("End")
    visit.wait_for_site("head.weight:grad")


def test_steps_are_a_map_that_leads_to_the_site(visit: DiffVisit) -> None:
    assert visit.text(".steps-card h4").startswith(FIRST)
    marks = visit.page.locator(".heat-marks")
    marks.focus()
    visit.page.keyboard.press("ArrowDown")
    visit.page.keyboard.press("ArrowRight")
    assert visit.text("#announce") == "blocks.4.mlp:output, 20 of the limit, step 1"
    visit.page.keyboard.press("Enter")
    visit.wait_for_site("blocks.4.mlp:output")
    path = visit.page.locator(".steps-card .chart-line").get_attribute("d") or ""
    assert path.count("L") == 9


def test_light_and_dark_follow_the_system_and_the_button(browser: Any, broken: Path) -> None:
    visit = DiffVisit(browser, broken, color_scheme="dark")
    read = "one => getComputedStyle(one).backgroundColor"
    dark = visit.row(FIRST).locator(".row-r").evaluate(read)
    visit.page.click("#theme")
    assert visit.page.evaluate("document.documentElement.dataset.theme") == "light"
    assert visit.row(FIRST).locator(".row-r").evaluate(read) != dark
    assert visit.problems == []
    visit.context.close()


@pytest.mark.parametrize("width", [400, 800, 1800])
def test_nothing_sticks_out_at_any_width(browser: Any, broken: Path, width: int) -> None:
    visit = DiffVisit(browser, broken, viewport={"width": width, "height": 900})
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visit.row(FIRST).locator(".row-r").is_visible()
    visit.context.close()


def test_paper_is_light_and_shows_the_first_difference(browser: Any, broken: Path) -> None:
    visit = DiffVisit(browser, broken, color_scheme="dark")
    visit.page.emulate_media(media="print")
    visit.page.wait_for_selector("html[data-theme=light]")
    assert not visit.page.locator(".toolbar").is_visible()
    assert visit.row(FIRST).is_visible()
    assert visit.page.pdf().startswith(b"%PDF")
    assert visit.problems == []
    visit.context.close()


def test_same_runs_show_all_and_begin_nearest_to_the_limit(browser: Any, tmp_path: Path) -> None:
    difference = change_pair(compare_layers(bad=None, keep=False), "head:output", r=1.5e-5)
    visit = DiffVisit(browser, write_diff_html(difference, tmp_path / "diff.html"))
    assert visit.text("#verdict-kind") == "No difference"
    assert visit.text(".site-name") == "head:output"
    assert visit.page.locator(".row-fold").count() == 0
    assert visit.text("#place") == ""
    assert visit.text("#steps") == ""
    assert visit.problems == []
    visit.context.close()


def test_equal_values_that_differ_otherwise_stand_out(browser: Any, tmp_path: Path) -> None:
    """A detached value is equal, and still the first difference."""
    word = "no gradient is wanted there"
    difference = compare_layers(introduced=0.0, word=word)
    difference = change_pair(difference, f"{BAD}:output", r=0.0, word=word)
    visit = DiffVisit(browser, write_diff_html(difference, tmp_path / "diff.html"))
    cell = visit.row(f"{BAD}:output").locator(".row-r")
    assert cell.inner_text() == "\u2260"
    exact = visit.row("embed:output")
    visit.choose("All")
    read = "one => getComputedStyle(one).backgroundColor"
    assert cell.evaluate(read) != exact.locator(".row-r").evaluate(read)
    assert word in visit.text("#place")
    assert word in visit.text(".inspector")
    assert visit.problems == []
    visit.context.close()


def test_nothing_compared_is_said(browser: Any, tmp_path: Path) -> None:
    difference = compare_layers(bad=None, keep=False, pairs=(), alone_a=())
    visit = DiffVisit(browser, write_diff_html(difference, tmp_path / "diff.html"))
    assert visit.text("#sites") == "Nothing was compared at any site."
    assert visit.problems == []
    visit.context.close()


def test_hostile_names_do_nothing(browser: Any, tmp_path: Path) -> None:
    difference = compare_layers(
        [(EVIL, EVIL), ("head", "Linear")],
        bad=EVIL,
        alone_a=(EVIL,),
        notes=(EVIL,),
        causes=(EVIL,),
        titles=(EVIL, EVIL),
        steps=3,
    )
    visit = DiffVisit(browser, write_diff_html(difference, tmp_path / "diff.html"))
    assert EVIL in visit.text("h1")
    assert visit.text(".site-name") == f"{EVIL}:output"
    assert visit.page.locator("img").count() == 0
    assert visit.problems == []
    assert visit.requests == [visit.url]
    visit.context.close()


def test_five_thousand_rows_stay_quick(browser: Any, tmp_path: Path) -> None:
    """Over 5000 pairs: under 1 MB, open within a second, few elements, and fluid."""
    layers = list_layers(450)
    difference = compare_layers(layers, bad="blocks.200.mlp.act", keep=False, steps=10)
    assert len(difference.pairs) > 5000
    start = time.perf_counter()
    path = write_diff_html(difference, tmp_path / "diff.html")
    assert time.perf_counter() - start < 3
    assert path.stat().st_size < 1_000_000
    start = time.perf_counter()
    visit = DiffVisit(browser, path)
    # The machine that tests may be busy with other tests; alone it takes a third of this.
    assert time.perf_counter() - start < 3
    visit.choose("All")
    assert visit.page.locator(".row").count() < 100
    took = visit.page.evaluate(
        """() => {
            const host = document.querySelector(".rows");
            const start = performance.now();
            for (let at = 0; at < 100; at += 1) {
                host.scrollTop = 260 * at;
                host.dispatchEvent(new Event("scroll"));
            }
            return (performance.now() - start) / 100;
        }"""
    )
    assert took < 16
    visit.page.fill("#filter", "blocks.321.mlp.act")
    visit.page.get_by_text("2 of 5,410 sites").wait_for()
    assert visit.problems == []
    visit.context.close()
