"""Path patterns: what each wildcard matches, and a slow matcher that must agree."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline.addresses.pattern import compile_path, escape, is_exact, unescape


def matches(pattern: str, path: str) -> bool:
    return compile_path(pattern)(path) is not None


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("", [""], ["a"]),
        ("a.b", ["a.b"], ["a", "axb", "a.b.c", ""]),
        ("*", ["a", "10"], ["", "a.b"]),
        ("h.*", ["h.0", "h.11"], ["h", "h.0.mlp", "hx0"]),
        ("fc*", ["fc", "fc1", "fc_out"], ["fc.a", "xfc"]),
        ("*_proj", ["q_proj", "_proj"], ["a.q_proj"]),
        ("h.*.mlp", ["h.0.mlp"], ["h.mlp", "h.0.1.mlp"]),
        ("fc?", ["fc1"], ["fc", "fc12", "fc."]),
        ("**", ["", "a", "a.b.c"], []),
        ("**.**", ["", "a", "a.b.c"], []),
        ("**.attn", ["attn", "a.attn", "a.b.attn"], ["xattn", "attn.a", ""]),
        ("layers.**", ["layers.0", "layers.0.mlp"], ["layers", "layersx", ""]),
        ("layers.**.**", ["layers.0", "layers.0.mlp"], ["layers"]),
        ("a.**.b", ["a.b", "a.x.b", "a.x.y.b"], ["ab", "a.xb", "b"]),
        ("**.*", ["a", "a.b"], [""]),
        ("**.a.**", ["a.b", "x.a.b.c"], ["a", "x.a"]),
        (r"a\*b", ["a*b"], ["axb"]),
        (r"a\:b.\[0\]", ["a:b.[0]"], []),
    ],
)
def test_wildcard_matches_by_segment(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [path for path in yes if not matches(pattern, path)] == []
    assert [path for path in no if matches(pattern, path)] == []


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("h.[0-11]", ["h.0", "h.9", "h.10", "h.11", "h.07"], ["h.12", "h.110", "h.", "h.1.1"]),
        ("h.[9-11]", ["h.9", "h.10", "h.11"], ["h.1", "h.8", "h.12", "h.91"]),
        ("h.[95-1203]", ["h.95", "h.100", "h.999", "h.1203"], ["h.94", "h.1204", "h.12030"]),
        ("h.[1,3,5]", ["h.1", "h.3", "h.5"], ["h.2", "h.13", "h.,"]),
        ("h.[0-2,10-12,out]", ["h.1", "h.11", "h.out"], ["h.3", "h.9", "h.o"]),
        ("h.[!0-5]", ["h.6", "h.10", "h.55"], ["h.0", "h.5", "h.05", "h.x"]),
        ("h.[!1,3]", ["h.2", "h.13", "h.31"], ["h.1", "h.3"]),
        ("*[0-5]", ["fc3", "3"], ["fc15", "fc31"]),
        ("fc[0-5]*", ["fc3", "fc3x"], ["fc31"]),
        ("fc1[0-2]", ["fc10", "fc12"], ["fc1", "fc13", "fc100"]),
        ("fc[0-9][0-9]", ["fc12", "fc07"], ["fc1", "fc123", "fc007"]),
        ("[q,k,v]_proj", ["q_proj", "v_proj"], ["o_proj", ",_proj"]),
        (r"[a\,b,c]", ["a,b", "c"], ["a", "b"]),
        ("[a-c,x]1", ["b1", "x1"], ["d1", "-1"]),
        ("fc[12]", ["fc1", "fc2"], ["fc12", "fc3"]),
        ("[abc]", ["a", "c"], ["d", "ab"]),
        ("[a-c0]", ["b", "0"], ["d", "-"]),
        ("[!a-c]", ["d"], ["a", "b", "dd"]),
        ("x[!a]y", ["xby"], ["xay", "x.y"]),
        ("x[+-9]y", ["x0y", "x,y"], ["x.y"]),
        (r"[\]\-^]", ["]", "-", "^"], ["\\"]),
        ("[*?]", ["*", "?"], ["a"]),
        ("[a-]", ["a", "-"], ["b"]),
    ],
)
def test_bracket_matches_numbers_words_and_characters(
    pattern: str, yes: list[str], no: list[str]
) -> None:
    assert [path for path in yes if not matches(pattern, path)] == []
    assert [path for path in no if matches(pattern, path)] == []


def test_regular_expression_matches_whole_path() -> None:
    assert matches(r"re:h\.\d+", "h.12")
    assert not matches(r"re:h\.\d+", "h.12.mlp")
    assert not matches("re:mlp", "h.0.mlp")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", True),
        ("a.b", True),
        (r"a\*.b", True),
        ("a.*", False),
        ("**", False),
        ("a?", False),
        ("a.[0]", False),
        ("re:a", False),
    ],
)
def test_path_without_wildcard_is_exact(path: str, expected: bool) -> None:
    assert is_exact(path) is expected


def test_escape_leaves_plain_paths_alone() -> None:
    assert escape("layers.3.mlp_1") == "layers.3.mlp_1"
    assert escape("a:b.*") == r"a\:b.\*"
    assert escape("re") == r"\re"
    assert unescape(r"a\:b.\*\\") == "a:b.*\\"


def match_slowly(pattern: list[str], path: list[str]) -> bool:
    """Match segment by segment, with nothing but recursion and fnmatch."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        if set(pattern) == {"**"}:
            return True
        return any(match_slowly(pattern[1:], path[skip:]) for skip in range(len(path) + 1))
    if not path or not fnmatch.fnmatchcase(path[0], pattern[0]):
        return False
    if len(pattern) > 1 and set(pattern[1:]) == {"**"}:
        return len(path) > 1
    return match_slowly(pattern[1:], path[1:])


segments = st.sampled_from(["a", "b", "ab", "*", "a*", "*b", "?", "?b", "[ab]", "[!a]", "**"])
paths = st.lists(st.text("abc", min_size=1, max_size=3), max_size=4)


@given(st.lists(segments, min_size=1, max_size=4), paths)
def test_pattern_agrees_with_slow_matcher(pattern: list[str], path: list[str]) -> None:
    assert matches(".".join(pattern), ".".join(path)) is match_slowly(pattern, path)


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 4000))
def test_numeric_range_agrees_with_comparison(one: int, other: int, number: int) -> None:
    low, high = sorted((one, other))
    assert matches(f"h.[{low}-{high}]", f"h.{number}") is (low <= number <= high)
    assert matches(f"h.[!{low}-{high}]", f"h.{number}") is not (low <= number <= high)


@given(st.lists(st.text(min_size=1).filter(lambda text: "." not in text), max_size=3))
def test_escaped_path_matches_itself_only(path: list[str]) -> None:
    name = ".".join(path)
    assert is_exact(escape(name))
    assert matches(escape(name), name)
    assert not matches(escape(name), name + "x")
