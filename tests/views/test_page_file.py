"""The HTML file: one, whole, and nobody else's script in it."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from importlib.resources import files
from pathlib import Path

import pytest
from reported_runs import EVIL, NAN, write_broken, write_run

from hookline.rules import Finding
from hookline.views import read_report, write_html
from hookline.views.assembling import join_modules
from hookline.views.page import PARTS

WEB = files("hookline.views").joinpath("web")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the page of a broken run."""
    folder = tmp_path_factory.mktemp("page")
    return write_html(write_broken(folder / "run"), folder / "a" / "report.html").read_text("utf-8")


def test_file_asks_for_nothing_from_outside(page: str) -> None:
    outside = re.findall(r"(?:src|href)=[\"']?(?!#)[^\"'>]+", page.split("<script")[0])
    assert outside == []
    assert "import " not in page.split('<script type="module">')[1].split("\n", 1)[0]
    names = set(re.findall(r"https?://[^\s\"'`<>]+", page))
    assert names == {"http://www.w3.org/2000/svg"}


def test_policy_allows_exactly_the_script_and_the_style_of_the_page(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'; ")
    assert "unsafe" not in policy[1]
    for tag in ('<script type="module">', "<style>"):
        text = page.split(tag, 1)[1].split(f"</{tag[1:].split()[0].rstrip('>')}>", 1)[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]


def test_verdict_is_there_without_any_script(page: str) -> None:
    assert "<h1>blocks.1.attn/softmax made the first NaN at step 7" in page
    assert "<noscript>" in page


def test_hostile_names_are_nowhere_markup(tmp_path: Path) -> None:
    finding = Finding("x", "error", EVIL, 0, None, None, EVIL, source=f"{EVIL}:1", evidence=(EVIL,))
    run = write_run(tmp_path / EVIL.replace("/", "_"), paths=[EVIL, "head"], findings=[finding])
    page = write_html(run, tmp_path / "report.html").read_text("utf-8")
    assert "<img" not in page
    assert page.count("</script>") == 2
    chunk = page.split('id="data">', 1)[1].split("</script>", 1)[0].split("\n")[0]
    assert EVIL in zlib.decompress(base64.b64decode(chunk)).decode().replace('\\"', '"')


def test_scripts_never_read_text_as_markup() -> None:
    text = join_modules(PARTS.modules)
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert name not in text, name
    assert "</script" not in text


def test_modules_share_no_name() -> None:
    """In the page they share one scope, where a second one of a name would be a syntax error."""
    seen: dict[str, str] = {}
    for path in sorted(WEB.iterdir(), key=lambda one: one.name):
        if not path.name.endswith(".js"):
            continue
        text = path.read_text("utf-8")
        for name in re.findall(
            r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", text, re.M
        ):
            assert name not in seen, f"{name} is in {seen.get(name)} and in {path.name}"
            seen[name] = path.name


def test_modules_import_only_what_others_export() -> None:
    texts = {one.name: one.read_text("utf-8") for one in WEB.iterdir() if one.name.endswith(".js")}
    for name, text in texts.items():
        for names, source in re.findall(r'^import \{([^}]*)\} from "\./(\w+\.js)";', text, re.M):
            for wanted in filter(None, (one.strip() for one in names.split(","))):
                found = re.search(rf"^export (?:async )?\w+ {wanted}\b", texts[source], re.M)
                assert found, f"{name} imports {wanted}, which {source} does not export"
    joined = join_modules(PARTS.modules)
    assert not re.search(r"^(?:import|export) ", joined, re.M)


def test_every_file_of_the_page_is_short() -> None:
    lengths = {one.name: len(one.read_text("utf-8").splitlines()) for one in WEB.iterdir()}
    assert {name: count for name, count in lengths.items() if count > 500} == {}


def test_a_file_that_is_there_is_replaced_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = read_report(write_run(tmp_path / "run", findings=[NAN]))
    target = tmp_path / "report.html"
    target.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", _fail)
        with pytest.raises(OSError, match="no room"):
            write_html(report, target)
    assert target.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []
    assert write_html(report, target) == target
    assert target.read_text("utf-8").startswith("<!doctype html>")


def _fail(self: Path, target: Path) -> None:
    raise OSError("no room")
