"""Match gradients and updates: they follow the value or the parameter that they belong to."""

from __future__ import annotations

from dataclasses import replace

from hookline.diffs.matches import Match
from hookline.diffs.naming import ModulePairs
from hookline.diffs.outlines import Outline
from hookline.diffs.partners import SitePairs
from hookline.diffs.traces import TraceSite

_Key = tuple[str, bool, int]
"""The kind, whether it is a part, and what it belongs to."""


def pair_followers(pairs: SitePairs, modules: ModulePairs) -> None:
    """Match gradients and updates, each arrival with the arrival of the same number."""
    ours, theirs = _sort(pairs.a), _sort(pairs.b)
    values = link_values(pairs)
    for kind, is_part, owner in ours:
        is_whole_value = kind == "gradient" and not is_part
        match = values.get(owner) if is_whole_value else pairs.by_a.get(owner)
        if match is None or owner != match.a[0]:
            continue
        columns_a = [ours.get((kind, is_part, one), []) for one in match.a]
        columns_b = [theirs.get((kind, is_part, one), []) for one in match.b]
        for arrival in range(min(map(len, columns_a + columns_b))):
            a = tuple(column[arrival] for column in columns_a)
            b = tuple(column[arrival] for column in columns_b)
            if match.is_group or pairs.a.size(a[0]) == pairs.b.size(b[0]):
                pairs.add(replace(match, a=a, b=b))
    _pair_parts(pairs, modules)


def _sort(outline: Outline) -> dict[_Key, list[int]]:
    """Sort gradients and updates by what they belong to, in the order of arrival."""
    found: dict[_Key, list[int]] = {}
    for number in outline.followers:
        site = outline.sites[number]
        if site.of is not None:
            owner = site.of if site.is_part else outline.origin(site.of)
            found.setdefault((site.kind, site.is_part, owner), []).append(number)
    return found


def link_values(pairs: SitePairs) -> dict[int, Match]:
    """Give the match of each value of A as a whole, by the site that first showed it.

    The gradient of a copy is of the copy's consumers alone, and is not that of the value itself.
    """
    ours: dict[int, set[int]] = {}
    theirs: dict[int, set[int]] = {}
    found: dict[int, Match] = {}
    for match in pairs.by_a.values():
        firsts_a = tuple(map(pairs.a.origin, match.a))
        firsts_b = tuple(map(pairs.b.origin, match.b))
        for one in firsts_a:
            ours.setdefault(one, set()).update(firsts_b)
        for other in firsts_b:
            theirs.setdefault(other, set()).update(firsts_a)
        found.setdefault(firsts_a[0], replace(match, a=firsts_a, b=firsts_b))
    linked = {
        first: match
        for first, match in found.items()
        if all(ours[one] == set(match.b) for one in match.a)
        and all(theirs[other] == set(match.a) for other in match.b)
    }
    for match in pairs.by_a.values():
        # Where both were first shown there, copies made of them later are among their consumers.
        is_first_a = tuple(map(pairs.a.origin, match.a)) == match.a
        if is_first_a and tuple(map(pairs.b.origin, match.b)) == match.b:
            linked[match.a[0]] = match
    return linked


def _pair_parts(pairs: SitePairs, modules: ModulePairs) -> None:
    """Match the parts that modules send to their inputs by module, leaf and visit."""
    theirs: dict[tuple[object, ...], list[int]] = {}
    for number in pairs.b.followers:
        site = pairs.b.sites[number]
        if site.is_part and number not in pairs.by_b:
            theirs.setdefault(_name_part(site, site.module), []).append(number)
    for number in pairs.a.followers:
        site = pairs.a.sites[number]
        if site.is_part and number not in pairs.by_a and site.module in modules.forward:
            others = theirs.get(_name_part(site, modules.forward[site.module]), [])
            if others and pairs.a.size(number) == pairs.b.size(others[0]):
                pairs.add_one(number, others.pop(0), modules.rules[site.module])


def _name_part(site: TraceSite, module: str) -> tuple[object, ...]:
    return site.kind, module, site.port, site.leaf, site.visit
