"""Whose code made the gradient that differs first.

A gradient that is a module's part for its input came from that module alone. A total gradient is
the sum of what every user of a value sends back: modules that take it, and the code around them.
Where parts were recorded they have been compared before, so the code around is left; where not,
what is set otherwise decides, and what cannot be decided is listed.
"""

from __future__ import annotations

from hookline.diffs.causes import Settings
from hookline.diffs.phases import BACKWARD, FORWARD, Pair
from hookline.diffs.traces import Trace
from hookline.diffs.tracing_back import Ancestry, Blame, blame_kept, blame_value, list_candidates


class Blaming:
    """Say whose code made what a pair shows."""

    def __init__(self, traces: tuple[Trace, Trace], ancestry: Ancestry, settings: Settings) -> None:
        self.traces = traces
        self.ancestry = ancestry
        self.settings = settings
        self.has_parts = any(pair.own.is_part for pair in ancestry.pairs if pair.phase == BACKWARD)

    def blame(self, pair: Pair) -> Blame:
        """Say whose code made it."""
        if pair.phase == FORWARD:
            return self._blame_value(pair)
        if pair.phase != BACKWARD:
            return blame_kept(pair)
        if pair.own.is_part:
            return self._blame_part(pair)
        return self._blame_total(pair)

    def _blame_value(self, pair: Pair) -> Blame:
        """Blame who made a value, or a module whose own hooks change what it is given."""
        module = pair.a.module
        if pair.a.port == "input" and self.settings.has_other_hooks(module):
            return Blame(module, pair.b.module)
        first = self.ancestry.root(pair.a.id)
        maker = self.traces[0].sites[first]
        if pair.a.port == "input" and maker.port == "output" and first not in self.ancestry.of_site:
            # Nobody has touched it since: it is what that module gave, which had no counterpart.
            is_parent = maker.module in self.ancestry.parents
            other = self.settings.counterpart(maker.module)
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
