"""What a page shows, as facts and compressed chunks of numbers; knows no page.

Numbers are chosen so that the whole stays small: what matters most first, further statistics as
far as there is room, and fewer columns where not even the first fit.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hookline.runs import MEASURES, SiteFacts
from hookline.runs.step_sources import Floats
from hookline.views.pooling import (
    Columns,
    Maps,
    choose_columns,
    pool,
    pool_line,
    read_exponents,
    read_maps,
)
from hookline.views.quantising import Packed, pack
from hookline.views.report import Report, describe_cost
from hookline.views.snippets import find_snippet

KINDS = ("value", "gradient", "parameter", "parameter gradient", "local gradient", "update")
"""The kinds of sites on a page."""

_MOST_COLUMNS = 2000
_LEAST_COLUMNS = 100
_MOST_CELLS = 1_200_000
"""How many cells a statistic has over all sites; a run of very many sites has fewer columns."""

_MOST_POINTS = 4000
_MOST_TIMES = 40
"""How many columns an exponent histogram has over time."""

_ROOM = 1_900_000
"""How many bytes of numbers a page may hold; in base64 they are a third more."""

_ROOM_FOR_EXPONENTS = 300_000
_LEVELS = 15
"""An exponent that no element has is 0, one that all have is 15; each level is a half."""

_NOT_FINITE = ("nan", "posinf", "neginf")

_FIRST: tuple[tuple[str, str], ...] = (
    *((kind, stat) for kind in KINDS for stat in _NOT_FINITE),
    ("value", "rms"),
    ("gradient", "rms"),
    ("update", "ratio"),
)
"""What a page is never without."""

_THEN: tuple[tuple[str, str], ...] = (
    ("parameter", "rms"),
    ("parameter gradient", "rms"),
    ("local gradient", "rms"),
    ("value", "absmax"),
    ("gradient", "absmax"),
    ("value", "zero_share"),
    ("gradient", "zero_share"),
)
"""What is worth fewer columns."""

_LAST: tuple[tuple[str, str], ...] = (
    ("update", "lost"),
    ("value", "dead_share"),
    ("parameter gradient", "dead_share"),
    ("value", "saturated"),
    ("value", "outlier"),
    ("parameter gradient", "zero_share"),
    ("update", "rms"),
    ("value", "mean"),
    ("value", "std"),
    ("gradient", "l2"),
    ("parameter", "absmax"),
    ("parameter gradient", "absmax"),
    ("update", "absmax"),
    ("parameter", "mean"),
    ("parameter", "std"),
    ("gradient", "mean"),
)
"""What comes as far as there is room."""


@dataclass(slots=True)
class Payload:
    """Hold facts as JSON can hold them, and the chunks that they name by number."""

    facts: dict[str, Any]
    """Everything but long rows of numbers."""

    chunks: list[bytes] = field(default_factory=list)
    """Numbers, each compressed by zlib."""

    def add(self, data: bytes) -> int:
        """Add a compressed chunk; give its number."""
        self.chunks.append(data)
        return len(self.chunks) - 1

    @property
    def size(self) -> int:
        """How many bytes the chunks have together."""
        return sum(map(len, self.chunks))

    def pack_facts(self) -> bytes:
        """Give the facts as compressed JSON."""
        text = json.dumps(self.facts, separators=(",", ":"), allow_nan=False)
        return zlib.compress(text.encode(), 9)


def make_payload(report: Report) -> Payload:
    """Gather all that a page shows of a run."""
    run = report.source
    sites = _list_sites(report)
    payload = Payload(
        {
            "verdict": report.verdict,
            "severity": report.severity,
            "run": {**report.run, "name": run.path.name},
            "groups": [_describe_group(report, group, sites) for group in report.groups],
            "notes": list(report.notes),
            "cost": {"line": describe_cost(report.cost), **_clean(report.cost)},
            "environment": flatten(run.environment),
            "model": {
                name: run.model[name] for name in ("type", "parameters") if name in run.model
            },
            "sites": {
                kind: [_describe_site(one) for one in found] for kind, found in sites.items()
            },
        }
    )
    _add_scalars(payload, report)
    _add_maps(payload, report, sites)
    _add_exponents(payload, report)
    return payload


def _list_sites(report: Report) -> dict[str, list[SiteFacts]]:
    """List the sites of each kind in the order of the forward, from the input to the loss."""
    run = report.source
    found = {}
    for kind in KINDS:
        own = run.describe_sites(kind=kind)
        # Gradients are met from the loss to the input.
        found[kind] = own[::-1] if kind == "gradient" else own
    return found


def _describe_site(site: SiteFacts) -> list[Any]:
    return [site.address, site.type, list(site.shape), site.dtype, site.source]


def _describe_group(
    report: Report, group: Any, sites: Mapping[str, Sequence[SiteFacts]]
) -> dict[str, Any]:
    root = {
        **group.root.to_dict(),
        "place": _place(group.root.site, sites),
        "snippet": find_snippet(report.source, group.root),
    }
    follows = [{**one.to_dict(), "place": _place(one.site, sites)} for one in group.follows]
    return {"root": root, "follows": follows}


def _place(address: str, sites: Mapping[str, Sequence[SiteFacts]]) -> list[Any] | None:
    """Find the row of the map that shows a site: its own, or that of the module it is inside of."""
    module = address.split("/")[0].split("@")[0]
    for wanted in (address, f"{address}:output", module, f"{module}:output"):
        for kind, own in sites.items():
            for row, site in enumerate(own):
                if site.address == wanted or (wanted == module and site.module == module != ""):
                    return [kind, row]
    return None


def _add_scalars(payload: Payload, report: Report) -> None:
    """Add the loss and whatever else was logged, by step."""
    run = report.source
    columns = choose_columns(run.steps, _MOST_POINTS)
    payload.facts["scalars"] = {
        "first": columns.first.tolist(),
        "names": {
            name: payload.add(_pack_lines(pool_line(run.scalar(name).values, columns.stride)))
            for name in run.scalars
            if name != "time"
        },
    }


def _pack_lines(lines: Sequence[Floats]) -> bytes:
    with np.errstate(over="ignore"):
        return zlib.compress(np.stack(lines).astype("<f4").tobytes(), 9)


def _add_maps(payload: Payload, report: Report, sites: Mapping[str, Sequence[SiteFacts]]) -> None:
    """Add as many statistics as there is room for, with fewer columns where that must be."""
    wanted = [one for one in (*_FIRST, *_THEN, *_LAST) if one[1] in MEASURES]
    count = sum(map(len, sites.values()))
    most = min(_MOST_COLUMNS, max(_LEAST_COLUMNS, _MOST_CELLS // max(1, count)))
    columns = choose_columns(report.source.steps, most)
    by_kind = {kind: [stat for own, stat in wanted if own == kind] for kind in sites}
    maps = read_maps(report.source, by_kind, columns)
    maps = {key: values for key, values in maps.items() if not np.isnan(values).all()}
    for kind in sites:
        if kind == "gradient":
            maps.update({key: values[::-1] for key, values in maps.items() if key[0] == kind})
        _mark_not_finite(maps, kind)
    while True:
        packed = _choose_maps(maps)
        if columns.count <= _LEAST_COLUMNS or all(one in packed for one in _THEN if one in maps):
            break
        columns = columns.halve()
        maps = {key: pool(values, 2) for key, values in maps.items()}
    _write_maps(payload, packed, columns)


def _choose_maps(maps: Maps) -> dict[tuple[str, str], Packed]:
    """Pack what there is room for, in the order of what matters; the least of it may be missing."""
    packed: dict[tuple[str, str], Packed] = {}
    room = _ROOM
    for key in (*_FIRST, *_THEN, *_LAST):
        if key not in maps:
            continue
        one = pack(maps[key])
        if len(one.data) <= room:
            packed[key] = one
            room -= len(one.data)
        elif key in _LAST:
            break  # the larger ones are at the end
    return packed


def _write_maps(
    payload: Payload, packed: Mapping[tuple[str, str], Packed], columns: Columns
) -> None:
    payload.facts["columns"] = {
        "first": columns.first.tolist(),
        "last": columns.last.tolist(),
        "stride": columns.stride,
    }
    payload.facts["maps"] = [
        {"kind": kind, "stat": stat, "chunk": payload.add(one.data), **one.facts()}
        for (kind, stat), one in packed.items()
    ]


def _mark_not_finite(maps: Maps, kind: str) -> None:
    """Where nothing finite was measured there is no statistic; say so, and drop counts of zero."""
    counts = [maps[kind, stat] for stat in _NOT_FINITE if (kind, stat) in maps]
    if not counts:
        return
    is_bad = np.nansum(counts, axis=0) > 0
    for (own, stat), values in maps.items():
        if own == kind and stat not in _NOT_FINITE:
            values[is_bad & np.isnan(values)] = np.inf
    for stat in _NOT_FINITE:
        if (kind, stat) in maps and not np.nansum(maps[kind, stat]):
            del maps[kind, stat]


def _add_exponents(payload: Payload, report: Report) -> None:
    """Add the exponents over time of as many kinds of sites as there is room for."""
    room = _ROOM_FOR_EXPONENTS
    found: dict[str, Any] = {}
    for kind in ("value", "gradient", "parameter gradient", "parameter"):
        read = read_exponents(report.source, kind, _MOST_TIMES)
        if read is None:
            continue
        steps, shares = read
        if kind == "gradient":
            shares = shares[::-1]
        filled = np.flatnonzero(shares.any(axis=(0, 1)))
        if not len(filled):
            continue
        low, high = int(filled[0]), int(filled[-1]) + 1
        data = zlib.compress(_to_levels(shares[:, :, low:high]), 9)
        if len(data) > room:
            continue
        room -= len(data)
        found[kind] = {
            "chunk": payload.add(data),
            "steps": steps.tolist(),
            "low": low,
            "bins": high - low,
        }
    payload.facts["exponents"] = found


def _to_levels(shares: Floats) -> bytes:
    """Turn shares [sites, times, exponents] into levels, each a byte."""
    exponents = np.log2(shares, where=shares > 0, out=np.zeros(shares.shape))
    levels = np.clip(np.round(exponents) + _LEVELS, 1, _LEVELS)
    return np.where(shares > 0, levels, 0).astype(np.uint8).tobytes()


def flatten(facts: Mapping[str, Any]) -> list[list[str]]:
    """List nested facts as names and words."""
    rows: list[list[str]] = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            rows += [[f"{name} {inner}", words] for inner, words in flatten(value)]
        elif value not in (None, "", [], {}):
            words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            rows.append([str(name), words])
    return rows


def _clean(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out numbers that JSON cannot hold."""
    return {
        name: value
        for name, value in facts.items()
        if not isinstance(value, float) or np.isfinite(value)
    }
