"""Turn a bracket of a path pattern, such as `[0-11]` or `[!abc]`, into a regular expression.

Numbers in brackets mean whole numbers: `[0-11]` matches 10, and `*[0-5]` does not match `fc15`.
"""

from __future__ import annotations

import re

from hookline._errors import AddressError

_TOKEN = re.compile(r"\\.|.", re.DOTALL)
_LIST_ITEM = re.compile(r"(?:\\.|[^,\\])*", re.DOTALL)
_NUMBERS = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_INDEX = re.compile(r"[0-9]|-[0-9]+")
_SLICE = re.compile(r"-?[0-9]*:-?[0-9]*")


def read_bracket(text: str, opening: int, segment_start: int) -> tuple[str, int]:
    """Return the regular expression of the bracket at `opening`, and where the bracket ends."""
    closing = opening + 1
    while closing < len(text) and text[closing] != "]":
        closing += 2 if text[closing] == "\\" else 1
    if closing >= len(text):
        raise AddressError("`[` is not closed", text, opening)
    _reject_indexing(text, opening, closing, segment_start)
    body = text[opening + 1 : closing]
    is_negated = body.startswith("!")
    body = body.removeprefix("!")
    if not body:
        raise AddressError("the brackets are empty", text, opening)
    items = _split(body)
    if len(items) == 1 and not ("-" in body and _NUMBERS.fullmatch(body)):
        return _read_class(body, is_negated, text, opening), closing + 1
    # A digit or a bracket next to this one is part of the same number: `h1[0-2]`, `[0-9][0-9]`.
    before = text[segment_start:opening][-1:]
    after = text[closing + 1 : closing + 2]
    starts_number = not (before.isdecimal() or before == "]")
    ends_number = not (after.isdecimal() or after == "[")
    if is_negated:
        return _read_other_numbers(items, starts_number and ends_number, text, opening), closing + 1
    return _read_alternatives(items, starts_number, ends_number, text, opening), closing + 1


def _reject_indexing(text: str, opening: int, closing: int, segment_start: int) -> None:
    body = text[opening + 1 : closing]
    name = text[segment_start:opening]
    if _SLICE.fullmatch(body):
        raise AddressError(
            "slices are not supported; a range with both ends is written `[3-5]`", text, opening
        )
    if body[:1] in ("'", '"'):
        raise AddressError(
            f"a key follows a port: write `{text[:opening]}:output[{body}]`", text, opening
        )
    is_end = closing + 1 == len(text) or text[closing + 1] in ".:["
    if name and is_end and _INDEX.fullmatch(body):
        if body.startswith("-"):
            fix = f"count from the front, as in `{name}.11`"
        else:
            fix = f"write `{name}.{body}`"
        raise AddressError(
            f"a module in a list is a path segment: {fix} "
            f"(item {body} of its output is `{text[:opening]}:output[{body}]`)",
            text,
            opening,
        )


def _split(body: str) -> list[str]:
    items = [_LIST_ITEM.match(body)]
    while (last := items[-1]) is not None and last.end() < len(body):
        items.append(_LIST_ITEM.match(body, last.end() + 1))
    return [item[0] for item in items if item is not None]


def _read_class(body: str, is_negated: bool, text: str, opening: int) -> str:
    tokens = _TOKEN.findall(body)
    parts: list[str] = []
    at = 0
    while at < len(tokens):
        first = tokens[at][-1]
        if at + 2 < len(tokens) and tokens[at + 1] == "-":
            last = tokens[at + 2][-1]
            if first > last:
                raise AddressError(f"the range `{first}-{last}` is empty", text, opening)
            parts.append(f"{re.escape(first)}-{re.escape(last)}")
            at += 3
        else:
            parts.append(re.escape(first))
            at += 1
    # A dot never belongs to a segment, whatever the class says.
    return rf"(?!\.)[{'^' if is_negated else ''}{''.join(parts)}]"


def _read_alternatives(
    items: list[str], starts_number: bool, ends_number: bool, text: str, opening: int
) -> str:
    numbers: list[str] = []
    words: list[str] = []
    for item in items:
        if _NUMBERS.fullmatch(item):
            numbers.append(_read_numbers(item, text, opening))
        elif len(tokens := _TOKEN.findall(item)) == 3 and tokens[1] == "-":
            words.append(_read_class(item, False, text, opening))
        elif not item or {"*", "?"} & set(tokens):
            what = "an empty alternative" if not item else f"the wildcard in `{item}`"
            raise AddressError(f"{what} is not supported inside brackets", text, opening)
        else:
            words.append(re.escape("".join(token[-1] for token in tokens)))
    if numbers:
        zeros = "0*" if starts_number and ends_number else ""
        before = "(?<![0-9])" if starts_number else ""
        after = "(?![0-9])" if ends_number else ""
        words.append(f"{before}{zeros}(?:{'|'.join(numbers)}){after}")
    return f"(?:{'|'.join(words)})"


def _read_other_numbers(items: list[str], is_whole: bool, text: str, opening: int) -> str:
    if not all(_NUMBERS.fullmatch(item) for item in items):
        raise AddressError("`!` excludes characters or numbers, not words", text, opening)
    if not is_whole:
        raise AddressError("`!` with numbers stands for a whole number", text, opening)
    numbers = "|".join(_read_numbers(item, text, opening) for item in items)
    return f"(?<![0-9])(?!0*(?:{numbers})(?![0-9]))[0-9]+(?![0-9])"


def _read_numbers(item: str, text: str, opening: int) -> str:
    found = _NUMBERS.fullmatch(item)
    assert found is not None
    low = int(found[1])
    high = int(found[2] or found[1])
    if low > high:
        raise AddressError(
            f"the range `{item}` is empty: write `{high}-{low}`, both ends included", text, opening
        )
    widths = range(len(str(low)), len(str(high)) + 1)
    return "|".join(
        _span(str(max(low, 10 ** (width - 1) if width > 1 else 0)), str(min(high, 10**width - 1)))
        for width in widths
    )


def _span(low: str, high: str) -> str:
    """Write the numbers from `low` to `high`, which have the same number of digits."""
    if not low:
        return ""
    if low[0] == high[0]:
        return low[0] + _span(low[1:], high[1:])
    rest = len(low) - 1
    parts = [low[0] + _span(low[1:], "9" * rest), high[0] + _span("0" * rest, high[1:])]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{rest}}}")
    return f"(?:{'|'.join(parts)})"
