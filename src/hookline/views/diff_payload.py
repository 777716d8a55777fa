"""What the page of a difference shows, as facts and compressed chunks of numbers; knows no page.

Every pair has a row. The details of a pair need both its tensors, so they are worked out for the
pairs that a reader will look at first, as far as that is quick.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hookline.diffs.difference import Difference, PairResult
from hookline.diffs.measuring import ErrorDetail, write_number
from hookline.diffs.traces import TraceSite
from hookline.stats.rows import derive
from hookline.views.diff_order import Row, is_first, order_rows
from hookline.views.diff_text import describe_blame
from hookline.views.payload import Payload, flatten
from hookline.views.pooling import choose_columns, pool
from hookline.views.quantising import pack

STATISTICS = ("rms", "mean", "std", "min", "max", "nan", "posinf", "neginf")
"""What is said of each side on its own."""

_MOST_NAMES = 400
_MOST_DETAILS = 60
_AROUND = 16
"""So many rows on each side of the first difference come before any other."""

_MOST_ELEMENTS = 40_000_000
"""Of how many elements, over all pairs, details are worked out."""

_MOST_POINTS = 256
"""How many points a profile has."""

_MOST_CELLS = 1_000_000
_LEAST_COLUMNS = 50
_MOST_COLUMNS = 1000


def make_diff_payload(difference: Difference) -> Payload:
    """Gather all that a page shows of a difference."""
    rows = order_rows(difference)
    payload = Payload(
        {
            "same": difference.same,
            "titles": list(difference.titles),
            "head": _describe_head(difference),
            "counts": {"pairs": len(difference.pairs), "over": len(difference.differing)},
            "place": _describe_place(difference, rows),
            "alignment": _describe_alignment(difference),
            "notes": list(difference.notes),
            "environment": _compare_environments(difference),
            "settings": _compare_settings(difference),
            "stats": list(STATISTICS),
            "rows": _describe_rows(difference, rows),
        }
    )
    _add_history(payload, difference, rows)
    return payload


def _describe_head(difference: Difference) -> dict[str, Any]:
    numbers = ("introduced", "agree_to", "limit", "floor")
    head: dict[str, Any] = {name: _round(getattr(difference, name)) for name in numbers}
    return {**head, "direction": difference.direction, "step": difference.step}


def _describe_place(difference: Difference, rows: Sequence[Row]) -> dict[str, Any] | None:
    """Say what stands on both sides where they part."""
    if difference.same:
        return None
    first = difference.first
    sides = [
        ("module", first if first is None else first or "(the model)", difference.first_b),
        ("class", difference.type, difference.type_b),
        ("value", difference.site, difference.site_b),
        ("source", difference.source, difference.source_b),
    ]
    graft = difference.graft or {}
    return {
        "sides": [[name, one or "", other or ""] for name, one, other in sides if one or other],
        "word": difference.word,
        "blamed": describe_blame(difference),
        "operation": difference.operation or "",
        "causes": list(difference.causes),
        "graft": str(graft.get("sentence", "")),
        "candidates": [path or "(the model)" for path in difference.candidates if path != first],
        "isListed": any(row.pair is not None and is_first(difference, row.pair) for row in rows),
    }


def _describe_alignment(difference: Difference) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for pair in difference.pairs:
        counts[pair.rule] = counts.get(pair.rule, 0) + 1
    renamed = [[one, other] for one, other in difference.names.items() if one != other]
    return {
        "rules": list(counts.items()),
        "renamed": renamed[:_MOST_NAMES],
        "renamedCount": len(renamed),
        "aloneA": list(difference.alone_a[:_MOST_NAMES]),
        "aloneCountA": len(difference.alone_a),
        "aloneB": list(difference.alone_b[:_MOST_NAMES]),
        "aloneCountB": len(difference.alone_b),
    }


def _compare_environments(difference: Difference) -> list[list[str]]:
    """List what was other around the two runs: versions, devices, settings."""
    if difference.traces is None:
        return []
    sides: list[dict[str, str]] = []
    for trace in difference.traces:
        facts = trace.facts
        words = {"autocast": facts.autocast, "tf32": str(facts.has_tf32)}
        words.update((name, text) for name, text in flatten(facts.environment))
        sides.append(words)
    one, other = sides
    names = [name for name in {**one, **other} if one.get(name, "") != other.get(name, "")]
    return [[name, one.get(name, ""), other.get(name, "")] for name in names]


def _compare_settings(difference: Difference) -> dict[str, list[list[str]]]:
    """List by module what is set otherwise on the two sides."""
    if difference.traces is None:
        return {}
    here, there = (trace.facts.modules for trace in difference.traces)
    found = {}
    for path, one in here.items():
        other = there.get(difference.names.get(path, path))
        # Modules of other classes have other settings; that tells nothing.
        if other is None or one.type != other.type:
            continue
        sides = [{"training": str(side.training), **side.config} for side in (one, other)]
        names = [name for name in sides[0] if sides[0][name] != sides[1].get(name, sides[0][name])]
        if names:
            found[path] = [[name, sides[0][name], sides[1][name]] for name in names]
    return found


def _describe_rows(difference: Difference, rows: Sequence[Row]) -> list[dict[str, Any]]:
    details = dict(_work_out_details(difference, rows))
    statistics = _read_statistics(difference)
    return [
        _describe_row(difference, row, details.get(at), statistics) for at, row in enumerate(rows)
    ]


def _describe_row(
    difference: Difference,
    row: Row,
    detail: ErrorDetail | None,
    statistics: Sequence[np.ndarray[Any, Any]] | None,
) -> dict[str, Any]:
    pair = row.pair
    facts: dict[str, Any] = {"section": row.section, "depth": row.depth, "visit": row.visit}
    if pair is None:
        side = {"address": row.site, **_describe_site(row.found)}
        return {
            **facts,
            "verdict": "alone",
            "a": side if row.is_a else None,
            "b": None if row.is_a else side,
        }
    facts |= {
        "module": pair.module,
        "a": _describe_side(pair, row.found, is_a=True),
        "r": _round(pair.r),
        "limit": _round(pair.limit),
        "floor": _round(pair.floor),
        "rule": pair.rule,
        "how": pair.how,
        "verdict": pair.verdict,
        "measured": pair.measured,
    }
    other = _describe_side(pair, row.found_b, is_a=False)
    if other != facts["a"]:
        facts["b"] = other
    if pair.word:
        facts["word"] = pair.word
    if pair.same_as:
        facts["same"] = pair.same_as
    if is_first(difference, pair):
        facts |= {"isFirst": True, "more": list(difference.causes)}
    if statistics is not None and pair.match is not None and not pair.match.is_group:
        places = (pair.match.a[0], pair.match.b[0])
        facts["stats"] = [
            [_round(float(value)) for value in values[place]]
            for values, place in zip(statistics, places, strict=True)
        ]
    if detail is not None:
        facts["detail"] = _describe_detail(detail)
    return {name: value for name, value in facts.items() if value is not None}


def _describe_side(pair: PairResult, found: TraceSite | None, *, is_a: bool) -> dict[str, Any]:
    end = "" if is_a else "_b"
    return {
        "address": getattr(pair, f"site{end}"),
        "type": getattr(pair, f"type{end}"),
        "dtype": getattr(pair, f"dtype{end}"),
        "shape": list(getattr(pair, f"shape{end}")),
        "source": found.source if found is not None else "",
    }


def _describe_site(found: TraceSite | None) -> dict[str, Any]:
    if found is None:
        return {}
    return {
        "type": found.type,
        "dtype": found.dtype,
        "shape": list(found.shape),
        "source": found.source,
    }


def _read_statistics(difference: Difference) -> list[np.ndarray[Any, Any]] | None:
    """Read the statistics of all sites of both sides, [sites, statistics]; None without traces."""
    if difference.traces is None or difference.steps is None:
        return None
    found = []
    for trace, step in zip(difference.traces, difference.steps, strict=True):
        rows = trace.measurements(step).rows
        with np.errstate(invalid="ignore", divide="ignore"):
            found.append(np.stack([derive(rows, name) for name in STATISTICS], axis=1))
    return found


def _work_out_details(
    difference: Difference, rows: Sequence[Row]
) -> Iterator[tuple[int, ErrorDetail]]:
    """Work out details of the pairs that a reader will look at first, as far as that is quick."""
    room = _MOST_ELEMENTS
    for at in _choose_detailed(difference, rows)[:_MOST_DETAILS]:
        pair = rows[at].pair
        assert pair is not None
        size = math.prod(pair.shape)
        if size > room:
            continue
        room -= size
        detail = difference.profile(pair.site, visit=pair.visit)
        if detail is not None:
            yield at, detail


def _choose_detailed(difference: Difference, rows: Sequence[Row]) -> list[int]:
    """List the pairs with tensors: the first difference, what is around it, the farthest apart."""
    pairs = {
        at: row.pair
        for at, row in enumerate(rows)
        if row.pair is not None and row.pair.measured == "tensor" and row.pair.r
    }
    first = next((at for at, pair in pairs.items() if is_first(difference, pair)), None)
    order = sorted(pairs, key=lambda at: -(pairs[at].r or 0.0) / (pairs[at].limit or 1.0))
    if first is not None:
        order.sort(key=lambda at: min(abs(at - first), _AROUND))
    return order


def _describe_detail(detail: ErrorDetail) -> dict[str, Any]:
    return {
        "largest": {
            "error": _round(detail.largest),
            "at": list(detail.where),
            "a": write_number(detail.values[0]),
            "b": write_number(detail.values[1]),
        },
        "mean": _round(detail.bias),
        # Not rounded: how far it is from one is all that it tells.
        "cosine": write_number(detail.cosine),
        "ulp": [_round(detail.ulp_median), _round(detail.ulp_p99)],
        "close": _round(detail.share_close),
        "profiles": [
            _describe_profile(dim, detail.shape, values) for dim, values in detail.profile.items()
        ],
    }


def _describe_profile(dim: int, shape: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """Give a profile in few points, each the largest of those it stands for."""
    size = shape[dim]
    stride = -(-len(values) // _MOST_POINTS)
    pooled = pool(np.asarray([values], np.float64), stride)[0]
    names = {0: "the first dimension", len(shape) - 1: "the last dimension"}
    return {
        "name": names.get(dim, f"dimension {dim}") if len(shape) > 1 else "the only dimension",
        "size": size,
        # A long profile comes in pieces already.
        "stride": stride * -(-size // len(values)),
        "values": [_round(float(value)) for value in pooled],
    }


def _add_history(payload: Payload, difference: Difference, rows: Sequence[Row]) -> None:
    """Add how far the two were apart in each step, against the limit; nothing for one step."""
    history = difference.history
    if history is None or len(history.steps) < 2 or not difference.pairs:
        return
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.where(history.r == 0, 0.0, history.r / history.limits)
    ratios = np.where(np.isnan(history.r), np.nan, ratios).T
    places = {id(row.pair): at for at, row in enumerate(rows) if row.pair is not None}
    most = min(_MOST_COLUMNS, max(_LEAST_COLUMNS, _MOST_CELLS // len(ratios)))
    columns = choose_columns(np.asarray(history.steps), most)
    packed = pack(pool(ratios, columns.stride))
    payload.facts["history"] = {
        **packed.facts(),
        "chunk": payload.add(packed.data),
        "shown": columns.first.tolist(),
        "of": [places[id(pair)] for pair in difference.pairs],
    }


def _round(number: float | None) -> float | str | None:
    """Write a number as far as a page shows its digits."""
    written = write_number(number)
    return float(f"{written:.4g}") if isinstance(written, float) else written
