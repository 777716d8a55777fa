"""Find out which sites of two traces belong together.

The user's map comes first, then equal names, then names that are equal but for a prefix, then the
order of execution with classes, shapes, parameters and values. Each match says which it was.
Gradients and updates follow what they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from hookline.diffs.enclosing import pair_modules
from hookline.diffs.fingerprints import Fingerprints, compare_rows
from hookline.diffs.following import link_values, pair_followers
from hookline.diffs.joining import Joiner
from hookline.diffs.matches import Alignment
from hookline.diffs.naming import ModulePairs, pair_by_map, pair_by_name, settle_prefixes
from hookline.diffs.numbering import renumber
from hookline.diffs.ordering import list_left, pair_by_place, pair_in_order
from hookline.diffs.outlines import Outline
from hookline.diffs.owning import list_left_slots, pair_leftover_slots, pair_slots, turn
from hookline.diffs.partners import SitePairs, pair_values
from hookline.diffs.traces import Measurements, Trace

_FEW = 0.5
"""The share of matched values below which a note says so."""
_MOST_NAMED = 3


def align(
    a: Trace,
    b: Trace,
    *,
    step_a: int | None = None,
    step_b: int | None = None,
    names: Mapping[str, str] | None = None,
) -> Alignment:
    """Align two traces by their names and, where these differ, by what ran in the given steps.

    `names` maps paths of A, or regular expressions for them, to paths of B. Without steps the first
    of each is looked at. Raises ValueError where the map names what is not there.
    """
    return _Aligner(a, b, step_a, step_b).align(names or {})


class _Aligner:
    """Align two traces, one rule after the other."""

    def __init__(self, a: Trace, b: Trace, step_a: int | None, step_b: int | None) -> None:
        self.a = Outline(a)
        self.b = Outline(b)
        self.modules = ModulePairs()
        self.pairs = SitePairs(self.a, self.b)
        self.notes: list[str] = []
        self._unlike: list[tuple[int, int]] = []
        self._wanted = _choose_step(a, step_a), _choose_step(b, step_b)

    def align(self, names: Mapping[str, str]) -> Alignment:
        """Apply the rules."""
        mapped = pair_by_map(self.a, self.b, names, self.modules)
        pair_by_name(self.a, self.b, self.modules)
        settle_prefixes(self.a, self.b, self.modules)
        self.notes += renumber(self.a, self.b, self.modules, self._compare_weights)
        for path_a, path_b in self.modules.forward.items():
            pair_values(self.pairs, path_a, path_b, self.modules.rules[path_a])
        pair_slots(self.pairs, self.modules, mapped)
        if self._is_anything_left():
            self._match_in_order()
        self._keep_unlike()
        turn(self.pairs, lambda: self._numbers)
        pair_followers(self.pairs, self.modules)
        return self._tell()

    def _match_in_order(self) -> None:
        weights = self._weights
        joiners = [
            Joiner(self.pairs, weights, self._steps, is_whole_a=is_whole_a)
            for is_whole_a in (True, False)
        ]
        for joiner in joiners:
            joiner.join_by_weights()
        count = pair_in_order(self.pairs, self.modules, weights, self._numbers)
        if count:
            self.notes.append(f"{count} values are matched that were made in another order")
        for joiner in joiners:
            joiner.join_by_kind()
        pair_by_place(self.pairs, self.modules)
        pair_modules(self.pairs, self.modules, weights)
        pair_slots(self.pairs, self.modules, {})
        pair_leftover_slots(self.pairs, self.modules, weights)
        for joiner in joiners:
            joiner.join_parameters()
            self.notes += [
                f"`{path}` is put together otherwise than from one piece after the other, "
                "and not compared"
                for path in dict.fromkeys(joiner.refused)
            ]

    def _is_anything_left(self) -> bool:
        """Tell whether both sides have something that names did not match."""
        if None in self._wanted:
            return False
        left_a, left_b = list_left(self.pairs, self.modules)
        slots_a, slots_b = list_left_slots(self.pairs)
        return bool((left_a and left_b) or (slots_a and slots_b))

    @cached_property
    def _steps(self) -> tuple[int, int]:
        """The steps to look at, where both have one."""
        first, second = self._wanted
        assert first is not None
        assert second is not None
        return first, second

    @cached_property
    def _numbers(self) -> tuple[Measurements, Measurements]:
        """What was measured; read only where names do not suffice."""
        first, second = self._steps
        return self.a.trace.measurements(first), self.b.trace.measurements(second)

    @cached_property
    def _weights(self) -> tuple[Fingerprints, Fingerprints]:
        ours, theirs = self._numbers
        return Fingerprints(self.a, ours.rows), Fingerprints(self.b, theirs.rows)

    def _compare_weights(self, path_a: str, path_b: str) -> float:
        """Tell whether all weights of two modules are the same: 1 or 0."""
        if None in self._wanted:
            return 0.0
        ours, theirs = self._weights
        same = compare_rows(ours.merge_below(path_a), theirs.merge_below(path_b))
        return float(same.all())

    def _keep_unlike(self) -> None:
        self._unlike = sorted(self.pairs.keep_unlike())
        # What shows again a value that is told already goes without saying.
        kept = [
            (self.a.sites[site], self.b.sites[other])
            for site, other in self._unlike
            if self.a.origin(site) == site
        ]
        for ours, theirs in kept[:_MOST_NAMED]:
            self.notes.append(
                f"`{ours.address}` has shape {_format(ours.shape)} here and "
                f"{_format(theirs.shape)} there"
            )
        more = len(kept) - _MOST_NAMED
        if more > 0:
            words = "has a different shape" if more == 1 else "have different shapes"
            self.notes.append(f"{more} more {words}")

    def _tell(self) -> Alignment:
        pairs = self.pairs
        matches = sorted(set(pairs.by_a.values()), key=lambda match: match.a)
        values = link_values(pairs).values()
        # The gradients of what has other shapes are there on both sides, and not to be compared.
        unlike = {one for one, _ in self._unlike}, {one for _, one in self._unlike}
        alone_a = _list_alone(
            self.a, {*pairs.by_a, *(site for one in values for site in one.a)}, unlike[0]
        )
        alone_b = _list_alone(
            self.b, {*pairs.by_b, *(site for one in values for site in one.b)}, unlike[1]
        )
        smaller = min(len(self.a.fresh), len(self.b.fresh))
        matched = len(self.a.fresh) - len(set(alone_a) & set(self.a.fresh))
        if smaller and matched < _FEW * smaller:
            self.notes.insert(0, f"only {matched} of {smaller} values align")
        return Alignment(matches, alone_a, alone_b, dict(self.modules.forward), self.notes)


def _choose_step(trace: Trace, step: int | None) -> int | None:
    return step if step is not None else next(iter(trace.steps), None)


def _list_alone(outline: Outline, known: set[int], unlike: set[int]) -> list[int]:
    """List the sites that are not known, each value where it is first shown."""
    return [
        site.id
        for site in outline.sites
        if site.id not in known
        and site.of not in unlike
        and outline.origin(site.id) == site.id
        and site.kind != "overwritten"
    ]


def _format(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"
