"""Whose code made the gradient that differs first.

A gradient that is a module's part for its input came from that module alone. A total gradient is
the sum of what every user of a value sends back: modules that take it, and the code around them.
Where parts were recorded they have been compared before, so the code around is left; where not,
what is set otherwise decides, and what cannot be decided is listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hookline.diffs.causes import Settings
from hookline.diffs.overwriting import Overwrite
from hookline.diffs.phases import BACKWARD, FORWARD, Pair
from hookline.diffs.traces import Trace, TraceSite
from hookline.diffs.tracing_back import Ancestry, Blame, blame_kept, blame_value, list_candidates


class Blaming:
    """Say whose code made what a pair shows."""

    def __init__(
        self,
        traces: tuple[Trace, Trace],
        ancestry: Ancestry,
        settings: Settings,
        overwrites: Sequence[Overwrite] = (),
    ) -> None:
        self.traces = traces
        self.overwrites = overwrites
        self.ancestry = ancestry
        self.settings = settings
        self._running_b = {site.module for site in traces[1].sites if site.kind == "value"}
        self.has_parts = any(pair.own.is_part for pair in ancestry.pairs if pair.phase == BACKWARD)

    def blame(self, pair: Pair) -> Blame:
        """Say whose code made it."""
        if pair.phase == FORWARD and pair.missing:
            return Blame(pair.a.module, pair.b.module)
        if pair.phase == FORWARD:
            return self._blame_value(pair)
        if pair.phase != BACKWARD:
            return blame_kept(pair)
        if pair.own.is_part:
            return self._blame_part(pair)
        return self._blame_total(pair)

    def refine(self, pair: Pair, blame: Blame) -> Blame:
        """Blame for a value who called its maker otherwise, or who wrote into what that used."""
        if pair.phase != FORWARD or blame.direction or pair.missing:
            return blame
        return self._find_omission(pair, blame) or self._find_writer(pair, blame)

    def _find_omission(self, pair: Pair, blame: Blame) -> Blame | None:
        """Blame the caller of a module for an argument that is there on one side alone.

        Not where no module of that class is given it on both sides: then it is a way to write it.
        """
        other = blame.module_b
        caller = self.ancestry.callers.get(blame.module)
        if other is None or caller is None:
            return None
        visit = pair.a.visit if pair.a.module == blame.module else 0
        matched = self.ancestry.of_site
        here = {one.leaf: one for one in self._list_inputs(0, blame.module, visit)}
        there = {one.leaf: one for one in self._list_inputs(1, other, visit)}
        if here.keys() < there.keys():
            more, alone, side = there, there.keys() - here.keys(), "there"
        elif there.keys() < here.keys():
            more, alone, side = here, here.keys() - there.keys(), "here"
        else:  # the same, or perhaps the same under other names
            return None
        for leaf in alone:
            kind = more[leaf].type
            if any(
                one.a.type == kind and one.a.leaf == leaf and one.a.port == "input"
                for one in matched.values()
                if one.phase == FORWARD
            ):
                name = ".".join(map(str, leaf))
                path = self.settings.counterpart(caller)
                words = f"it passes `{name}` to {blame.module} {side} alone"
                return Blame(caller, path, is_own_code=True, before=blame.module, word=words)
        return None

    def _list_inputs(self, side: int, path: str, visit: int) -> Iterator[TraceSite]:
        return (
            site
            for site in self.traces[side].sites
            if site.kind == "value"
            and site.port == "input"
            and site.module == path
            and site.visit == visit
        )

    def _find_writer(self, pair: Pair, blame: Blame) -> Blame:
        """Blame for what code made a module that wrote before into something the code may use."""
        if not blame.is_own_code:
            return blame
        ranked: list[tuple[bool, bool, int, Overwrite]] = []
        facts = self.traces[0].facts.modules
        for one in self.overwrites:
            holders = self.ancestry.holders(one.value)
            is_seen = any(blame.module in (site.module, site.caller) for site in holders)
            if is_seen and self.ancestry.is_within(one.moment, blame.module, pair.a):
                # What came from outside is likelier used again than what was made for the writer,
                # which torch's own layers are often told to write into.
                is_given = any(site.module == blame.module for site in holders)
                is_torch = one.module in facts and facts[one.module].is_torch
                ranked.append((is_given or not is_torch, is_given, one.moment, one))
        if not ranked:
            return blame
        ranked.sort(key=lambda entry: entry[:3], reverse=True)
        is_likely, _, _, found = ranked[0]
        writers = [entry[3].module for entry in ranked]
        if not is_likely:
            paths = list_candidates(blame.module, writers)
            return replace(blame, candidates=paths, written=found.address)
        return Blame(
            found.module,
            found.module_b,
            candidates=list_candidates(found.module, [*writers, blame.module]),
            written=found.address,
            word=f"it {found.word}, `{found.address}`, which the code around it uses again",
        )

    def _blame_value(self, pair: Pair) -> Blame:
        """Blame who made a value, or a module whose own hooks change what it is given."""
        module = pair.a.module
        if pair.a.port == "input" and self.settings.has_other_hooks(module):
            return Blame(module, pair.b.module)
        first = self.ancestry.root(pair.a.id)
        maker = self.traces[0].sites[first]
        is_alone = first not in self.ancestry.of_site
        if pair.a.port == "input" and maker.port == "output" and is_alone:
            # Nobody has touched it since: it is what that module gave, which had no counterpart.
            is_parent = maker.module in self.ancestry.parents
            other = self.settings.counterpart(maker.module)
            # One that is there and does not run was left out by who should have called it.
            if other is None or other in self._running_b:
                return Blame(maker.module, other, is_own_code=is_parent)
        return blame_value(pair, self.ancestry)

    def _blame_part(self, pair: Pair) -> Blame:
        """Blame the module that sent it; one that hands on its input sends what others sent."""
        a, b = pair.a, pair.b
        is_handed_on = any(
            site.module == a.module and site.port == "output" and site.visit == a.visit
            for site in self.ancestry.holders(pair.value)
        )
        if is_handed_on and a.caller is not None:
            return Blame(a.caller, b.caller, is_own_code=True)
        return Blame(a.module, b.module, is_own_code=a.module in self.ancestry.parents)

    def _blame_total(self, pair: Pair) -> Blame:
        """Find who may have sent a wrong share of a value's gradient."""
        holders = self.ancestry.holders(pair.value)
        for site in holders:
            if site.caller is None and site.port == "output":
                # What the model returned: nobody but the loss uses it.
                other = self.settings.counterpart(site.module)
                return Blame(site.module, other, direction="loss")
        scopes = self.ancestry.scopes(pair)
        if self.has_parts:
            rewired = self._find_rewired(pair)
            if rewired in scopes:
                scopes = list(list_candidates(rewired, scopes))
            return self._name(scopes or [pair.a.module], is_own_code=True)
        consumers = [
            path
            for path in self.ancestry.consumers(pair.value)
            if not (path not in self.ancestry.parents and self.settings.is_equal_leaf(path))
        ]
        others = [*consumers, *scopes]
        rewired = self._find_rewired(pair)
        if rewired is not None:
            return self._name([rewired, *others], is_own_code=True)
        telling = [path for path in consumers if self.settings.is_telling(path)]
        if telling:
            return self._name([*telling, *others])
        return self._name(others or [pair.a.module])

    def _find_rewired(self, pair: Pair) -> str | None:
        """Find the code that hands on the value itself on one side, and a new one on the other."""
        second = self.traces[1].sites
        own = self.ancestry.of_site
        value = own.get(self.ancestry.root(pair.value))
        if value is None or value.missing:
            return None
        for site in self.ancestry.holders(pair.value)[1:]:
            match = own.get(site.id)
            if match is None or match.missing:
                continue
            there = second[match.b.id].same_as
            there = match.b.id if there is None else there
            known = second[value.b.id].same_as
            if there != (value.b.id if known is None else known):
                return site.caller if site.port == "input" else site.module
        return None

    def _name(self, paths: list[str], *, is_own_code: bool = False) -> Blame:
        first = paths[0]
        return Blame(
            first,
            self.settings.counterpart(first),
            is_own_code=is_own_code or first in self.ancestry.parents,
            candidates=list_candidates(first, paths[1:]),
        )
