r"""Read path patterns and match them against dotted module paths.

A path is segments joined by dots, and the empty path is the root. In a pattern:

    *           any characters within one segment; alone, a whole segment
    **          any number of whole segments: `**` is everything with the root, `a.**` all below `a`
    ?           one character
    [0-11]      a whole number from 0 to 11; `[!0-11]` any other whole number
    [1,3,out]   one of the alternatives, which may be ranges
    [abc] [!a]  one character, as in `fnmatch`
    \           the next character as it is
    re:...      a regular expression over the whole path

This file knows text only: no models, no ports.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

from hookline._errors import AddressError
from hookline.addresses.bracket import read_bracket

REGEX_PREFIX = "re:"
_DEEP = "**"
_ENDS = ":@/"
"""What may follow a path: a port, a variable, an operation."""
_SPECIAL = re.compile(r"[\\*?\[\]:@/]|^\s|\s$")


@dataclass(frozen=True, slots=True)
class PathPattern:
    """Hold one path pattern after reading."""

    text: str
    """The pattern as written, without port and leaf."""

    segments: tuple[str, ...]
    """The segments as written; none for the root."""

    regex: str
    """The regular expression that a whole dotted path must match."""

    literal: str | None
    """The one path it names, without escapes; None where it holds a wildcard."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Hold one segment of a pattern and where it ends."""

    text: str
    regex: str
    literal: str | None
    end: int


def read_path(text: str) -> PathPattern:
    """Read the path at the start of `text`, up to `@`, `/`, the `:` of its port, or the end."""
    if not text or text[0] in _ENDS:
        return PathPattern("", (), "", "")
    segments = [_read_segment(text, 0)]
    while text[segments[-1].end : segments[-1].end + 1] == ".":
        segments.append(_read_segment(text, segments[-1].end + 1))
    literals = [segment.literal for segment in segments if segment.literal is not None]
    return PathPattern(
        text=text[: segments[-1].end],
        segments=tuple(segment.text for segment in segments),
        regex=_join(segments),
        literal=".".join(literals) if len(literals) == len(segments) else None,
    )


@functools.lru_cache(maxsize=1024)
def compile_path(path: str) -> Callable[[str], re.Match[str] | None]:
    """Compile a path pattern into a function that is true for the paths it matches."""
    source = path[len(REGEX_PREFIX) :] if is_regex(path) else read_path(path).regex
    return re.compile(source, 0 if is_regex(path) else re.DOTALL).fullmatch


@functools.lru_cache(maxsize=1024)
def read_exact(path: str) -> str | None:
    """Return the one path that `path` names without its escapes, or None for a pattern."""
    return None if is_regex(path) else read_path(path).literal


Step = tuple[str | None, Callable[[str], object] | None]
"""One segment: the name it is, or a test of names."""


@functools.lru_cache(maxsize=1024)
def read_steps(path: str) -> tuple[Step, ...] | None:
    """Split a pattern into one step a segment; None where it may match at any depth."""
    if is_regex(path):
        return None
    segments = read_path(path).segments
    if _DEEP in segments:
        return None
    return tuple(
        (read_exact(one), None) if read_exact(one) is not None else (None, compile_path(one))
        for one in segments
    )


def is_regex(path: str) -> bool:
    """Say whether the path is a regular expression."""
    return path.startswith(REGEX_PREFIX)


def is_exact(path: str) -> bool:
    """Say whether the path holds no wildcard, so that it names one place."""
    return read_exact(path) is not None


def unescape(path: str) -> str:
    """Remove the backslashes that escape the characters after them."""
    return re.sub(r"\\(.)", r"\1", path, flags=re.DOTALL)


def escape(path: str) -> str:
    """Write a dotted path of names as an exact pattern."""
    if path == "re":
        # `re:output` would read as a regular expression.
        return r"\re"
    return _SPECIAL.sub(lambda found: "\\" + found[0], path) if _SPECIAL.search(path) else path


def _read_segment(text: str, start: int) -> _Segment:
    atoms: list[str] = []
    literal: list[str] | None = []
    at = start
    while at < len(text) and text[at] != "." and text[at] not in _ENDS:
        character = text[at]
        atom = None
        after = at + 1
        if character == "\\":
            if after == len(text):
                raise AddressError("a backslash must be followed by a character", text, at)
            character = text[after]
            after += 1
        elif character == "[":
            atom, after = read_bracket(text, at, start)
        elif character == "*":
            atom, after = _read_star(text, at, start)
        elif character == "?":
            atom = "[^.]"
        elif character == "]":
            raise AddressError(r"`]` closes nothing; a name that holds it has `\]`", text, at)
        if atom is not None:
            literal = None
        elif literal is not None:
            literal.append(character)
        atoms.append(re.escape(character) if atom is None else atom)
        at = after
    if at == start:
        raise AddressError(_explain_empty(text, start), text, min(start, max(len(text) - 1, 0)))
    written = text[start:at]
    regex = "[^.]+" if written == "*" else "".join(atoms)
    return _Segment(written, regex, None if literal is None else "".join(literal), at)


def _read_star(text: str, at: int, start: int) -> tuple[str, int]:
    if text[at + 1 : at + 2] != "*":
        return "[^.]*", at + 1
    after = at + len(_DEEP)
    if at != start or (after < len(text) and text[after] not in "." + _ENDS):
        raise AddressError("`**` must be a whole segment, as in `a.**.b`", text, at)
    return _DEEP, after


def _explain_empty(text: str, start: int) -> str:
    if start == 0:
        return "a path does not start with a dot"
    if start == len(text) or text[start] in _ENDS:
        return "a path does not end with a dot"
    return "a segment of the path is empty"


def _join(segments: list[_Segment]) -> str:
    parts: list[str] = []
    # `a.**.**` is `a.**`: two in a row say nothing more and make the expression backtrack.
    kept = [
        segment
        for index, segment in enumerate(segments)
        if segment.text != _DEEP or index == 0 or segments[index - 1].text != _DEEP
    ]
    for index, segment in enumerate(kept):
        is_last = index == len(kept) - 1
        if segment.text != _DEEP:
            parts.append(segment.regex if is_last else segment.regex + r"\.")
        elif is_last:
            parts.append(".*" if index == 0 else ".+")
        else:
            parts.append(r"(?:.*\.)?")
    return "".join(parts)
