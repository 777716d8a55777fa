"""The page in a real browser: it opens without a word, and does what it shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opened_pages import Visit, needs_browser
from reported_runs import EVIL, NAN, rms_of, write_broken, write_large, write_run

from hookline.rules import Finding
from hookline.views import write_html

pytestmark = needs_browser


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the page of a broken run."""
    folder = tmp_path_factory.mktemp("broken")
    return write_html(write_broken(folder / "run"), folder / "report.html")


@pytest.fixture
def visit(browser: Any, broken: Path) -> Iterator[Visit]:
    """Give the open page of a broken run; it must have stayed silent at the end."""
    opened = Visit(browser, broken)
    yield opened
    assert opened.problems == []
    assert opened.requests == [opened.url]
    opened.context.close()


def test_page_opens_in_silence_and_shows_the_verdict_first(visit: Visit) -> None:
    assert visit.text("h1").startswith("blocks.1.attn/softmax made the first NaN at step 7")
    assert visit.text("#verdict-kind") == "Error"
    top = visit.page.locator("h1").bounding_box()
    assert top is not None
    assert top["y"] < 200
    assert visit.text("#findings .section-head p") == "1 error, 1 warning, 1 info from 2 causes"
    assert visit.page.locator(".finding").count() == 2
    assert "Cost: watched 10 of 10 steps" in visit.text("#footer")


def test_finding_shows_evidence_hint_source_and_what_follows(visit: Visit) -> None:
    first = visit.text(".finding >> nth=0")
    for part in (*NAN.evidence, NAN.hint, "model.py:12", "return scores.softmax(-1)"):
        assert part in first
    assert "Nothing of head.weight changed at step 8." in first
    assert visit.text(".code-here .code-text").strip() == "return scores.softmax(-1)"
    second = visit.page.locator(".finding >> nth=1")
    assert second.get_attribute("open") is None
    second.locator("summary").click()
    assert "head was 14 times its usual size." in second.inner_text()


def test_click_on_the_map_shows_the_series_of_that_site(visit: Visit) -> None:
    assert visit.text(".site-name") == "blocks.1.attn:output"
    visit.page.mouse.click(*visit.cell(1, 4))
    visit.wait_for_site("blocks.0.attn:output")
    assert visit.text(".site-reading") == f"{rms_of(1, 4):.3g} RMS at step 4"
    path = visit.page.locator(".inspector .chart-line").get_attribute("d") or ""
    assert path.count("L") == 9
    assert visit.page.locator(".inspector canvas").is_visible()


def test_pointer_over_the_map_reads_the_exact_value(visit: Visit) -> None:
    visit.page.mouse.move(*visit.cell(3, 6))
    assert visit.text(".tooltip").splitlines() == [
        "blocks.1.mlp:output",
        f"RMS {rms_of(3, 6):.3g}",
        "step 6",
    ]
    visit.page.mouse.move(*visit.cell(3, 8))
    assert "has NaN or Inf" in visit.text(".tooltip")


def test_keys_move_over_the_map_and_choose(visit: Visit) -> None:
    visit.page.locator(".heat-marks").focus()
    for key in ("Home", "ArrowDown", "ArrowRight", "ArrowRight"):
        visit.page.keyboard.press(key)
    assert visit.text("#announce").startswith("blocks.1.mlp:output")
    assert visit.text("#announce").endswith("step 2")
    assert visit.text(".site-name") == "blocks.1.attn:output"
    visit.page.keyboard.press("Enter")
    visit.wait_for_site("blocks.1.mlp:output")
    assert visit.text(".site-reading").endswith("RMS at step 2")


def test_tab_reaches_every_control(visit: Visit) -> None:
    reached = set()
    for _ in range(40):
        visit.page.keyboard.press("Tab")
        now = "document.activeElement"
        reached.add(visit.page.evaluate(f"{now}.id || {now}.className || {now}.tagName"))
    assert {"theme", "stat", "filter", "heat-marks", "flow-step"} <= reached


def test_groups_statistics_and_filter_change_the_map(visit: Visit) -> None:
    visit.choose("Backward")
    visit.wait_for_site("blocks.1.attn:output.grad")
    visit.choose("Updates")
    visit.page.wait_for_function("() => document.querySelector('#stat').value === 'ratio'")
    visit.choose("Forward")
    visit.page.select_option("#stat", "zero_share")
    visit.page.mouse.move(*visit.cell(0, 2))
    assert "Share of zeros 0.25" in visit.text(".tooltip")
    visit.page.fill("#filter", "attn")
    visit.page.get_by_text("2 of 5 sites").wait_for()
    visit.choose("Change")
    assert "median" in visit.text(".legend")


def test_drag_zooms_into_steps_and_back(visit: Visit) -> None:
    page = visit.page
    start, end = visit.cell(0, 2), visit.cell(0, 5)
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*end, steps=4)
    page.mouse.up()
    assert page.get_by_text("Show all steps").is_visible()
    page.mouse.move(*visit.cell(0, 0, columns=4))
    assert visit.text(".tooltip").endswith("step 2")
    page.get_by_text("Show all steps").click()
    assert not page.get_by_text("Show all steps").is_visible()


def test_finding_leads_to_its_place_in_the_map(visit: Visit) -> None:
    visit.page.get_by_role("button", name="Show", exact=True).click()
    visit.wait_for_site("head.weight:update")
    assert visit.text(".site-reading").endswith("at step 8")


def test_gradient_flow_follows_its_slider(visit: Visit) -> None:
    visit.page.locator("#flow-step").fill("3")
    assert visit.text("output") == "step 3"
    assert visit.page.locator("#overview .card").count() == 2


def test_light_and_dark_follow_the_system_and_the_button(browser: Any, broken: Path) -> None:
    visit = Visit(browser, broken, color_scheme="dark")
    read = "getComputedStyle(document.documentElement).backgroundColor"
    dark = visit.page.evaluate(read)
    visit.page.click("#theme")
    assert visit.page.evaluate("document.documentElement.dataset.theme") == "light"
    assert visit.page.evaluate(read) != dark
    assert visit.problems == []
    visit.context.close()


def test_paper_is_light_and_everything_is_open(browser: Any, broken: Path) -> None:
    visit = Visit(browser, broken, color_scheme="dark")
    visit.page.emulate_media(media="print")
    visit.page.wait_for_selector("html[data-theme=light]")
    assert visit.page.locator(".finding[open]").count() == 2
    assert not visit.page.locator(".toolbar").is_visible()
    assert visit.page.pdf().startswith(b"%PDF")
    visit.page.emulate_media(media="screen")
    visit.page.wait_for_selector("html[data-theme=dark]")
    assert visit.page.locator(".finding[open]").count() == 1
    assert visit.problems == []
    visit.context.close()


@pytest.mark.parametrize("width", [400, 800, 1800])
def test_nothing_sticks_out_at_any_width(browser: Any, broken: Path, width: int) -> None:
    visit = Visit(browser, broken, viewport={"width": width, "height": 900})
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    visit.context.close()


def test_hostile_names_do_nothing(browser: Any, tmp_path: Path) -> None:
    finding = Finding("x", "error", EVIL, 0, None, None, EVIL, source=f"{EVIL}:1", evidence=(EVIL,))
    run = write_run(tmp_path / "run", paths=[EVIL, "head"], findings=[finding])
    visit = Visit(browser, write_html(run, tmp_path / "report.html"))
    assert visit.text("h1") == EVIL
    assert visit.text(".site-name") == f"{EVIL}:output"
    assert visit.page.locator("img").count() == 0
    visit.page.mouse.move(*visit.cell(0, 0, rows=2))
    assert visit.problems == []
    assert visit.requests == [visit.url]
    visit.context.close()


def test_a_script_that_is_not_ours_does_not_run(browser: Any, broken: Path, tmp_path: Path) -> None:
    """The policy holds even against markup that found its way in."""
    changed = tmp_path / "changed.html"
    text = broken.read_text("utf-8")
    changed.write_text(text.replace("<main>", "<main><script>window.evil = 1</script>"), "utf-8")
    visit = Visit(browser, changed)
    assert visit.page.evaluate("window.evil === undefined")
    assert any("Content Security Policy" in one for one in visit.problems)
    visit.context.close()


def test_a_run_without_steps_says_so(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=0)
    visit = Visit(browser, write_html(run, tmp_path / "report.html"))
    assert visit.text("#explorer") == "Nothing was measured at any site in this run."
    assert visit.problems == []
    visit.context.close()


def test_a_large_run_is_small_and_quick(browser: Any, tmp_path: Path) -> None:
    """500 sites over 2000 steps: under 3 MB, open within a second, and fluid."""
    path = write_html(write_large(tmp_path / "run"), tmp_path / "report.html")
    assert path.stat().st_size < 3_000_000
    start = time.perf_counter()
    visit = Visit(browser, path)
    # The machine that tests may be busy with other tests; alone it takes a third of this.
    assert time.perf_counter() - start < 3
    took = visit.page.evaluate(
        """() => {
            const marks = document.querySelector(".heat-marks");
            const box = marks.getBoundingClientRect();
            const start = performance.now();
            for (let at = 0; at < 60; at += 1) {
                const place = { clientX: box.left + 300 + at, clientY: box.top + 40 + 5 * at };
                marks.dispatchEvent(new PointerEvent("pointermove", place));
                document.querySelector(".heat").scrollTop = 10 * at;
            }
            return (performance.now() - start) / 60;
        }"""
    )
    assert took < 16
    assert visit.problems == []
    visit.context.close()
