"""What a value was made of, and which module's code made it.

A value that comes into a module was made by the code of its caller, between the modules that this
calls; one that goes out was made by the module itself. Backward the same holds the other way
round. All of it is read off the first side.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hookline.diffs.phases import BACKWARD, FORWARD, PARAMETER_GRADIENT, STATE, UPDATE, Pair
from hookline.diffs.traces import Trace, TraceSite


@dataclass(frozen=True, slots=True)
class Blame:
    """Say whose code made a value."""

    module: str
    """The path on the first side."""

    module_b: str | None = None
    """The path on the second side; None where that is not known."""

    direction: str = ""
    """`input` where the model was given it; empty: that of the phase."""

    is_own_code: bool = False
    """Whether it was made between the modules that this one calls."""

    before: str = ""
    """The module that is called with it next."""

    candidates: tuple[str, ...] = ()
    """Who else may have made it, the likeliest first."""

    written: str = ""
    """The input that a candidate writes into, where that may be what is wrong."""

    word: str = ""
    """How it does."""


class Ancestry:
    """Look up what the values of the first side were made of."""

    def __init__(self, trace: Trace, pairs: Sequence[Pair]) -> None:
        self.trace = trace
        self.sites = trace.sites
        self.pairs = pairs
        self.of_site = {number: pair for pair in pairs for number in pair.match.a}
        self.callers = {site.module: site.caller for site in trace.sites if site.kind == "value"}
        """Who called each module last."""
        self.parents = {caller for caller in self.callers.values() if caller is not None}
        """The modules that call others."""
        self._entries: dict[str, list[tuple[int, int]]] = {}
        self._inside: dict[str, list[Pair]] = {}
        self._backward: dict[str, list[Pair]] = {}
        self._holders: dict[int, list[TraceSite]] = {}
        for site in trace.sites:
            if site.kind != "value":
                continue
            self._holders.setdefault(self.root(site.id), []).append(site)
            if site.port == "input":
                entries = self._entries.setdefault(site.module, [])
                if not entries or entries[-1][1] != site.visit:
                    entries.append((site.id, site.visit))
        for pair in pairs:
            self._sort_in(pair)

    def root(self, number: int) -> int:
        """Give the site that first showed the value of a site."""
        same = self.sites[number].same_as
        return number if same is None else same

    def holders(self, number: int) -> list[TraceSite]:
        """List the sites that show the same value, in the order of execution."""
        return self._holders.get(self.root(number), [])

    def maker(self, pair: Pair) -> Pair:
        """Give the pair where the value of this one was shown first."""
        return self.of_site.get(self.root(pair.a.id), pair)

    def predecessors(self, pair: Pair) -> list[Pair]:
        """List what the value of a pair was made of, as far as it was seen."""
        if pair.phase == FORWARD:
            return self._before(pair)
        if pair.phase == BACKWARD:
            return self._before_gradient(pair)
        own = [one for one in self._inside.get(pair.a.module, ()) if one.a.module == pair.a.module]
        if pair.phase == STATE:
            return [] if pair.is_early_state else own
        if pair.phase == PARAMETER_GRADIENT:
            arrived = self._backward.get(pair.a.module, ())
            return [*own, *(one for one in arrived if one.a.module == pair.a.module)]
        assert pair.phase == UPDATE
        return [
            one
            for one in self.pairs
            if one.phase in (STATE, PARAMETER_GRADIENT)
            and not one.missing
            and one.value == pair.value
        ]

    def _sort_in(self, pair: Pair) -> None:
        """Put a pair where it is found by the module whose code sees it."""
        sorted_in = {FORWARD: self._inside, BACKWARD: self._backward}.get(pair.phase)
        if sorted_in is None:
            return
        sorted_in.setdefault(pair.a.module, []).append(pair)
        if pair.a.caller is not None and pair.a.caller != pair.a.module:
            sorted_in.setdefault(pair.a.caller, []).append(pair)

    def _before(self, pair: Pair) -> list[Pair]:
        site = pair.a
        scope = site.module if site.port == "output" else site.caller
        if scope is None:
            return []
        start = self._find_entry(scope, site)
        return [
            one
            for one in self._inside.get(scope, ())
            if start <= one.a.id < site.id and _flows_into(one.a, scope)
        ]

    def _find_entry(self, scope: str, site: TraceSite) -> int:
        """Find where the execution of a module began that a site belongs to."""
        entries = self._entries.get(scope, [])
        if site.module == scope:
            return next((at for at, visit in entries if visit == site.visit), 0)
        at = bisect_left(entries, (site.id, 0)) - 1
        return entries[at][0] if at >= 0 else 0

    def _before_gradient(self, pair: Pair) -> list[Pair]:
        """List the gradients that arrived before, in the same scope, and the values there."""
        scopes = [pair.a.module] if pair.own.is_part else self.scopes(pair)
        found: dict[int, Pair] = {}
        for scope in scopes:
            for one in self._backward.get(scope, ()):
                is_below = one.a.caller == scope and one.a.port == "input"
                is_above = one.a.module == scope and one.a.port == "output"
                if one.place < pair.place and (is_below or is_above):
                    found[one.place] = one
            for one in self._inside.get(scope, ()):
                found[one.place] = one
        return list(found.values())

    def results_around(self, pair: Pair) -> list[Pair]:
        """List what the modules around a value give next: of each the first output."""
        found = []
        caller, seen = pair.a.caller, {pair.a.module}
        while caller is not None and caller not in seen:
            seen.add(caller)
            later = (
                one
                for one in self._inside.get(caller, ())
                if one.a.module == caller and one.a.port == "output" and one.a.id > pair.a.id
            )
            found += [one for one in [next(later, None)] if one is not None]
            caller = self.callers.get(caller)
        return found

    def is_within(self, moment: int, scope: str, site: TraceSite) -> bool:
        """Tell whether a site came in the same execution of a module as another, and before it."""
        return self._find_entry(scope, site) <= moment < site.id

    def scopes(self, pair: Pair) -> list[str]:
        """List the modules whose own code may use the value of a gradient, outermost first."""
        found: dict[str, None] = {}
        holders = self.holders(pair.value)
        for site in holders:
            if site.caller is not None and (site.port == "output" or site is holders[0]):
                found[site.caller] = None
        return sorted(found, key=self._depth)

    def consumers(self, number: int) -> list[str]:
        """List the modules that take a value, innermost first."""
        taking = dict.fromkeys(site.module for site in self.holders(number) if site.port == "input")
        return sorted(taking, key=lambda path: -self._depth(path))

    def _depth(self, path: str) -> int:
        depth, seen = 0, {path}
        caller = self.callers.get(path)
        while caller is not None and caller not in seen:
            seen.add(caller)
            depth, caller = depth + 1, self.callers.get(caller)
        return depth


def _flows_into(site: TraceSite, scope: str) -> bool:
    """Tell whether a value is given to a module, or to its code by a module that it calls."""
    return site.port == "input" if site.module == scope else site.port == "output"


def blame_value(pair: Pair, ancestry: Ancestry) -> Blame:
    """Say whose code made a value of the forward pass."""
    a, b = pair.a, pair.b
    if a.port == "input":
        if a.caller is None:
            return Blame(a.module, b.module, direction="input")
        return Blame(a.caller, b.caller, is_own_code=True, before=a.module)
    is_parent = a.module in ancestry.parents
    return Blame(a.module, b.module, is_own_code=is_parent)


def blame_kept(pair: Pair) -> Blame:
    """Say whose a parameter, a buffer, a parameter's gradient or an update is."""
    return Blame(pair.a.module, pair.b.module)


def list_candidates(first: str, others: Iterable[str]) -> tuple[str, ...]:
    """List who may be to blame, each once."""
    return tuple(dict.fromkeys((first, *others)))
