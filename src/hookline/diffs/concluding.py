"""From a judgement to the result: the verdict on every pair, the place to blame, the causes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hookline.diffs.causes import compare_settings, compare_site, find_broken_tie
from hookline.diffs.difference import Difference, PairResult
from hookline.diffs.factors import find_factor
from hookline.diffs.judging import Judgement, Origin
from hookline.diffs.phases import BACKWARD, FORWARD, PARAMETER_GRADIENT, UPDATE, Pair
from hookline.diffs.tracing_back import Blame
from hookline.diffs.wording import NOT_FINITE, ONLY_ZEROS, OTHER_SIZES

if TYPE_CHECKING:
    from hookline.diffs.matches import Alignment

_UNREPEATED = (
    "here it does not repeat itself: run again from the same random states it gives something "
    "else, by random numbers of its own or by what it keeps between calls"
)

_FAR = 10.0
"""What may be off by this many times the usual limit says nothing about how well runs agree."""


def conclude(
    judgement: Judgement, origin: Origin | None, *, alignment: Alignment, steps: tuple[int, int]
) -> Difference:
    """Make the result of one step."""
    a, b = judgement.traces
    pairs = [_judge_pair(judgement, origin, pair) for pair in judgement.pairs]
    tie = find_broken_tie((a.facts, b.facts), alignment.names)
    usual = _find_usual(pairs)
    found = Difference(
        same=origin is None,
        step=steps[0],
        steps=steps,
        pairs=pairs,
        alone_a=tuple(a.sites[one].address for one in alignment.alone_a),
        alone_b=tuple(b.sites[one].address for one in alignment.alone_b),
        names=dict(alignment.names),
        titles=(a.facts.title or "A", b.facts.title or "B"),
        traces=judgement.traces,
        agree_to=_find_largest(pairs[: None if origin is None else origin.pair.place], usual),
    )
    if origin is None:
        return dataclasses.replace(found, limit=usual, notes=() if tie is None else (tie[1],))
    return _describe(found, judgement, origin, tie)


def _describe(
    found: Difference, judgement: Judgement, origin: Origin, tie: tuple[str, str] | None
) -> Difference:
    """Put in what is to say of a difference."""
    pair = origin.pair
    blame, causes = _settle(judgement, origin, tie)
    a, b = (trace.facts.modules for trace in judgement.traces)
    own = a.get(blame.module)
    other = None if blame.module_b is None else b.get(blame.module_b)
    floor = float(judgement.limits.floors[pair.place])
    r = float(judgement.gaps.r[pair.place])
    return dataclasses.replace(
        found,
        first=blame.module,
        first_b=blame.module_b,
        site=pair.own.address if pair.missing else pair.a.address,
        site_b=pair.own.address if pair.missing else pair.b.address,
        direction=origin.direction,
        visit=pair.a.visit if pair.phase in (FORWARD, BACKWARD) else 0,
        introduced=None if math.isnan(r) else r,
        r_in=origin.r_in,
        floor=None if math.isnan(floor) else floor,
        limit=judgement.limit(pair),
        gain=origin.gain,
        is_gradual=origin.is_gradual,
        type=own.type if own else pair.a.type if blame.module == pair.a.module else "",
        type_b=other.type if other else pair.b.type if blame.module_b == pair.b.module else "",
        is_own_code=blame.is_own_code,
        before=blame.before,
        word=origin.word,
        candidates=blame.candidates or (blame.module,),
        written=blame.written,
        source=own.source if own else "",
        source_b=other.source if other else "",
        causes=tuple(dict.fromkeys(causes)),
    )


def _settle(
    judgement: Judgement, origin: Origin, tie: tuple[str, str] | None
) -> tuple[Blame, list[str]]:
    """Name what is to blame and the causes; some causes are at another place."""
    pair, blame, settings = origin.pair, origin.blame, judgement.settings
    if tie is not None and _is_of_ties(judgement, origin):
        path = tie[0].rpartition(".")[0]
        return Blame(path, settings.counterpart(path)), [tie[1]]
    if pair.phase in (PARAMETER_GRADIENT, UPDATE):
        factor = find_factor(judgement.pairs, judgement.gaps, pair.phase, judgement.differs)
        if factor:
            return Blame("", ""), [factor]
    facts = [trace.facts for trace in judgement.traces]
    causes = [*compare_site(pair), *settings.causes(blame.module)]
    if pair.a.id in judgement.traces[0].unrepeated:
        causes.append(_UNREPEATED)
    if blame.word:
        causes.insert(0, blame.word)
    if blame.direction == "loss":
        causes.append("the loss sends the model another gradient")
    return blame, [*causes, *compare_settings(facts[0], facts[1])]


def _is_of_ties(judgement: Judgement, origin: Origin) -> bool:
    """Tell whether a difference may come from parameters that are tied on one side alone."""
    if origin.pair.phase != FORWARD:
        return True
    names = (name for trace in judgement.traces for tie in trace.facts.ties for name in tie)
    return origin.blame.module in {name.rpartition(".")[0] for name in names}


def _judge_pair(judgement: Judgement, origin: Origin | None, pair: Pair) -> PairResult:
    r = float(judgement.gaps.r[pair.place])
    floor = float(judgement.limits.floors[pair.place])
    sites = judgement.traces[0].sites
    return PairResult(
        site=pair.own.address if pair.missing else pair.a.address,
        site_b=pair.own.address if pair.missing else pair.b.address,
        kind=pair.kind,
        rule=pair.match.rule,
        r=None if math.isnan(r) else r,
        limit=judgement.limit(pair),
        floor=None if math.isnan(floor) else floor,
        verdict=_find_verdict(judgement, origin, pair),
        module=pair.a.module,
        module_b=pair.b.module,
        type=pair.a.type,
        type_b=pair.b.type,
        port=pair.own.port,
        visit=pair.a.visit,
        dtype=pair.a.dtype,
        dtype_b=pair.b.dtype,
        shape=pair.a.shape,
        shape_b=pair.b.shape,
        how=pair.match.how,
        measured=judgement.gaps.measured[pair.place],
        same_as="" if pair.a.same_as is None else sites[pair.a.same_as].address,
        word=_find_word(judgement, pair),
        match=None if pair.missing else pair.match,
    )


def _find_word(judgement: Judgement, pair: Pair) -> str:
    r = float(judgement.gaps.r[pair.place])
    if pair.missing and pair.phase == FORWARD:
        return f"no such output {'there' if pair.missing == 'b' else 'here'}"
    if pair.missing:
        return f"lacking {'there' if pair.missing == 'b' else 'here'}"
    if math.isnan(r) and pair.a.dtype != pair.b.dtype:
        return f"{pair.a.dtype} here, {pair.b.dtype} there"
    if math.isinf(r) and math.isfinite(judgement.gaps.distances[pair.place]):
        return ONLY_ZEROS
    if math.isinf(r):
        is_cut = not pair.match.is_group and pair.a.shape != pair.b.shape
        return OTHER_SIZES if is_cut else NOT_FINITE
    return ""


def _find_verdict(judgement: Judgement, origin: Origin | None, pair: Pair) -> str:
    if origin is not None and pair is origin.pair:
        return "introduces"
    if math.isnan(judgement.gaps.r[pair.place]):
        return "not compared"
    if not judgement.is_past(pair):
        return "agrees"
    if judgement.is_cut_otherwise(pair):
        return "not compared"
    if origin is None or judgement.allowance.is_noise(pair) or judgement.is_allowed(pair):
        return "noise"
    return "missing" if pair.missing else "inherits"


def _find_usual(results: Sequence[PairResult]) -> float:
    """Give the limit that most pairs have."""
    found = [one.limit for one in results if one.r is not None and one.limit > 0]
    return float(np.median(found)) if found else 0.0


def _find_largest(results: Sequence[PairResult], usual: float) -> float:
    """Give the largest error of those that agree, but for those that may be far off."""
    return max(
        (
            one.r
            for one in results
            if one.r is not None and one.verdict == "agrees" and one.limit <= _FAR * usual
        ),
        default=0.0,
    )
