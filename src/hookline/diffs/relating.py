"""Whether two runs are of one model at all: where hardly anything fits, no place is the first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hookline._errors import NotComparable
from hookline.diffs.matches import Alignment
from hookline.diffs.phases import Pair
from hookline.diffs.traces import Trace, TraceSite

_LEAST_SHARE = 0.25
"""Runs of which fewer values and parameters have a counterpart are of different models."""

_LEAST_CLASSES = 0.5
"""Where no more of the modules that were paired are of one class, names mean nothing."""

_KINDS = ("value", "parameter")


def refuse_unrelated(
    traces: tuple[Trace, Trace], alignment: Alignment, pairs: Sequence[Pair]
) -> None:
    """Refuse runs of different models: hardly a value or parameter has a counterpart."""
    own = [pair for pair in pairs if pair.kind in _KINDS and not pair.missing]
    own = [pair for pair in own if pair.kind == "parameter" or pair.a.same_as is None]
    # What has other sizes got its partner by its name alone.
    unlike = [pair for pair in own if not _is_alike(pair)]
    related = len(own) - (0 if _have_same_classes(own) else len(unlike))
    alone = max(
        sum(1 for one in sites if trace.sites[one].kind in _KINDS)
        for trace, sites in zip(traces, (alignment.alone_a, alignment.alone_b), strict=True)
    )
    count = len(own) + alone
    if related < _LEAST_SHARE * count:
        names = [trace.facts.title or name for trace, name in zip(traces, "AB", strict=True)]
        raise NotComparable(
            f"`{names[0]}` and `{names[1]}` are of different models: only {related} of {count} "
            "values and parameters have a counterpart. If they are one under other names, say "
            "which is which: names={'path in the first': 'path in the second'}."
        )


def _is_alike(pair: Pair) -> bool:
    return pair.match.is_group or math.prod(pair.a.shape) == math.prod(pair.b.shape)


def _have_same_classes(pairs: Sequence[Pair]) -> bool:
    """Tell whether most modules that call no other are of one class on both sides."""
    parents = {site.caller for pair in pairs for site in (pair.a, pair.b)}
    sites: dict[str, tuple[TraceSite, TraceSite]] = {
        pair.a.module: (pair.a, pair.b) for pair in pairs if pair.a.module not in parents
    }
    same = sum(a.type == b.type for a, b in sites.values())
    return same > _LEAST_CLASSES * len(sites)
