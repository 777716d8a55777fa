"""The sites of a run by name: what an address or a pattern means there.

Ranks number their sites on their own; here they are one list, by address. Knows no model, only
the addresses that were written.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from hookline._errors import AmbiguousRead, NoSuchSite, NotRecorded
from hookline.runs.records import SITE_KINDS, SiteFacts
from hookline.runs.step_sources import Integers, StepSource

Where = str | Iterable[str] | None

_MOST_SUGGESTIONS = 3
_MOST_LISTED = 8
_PATTERN = frozenset("*?[")
_GRADIENTS = (".grad", ":grad")


class SiteDirectory:
    """List the sites of all ranks together."""

    def __init__(self, sources: Sequence[StepSource]) -> None:
        own = [source.sites() for source in sources]
        facts: dict[str, SiteFacts] = {}
        for sites in own:
            for site in sites:
                facts.setdefault(site.address, site)
        self.facts = list(facts.values())
        self._number = {address: number for number, address in enumerate(facts)}
        self.places: list[Integers] = []
        """For each source, the place of every site there; -1 where it has none."""
        for sites in own:
            places = np.full(len(facts), -1, np.int64)
            places[[self._number[site.address] for site in sites]] = np.arange(len(sites))
            self.places.append(places)

    def __contains__(self, address: str) -> bool:
        return address in self._number

    def find(self, given: str) -> int:
        """Find the one site that an address means; without a port it means the output."""
        for address in (given, f"{given}:output"):
            if address in self._number:
                return self._number[address]
        found = self._find_leaves(given) or self._find_aliases(given)
        if not found and _PATTERN & set(given):
            found = self._match(given)
        if len(found) == 1:
            return found[0]
        if not found:
            raise self._explain(given)
        names = [f"`{self.facts[number].address}`" for number in found[:_MOST_LISTED]]
        more = f" and {len(found) - len(names)} more" if len(found) > len(names) else ""
        raise AmbiguousRead(
            f"`{given}` means {len(found)} sites: {', '.join(names)}{more}. Name one of them, or "
            f"read all with `run.map(stat, where={given!r})`."
        )

    def select(self, where: Where = None, kind: str | Iterable[str] | None = None) -> Integers:
        """Find the sites that addresses or patterns mean, in the order in which they first ran.

        A path without a port means all that was measured there: an output with its gradient, a
        parameter with its gradient and update.
        """
        chosen = np.ones(len(self.facts), bool)
        if where is not None:
            chosen[:] = False
            for one in [where] if isinstance(where, str) else list(where):
                is_exact = one in self._number and _split(one)[1]
                found = [self._number[one]] if is_exact else self._match(one)
                found = found or self._find_aliases(one)
                if not found:
                    raise self._explain(one)
                chosen[found] = True
        if kind is not None:
            kinds = {kind} if isinstance(kind, str) else set(kind)
            unknown = sorted(kinds - set(SITE_KINDS))
            if unknown:
                raise NotRecorded(
                    f"{unknown[0]!r} is no kind of site; the kinds are "
                    f"{', '.join(map(repr, SITE_KINDS))}."
                )
            chosen &= np.array([site.kind in kinds for site in self.facts], bool)
        return np.flatnonzero(chosen)

    def _find_leaves(self, given: str) -> list[int]:
        """Find the leaves of a value: `attn:output[0]` for `attn`, or for `attn:output`."""
        path, suffix = _split(given)
        wanted = suffix or ":output"
        own = ((number, _split(site.address)) for number, site in enumerate(self.facts))
        return [
            number
            for number, (other, end) in own
            if other == path and _is_within(end, wanted) and end != wanted
        ]

    def _find_aliases(self, given: str) -> list[int]:
        """Find a site by another name of its module, which a shared module has."""
        path, suffix = _split(given)
        return [
            number
            for number, site in enumerate(self.facts)
            if path in site.more.get("names", ())
            and _is_within(_split(site.address)[1], suffix or ":output")
        ]

    def _match(self, pattern: str) -> list[int]:
        # Inside the function: these come with torch, and a reader of numbers needs no torch.
        from hookline.addresses.pattern import compile_path, is_regex, unescape

        if is_regex(pattern):
            matches = compile_path(pattern)
            return [
                number
                for number, site in enumerate(self.facts)
                if matches(unescape(_split(site.address)[0])) or matches(site.address)
            ]
        path, suffix = _split(pattern)
        matches = compile_path(path)
        found = []
        for number, site in enumerate(self.facts):
            own, end = _split(site.address)
            if matches(unescape(own)) and (not suffix or _is_within(end, suffix)):
                found.append(number)
        return found

    def _explain(self, given: str) -> NoSuchSite:
        names = list(self._number)
        paths = {_split(name)[0]: None for name in names}
        near = difflib.get_close_matches(given, [*names, *paths], n=_MOST_SUGGESTIONS, cutoff=0.5)
        nearest = f" Nearest: {', '.join(f'`{one}`' for one in near)}." if near else ""
        return NoSuchSite(
            f"`{given}` matches no site of this run ({len(names)} sites).{nearest} "
            "List them with `run.sites()`."
        )


@functools.lru_cache(maxsize=16384)
def _split(address: str) -> tuple[str, str]:
    """Split an address into its path, as written, and what follows."""
    from hookline.addresses.pattern import read_path

    path = read_path(address).text
    return path, address[len(path) :]


def _is_within(suffix: str, wanted: str) -> bool:
    """Tell whether `:output[0].grad` is `:output.grad` or a leaf of it."""
    if suffix.endswith(_GRADIENTS) != wanted.endswith(_GRADIENTS):
        return False
    body, start = (
        one[: -len(".grad")] if one.endswith(_GRADIENTS) else one for one in (suffix, wanted)
    )
    return body == start or body.startswith((f"{start}.", f"{start}["))
