"""Match parameters and buffers: by the modules they belong to, else by their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from hookline.diffs.fingerprints import Fingerprints
from hookline.diffs.naming import ModulePairs
from hookline.diffs.outlines import Outline
from hookline.diffs.partners import SitePairs, is_same_order
from hookline.diffs.traces import Measurements

_AGREES = 1e-3


def pair_slots(pairs: SitePairs, modules: ModulePairs, mapped: Mapping[int, int]) -> None:
    """Match what the map names, then parameters and buffers of one name in paired modules."""
    for site, other in mapped.items():
        pairs.add_one(site, other, "map")
    for path, other_path in modules.forward.items():
        others = pairs.b.slots.get(other_path, {})
        for slot, site in pairs.a.slots.get(path, {}).items():
            if site not in pairs.by_a and slot in others and others[slot] not in pairs.by_b:
                pairs.add_one(site, others[slot], modules.rules[path])


def list_left_slots(pairs: SitePairs) -> tuple[list[int], list[int]]:
    """List the parameters and buffers without a counterpart."""
    left_a = [site for site in _list_slots(pairs.a) if site not in pairs.by_a]
    left_b = [site for site in _list_slots(pairs.b) if site not in pairs.by_b]
    return left_a, left_b


def pair_leftover_slots(
    pairs: SitePairs, modules: ModulePairs, weights: tuple[Fingerprints, Fingerprints]
) -> None:
    """Match parameters and buffers of other names.

    In paired modules those of the same numbers, then those of a shape in their order; elsewhere
    those of the same numbers, if only one has them.
    """
    for path, other in modules.forward.items():
        for pair in (_pair_same_numbers, _pair_same_shapes):
            ours = [site for site in pairs.a.slots.get(path, {}).values() if site not in pairs.by_a]
            slots = pairs.b.slots.get(other, {})
            pair(pairs, weights, ours, [one for one in slots.values() if one not in pairs.by_b])
    _pair_same_numbers(pairs, weights, *list_left_slots(pairs))


def turn(pairs: SitePairs, measure: Callable[[], tuple[Measurements, Measurements]]) -> None:
    """Say of matched parameters where one lies the other way round; `measure` gives numbers."""
    for match in list(dict.fromkeys(pairs.by_a.values())):
        site, other = pairs.a.sites[match.a[0]], pairs.b.sites[match.b[0]]
        if match.is_group or site.kind != "parameter" or len(site.shape) != 2:
            continue
        is_square = site.shape == other.shape == other.shape[::-1]
        is_turned = site.shape != other.shape and site.shape == other.shape[::-1]
        # Of one class a square weight that is turned is a mistake, and not another layout.
        if is_square and site.type != other.type:
            is_turned = _is_turned(measure(), site.id, other.id)
        if is_turned:
            turned = replace(match, how="transposed")
            pairs.by_a[site.id] = pairs.by_b[other.id] = turned


def _list_slots(outline: Outline) -> list[int]:
    return [site for slots in outline.slots.values() for site in slots.values()]


def _pair_same_numbers(
    pairs: SitePairs,
    weights: tuple[Fingerprints, Fingerprints],
    left_a: list[int],
    left_b: list[int],
) -> None:
    if not left_a or not left_b:
        return
    same = weights[0].compare(left_a, weights[1], left_b)
    is_only = (same.sum(1) == 1)[:, None] & (same.sum(0) == 1)[None]
    for i, j in np.argwhere(same & is_only):
        site, other = pairs.a.sites[left_a[i]], pairs.b.sites[left_b[j]]
        is_fitting = is_same_order(site.shape, other.shape) or site.shape == other.shape[::-1]
        is_of_one_kind = (site.kind, site.more.get("after")) == (
            other.kind,
            other.more.get("after"),
        )
        if is_fitting and is_of_one_kind:
            pairs.add_one(site.id, other.id, "order")


def _pair_same_shapes(
    pairs: SitePairs,
    weights: tuple[Fingerprints, Fingerprints],
    left_a: list[int],
    left_b: list[int],
) -> None:
    """Match those of a kind and shape in order, where both sides have as many."""
    ours, theirs = _sort_by_shape(pairs.a, left_a), _sort_by_shape(pairs.b, left_b)
    for key, sites in ours.items():
        others = theirs.get(key, [])
        if len(sites) != len(others):
            continue
        # Constant ones that are equal go together: a scale of ones, a shift of zeros.
        same = weights[0].compare(sites, weights[1], others, with_constant=True)
        if (same.sum(0) == 1).all() and (same.sum(1) == 1).all():
            others = [others[place] for place in same.argmax(1)]
        for site, other in zip(sites, others, strict=True):
            pairs.add_one(site, other, "order")


def _sort_by_shape(outline: Outline, sites: list[int]) -> dict[tuple[object, ...], list[int]]:
    found: dict[tuple[object, ...], list[int]] = {}
    for number in sites:
        site = outline.sites[number]
        key = (site.kind, bool(site.more.get("after", False)), tuple(sorted(site.shape)))
        found.setdefault(key, []).append(number)
    return found


def _is_turned(measured: tuple[Measurements, Measurements], a: int, b: int) -> bool:
    """Tell whether two have the same statistics and other sketches."""
    rows = measured[0].rows[a], measured[1].rows[b]
    sketches = measured[0].sketches[a], measured[1].sketches[b]
    if not np.allclose(*rows, rtol=_AGREES, atol=_AGREES * np.abs(rows[0][4:6]).max()):
        return False
    apart = np.linalg.norm(sketches[0] - sketches[1])
    return bool(apart > _AGREES * np.linalg.norm(sketches[0]))
