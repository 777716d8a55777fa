"""A difference as text: the sentence, the place, the sites around it, how the two were matched.

Fits 80 columns, and says in words what colour would say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from hookline.diffs.difference import Difference, PairResult
from hookline.diffs.wording import name_place
from hookline.diffs.writing import write_r, write_rough
from hookline.views.diff_order import is_first, name_visit
from hookline.views.lines import Line, choose_width, make_printable, render, wrap

_BEFORE = 3
_AFTER = 4
_NEAREST = 3
_MOST_NAMES = 4
_LABEL = 9
"""How wide the words at the left are."""

_DECADES = 4
"""How many powers of ten a bar has on each side of the limit."""

_LEAST_NAME = 16
_STYLES = {"introduces": "bold red", "missing": "bold red", "inherits": "yellow"}
_RULES = {
    "name": "by name",
    "wrapper": "by name without wrappers",
    "map": "by your map",
    "order": "by order, class and shape",
}


def format_diff(
    difference: Difference, *, width: int | None = None, all: bool = False, color: bool = False
) -> str:
    """Write a difference: what it is, where, what is around it; with `all`, every pair."""
    wide = choose_width(width)
    style = "bold green" if difference.same else "bold red"
    lines: list[Line] = wrap(difference.sentence, wide, style=style)
    place = list(_describe_place(difference, wide))
    if place:
        lines += [[], *place]
    table = list(_describe_pairs(difference, wide, all=all))
    if table:
        lines += [[], *table]
    lines += [[], *_describe_rest(difference, wide)]
    while lines and not lines[-1]:
        lines.pop()
    return render(lines, wide, color=color)


def count_compared(difference: Difference) -> str:
    """Say how many of the sites were compared; nothing where all of them were."""
    skipped = sum(1 for pair in difference.pairs if pair.verdict == "not compared")
    alone = len(difference.alone_a) + len(difference.alone_b)
    if not skipped and not alone:
        return ""
    compared = len(difference.pairs) - skipped
    why = [
        f"{skipped} could not be" if skipped else "",
        f"{alone} {'has' if alone == 1 else 'have'} no counterpart" if alone else "",
    ]
    told = ", ".join(filter(None, why))
    return f"{compared} of {compared + skipped + alone} sites compared: {told}"


def describe_blame(difference: Difference) -> str:
    """Say what about the module is to blame, where it is not simply the module."""
    if difference.is_gradual:
        return "no single place: the difference grows little by little"
    return name_place(difference) if difference.is_own_code else ""


def _describe_place(difference: Difference, width: int) -> Iterator[Line]:
    """Say what stands on both sides where they part, and why they may."""
    if difference.same or difference.site is None:
        return
    yield from _label("first", name_visit(difference.site, difference.visit), width)
    one = _join(difference.first, difference.type, difference.source)
    other = _join(difference.first_b, difference.type_b, difference.source_b)
    if one != other:
        yield from _label("in A", one, width)
        yield from _label("in B", other, width)
    elif one:
        yield from _label("in", one, width)
    yield from _label("what", difference.word, width)
    yield from _label("blame", describe_blame(difference), width)
    yield from _label("at", difference.operation or "", width)
    for number, cause in enumerate(difference.causes):
        yield from _label("" if number else "why", cause, width)
    yield from _label("graft", str((difference.graft or {}).get("sentence", "")), width)
    others = [path or "the model" for path in difference.candidates if path != difference.first]
    yield from _label("or", ", ".join(others), width)


def _join(path: str | None, type_: str, source: str) -> str:
    if path is None:
        return "not there"
    return "  ".join(filter(None, (path or "the model", type_, source)))


def _label(name: str, text: str, width: int, *, style: str = "") -> list[Line]:
    """Write a text next to a word that says what it is; nothing where there is none."""
    return wrap(text, width, indent=" " * _LABEL, first=f"{name:<{_LABEL}}", style=style)


def _describe_pairs(difference: Difference, width: int, *, all: bool) -> Iterator[Line]:
    """Draw the pairs around the first difference, or those that come nearest to their limits."""
    if not difference.pairs:
        return
    if all:
        yield from _draw(difference, difference.pairs, width)
        return
    # What a module is given was mostly given back by another: once is enough.
    pairs = [one for one in difference.pairs if not one.same_as or is_first(difference, one)]
    at = next((at for at, pair in enumerate(pairs) if is_first(difference, pair)), None)
    if at is None:
        nearest = sorted((pair for pair in pairs if pair.r), key=lambda pair: -_compare(pair))
        if nearest:
            yield [("nearest to their limits", "dim")]
            yield from _draw(difference, nearest[:_NEAREST], width)
        return
    start, end = max(0, at - _BEFORE), at + _AFTER + 1
    window = list(_draw(difference, pairs[start:end], width))
    yield window[0]
    if start:
        yield [(f"  {_count(pairs[:start], 'before')}", "dim")]
    yield from window[1:]
    if pairs[end:]:
        yield [(f"  {_count(pairs[end:], 'after')}", "dim")]


def _count(pairs: Sequence[PairResult], where: str) -> str:
    """Say how many pairs there are of each verdict: `+37 sites after it: 30 inherit, 7 agree`."""
    counts = Counter(pair.verdict for pair in pairs)
    words = {"agrees": "agree", "inherits": "inherit"} if len(pairs) > 1 else {}
    sites = f"+{len(pairs)} site{'s' if len(pairs) > 1 else ''} {where} it"
    if len(counts) == 1:
        verdict = next(iter(counts))
        return f"{sites} {words.get(verdict, verdict)}"
    told = ", ".join(f"{count} {words.get(name, name)}" for name, count in counts.most_common())
    return f"{sites}: {told}"


def _draw(difference: Difference, pairs: Sequence[PairResult], width: int) -> Iterator[Line]:
    """Draw a table: the name, r, the limit, a bar, the verdict."""
    verdicts = max(len("verdict"), *(len(pair.verdict) for pair in pairs))
    numbers = [(_write(pair.r), write_rough(pair.limit)) for pair in pairs]
    wide_r = max(1, *(len(one) for one, _ in numbers))
    wide_limit = max(5, *(len(other) for _, other in numbers))
    rest = 2 + 2 + wide_r + 2 + wide_limit + 2 + (2 * _DECADES + 1) + 2 + verdicts
    longest = max(len("site"), *(len(_name(pair)) for pair in pairs))
    wide = max(_LEAST_NAME, min(longest, width - rest))
    head = f"  {'site':<{wide}}  {'r':>{wide_r}}  {'limit':>{wide_limit}}"
    yield [(f"{head}  {'r/limit':<{2 * _DECADES + 1}}  verdict", "dim")]
    for pair, (r, limit) in zip(pairs, numbers, strict=True):
        mark = "> " if is_first(difference, pair) and not difference.same else "  "
        text = f"{mark}{_cut(_name(pair), wide):<{wide}}  {r:>{wide_r}}  {limit:>{wide_limit}}"
        style = _STYLES.get(pair.verdict, "")
        yield [(f"{text}  {draw_bar(_compare(pair))}  ", ""), (pair.verdict, style)]
        if pair.site_b != pair.site:
            other = make_printable(name_visit(pair.site_b, pair.visit))
            yield [(f"    B: {_cut(other, width - 7)}", "dim")]


def draw_bar(far: float) -> str:
    """Draw how far r is from its limit: `==  |    ` is below it, `====|##  ` beyond.

    >>> draw_bar(-2.0), draw_bar(2.0), draw_bar(float("-inf"))
    ('==  |    ', '====|##  ', '    |    ')
    """
    if math.isnan(far):
        return " " * (2 * _DECADES + 1)
    # However little it is beyond, one mark shows it.
    below = round(max(-_DECADES, min(far, 0.0))) + _DECADES
    beyond = max(1, round(min(far, _DECADES))) if far > 0 else 0
    return f"{'=' * below:<{_DECADES}}|{'#' * beyond:<{_DECADES}}"


def _compare(pair: PairResult) -> float:
    """Give the power of ten between r and its limit; NaN where nothing was compared."""
    if pair.r is None or math.isnan(pair.r):
        return math.nan
    if pair.r == 0 or math.isinf(pair.limit):
        return -math.inf
    if pair.limit == 0 or math.isinf(pair.r):
        return math.inf
    return math.log10(pair.r) - math.log10(pair.limit)  # the ratio itself may be too small


def _write(number: float | None) -> str:
    return "-" if number is None else {"infinity": "inf"}.get(text := write_r(number), text)


def _name(pair: PairResult) -> str:
    return make_printable(name_visit(pair.site, pair.visit))


def _cut(name: str, width: int) -> str:
    """Cut a name at its beginning: its end tells it apart."""
    return name if len(name) <= width else f"…{name[1 - width :]}"


def _describe_rest(difference: Difference, width: int) -> Iterator[Line]:
    """Say how the two were matched, what stayed alone, and what else is to be known."""
    history = difference.history
    if history is not None and len(history.steps) > 1:
        steps = history.steps
        text = f"{len(steps)} in common ({steps[0]} to {steps[-1]})"
        yield from _label("steps", text, width, style="dim")
    one, other = difference.titles
    yield from _label("compared", f"A {one} (here) with B {other} (there)", width, style="dim")
    counts = Counter(pair.rule for pair in difference.pairs)
    told = ", ".join(f"{count} {_RULES.get(rule, rule)}" for rule, count in counts.items())
    yield from _label("matched", told or "nothing", width, style="dim")
    yield from _label("sites", count_compared(difference), width, style="dim")
    for side, names in (("A", difference.alone_a), ("B", difference.alone_b)):
        if names:
            few = ", ".join(names[:_MOST_NAMES])
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            yield from _label(f"only {side}", f"{len(names)}: {few}{more}", width, style="dim")
    for note in difference.notes:
        yield from _label("note", note, width, style="dim")
