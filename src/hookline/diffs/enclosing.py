"""Pair the modules of two traces whose values were matched, and those around them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import numpy as np

from hookline.diffs.fingerprints import Fingerprints
from hookline.diffs.kinds import are_of_one_kind, can_be_of_one_kind
from hookline.diffs.naming import ModulePairs
from hookline.diffs.outlines import Outline
from hookline.diffs.partners import SitePairs, pair_values


def pair_modules(
    pairs: SitePairs, modules: ModulePairs, weights: tuple[Fingerprints, Fingerprints]
) -> None:
    """Pair the modules whose values were matched, then what these show again of others."""
    a, b = pairs.a, pairs.b
    votes: Counter[tuple[str, str]] = Counter()
    for site, match in pairs.by_a.items():
        if match.is_group or a.sites[site].kind != "value":
            continue
        ours, theirs = a.sites[site], b.sites[match.b[0]]
        if ours.port == theirs.port and can_be_of_one_kind(a, ours.module, b, theirs.module):
            votes[ours.module, theirs.module] += 2 if ours.port == "output" else 1
    new = [pair for pair, _ in votes.most_common() if modules.add(*pair, "order")]
    new += _pair_by_weights(pairs, modules, weights)
    new += _pair_by_ends(pairs, modules)
    new += _pair_by_children(pairs, modules)
    new += _pair_around(pairs, modules)
    for path_a, path_b in new:
        if _are_same_weights(weights, path_a, path_b) or _is_consistent(pairs, path_a, path_b):
            pair_values(pairs, path_a, path_b, "order")


def _pair_by_weights(
    pairs: SitePairs, modules: ModulePairs, weights: tuple[Fingerprints, Fingerprints]
) -> list[tuple[str, str]]:
    """Pair modules of one class and the same weights, which give values of other sizes."""
    mains: list[dict[str, int]] = []
    for own, known in zip(weights, (modules.forward, modules.backward), strict=True):
        found = {path: own.find_main(path) for path in own.outline.values if path not in known}
        mains.append({path: site for path, site in found.items() if site is not None})
    if not all(mains):
        return []
    a, b = pairs.a, pairs.b
    same = weights[0].compare(list(mains[0].values()), weights[1], list(mains[1].values()))
    same &= (same.sum(1) == 1)[:, None] & (same.sum(0) == 1)[None]
    paths, others = list(mains[0]), list(mains[1])
    alike = [(paths[i], others[j]) for i, j in np.argwhere(same)]
    return [
        (path, other)
        for path, other in alike
        if a.types[path] == b.types[other]
        and a.count_visits(path) == b.count_visits(other)
        and a.parameters(path).keys() == b.parameters(other).keys()
        and modules.add(path, other, "order")
    ]


def _pair_by_ends(pairs: SitePairs, modules: ModulePairs) -> list[tuple[str, str]]:
    """Pair modules that take and give the same values, as containers do."""
    a, b = pairs.a, pairs.b
    ours: dict[tuple[int, int], list[str]] = {}
    for path in a.types:
        ends = _find_ends(a, path) if path not in modules.forward else None
        if ends is not None:
            first, last = pairs.partner(ends[0]), pairs.partner(ends[1])
            if first is not None and last is not None:
                ours.setdefault((b.origin(first), b.origin(last)), []).append(path)
    theirs: dict[tuple[int, int], list[str]] = {}
    for path in b.types:
        ends = _find_ends(b, path) if path not in modules.backward else None
        if ends is not None:
            theirs.setdefault(ends, []).append(path)
    found = []
    for key, paths in ours.items():
        others = theirs.get(key, [])
        alike = [
            (path, other)
            for path in paths
            for other in others
            if are_of_one_kind(a, path, b, other)
        ]
        # Of several around one another those of a kind go together, else from outside in.
        in_order = list(zip(paths, others, strict=False)) if len(paths) == len(others) else []
        found += [(x, y) for x, y in alike + in_order if modules.add(x, y, "order")]
    return found


def _pair_by_children(pairs: SitePairs, modules: ModulePairs) -> list[tuple[str, str]]:
    """Pair modules that hold counterparts, from inside out, where no value speaks against it."""
    votes: dict[str, Counter[str]] = {}
    for path, other in modules.forward.items():
        votes.setdefault(_find_parent(path), Counter())[_find_parent(other)] += 1
    for match in pairs.by_a.values():
        if match.is_group:
            path, other = pairs.a.sites[match.a[0]].module, pairs.b.sites[match.b[0]].module
            votes.setdefault(_find_parent(path), Counter())[_find_parent(other)] += 1
    found = []
    for path in sorted(pairs.a.types, key=lambda path: -path.count(".")):
        if path in modules.forward or path not in votes:
            continue
        other, count = votes[path].most_common(1)[0]
        if 2 * count <= votes[path].total() or _do_ends_differ(pairs, path, other):
            continue
        if other in pairs.b.types and modules.add(path, other, "order"):
            found.append((path, other))
            votes.setdefault(_find_parent(path), Counter())[_find_parent(other)] += 1
    return found


def _pair_around(pairs: SitePairs, modules: ModulePairs) -> list[tuple[str, str]]:
    """Pair modules that are the smallest ones around the same counterparts, from inside out."""
    a, b = pairs.a, pairs.b
    found = []
    for path in sorted(a.values, key=lambda path: -path.count(".")):
        if path in modules.forward or not a.has_children(path):
            continue
        other = _find_around(a, path, modules.forward)
        if other is None or b.count_visits(other) != a.count_visits(path):
            continue
        if _find_around(b, other, modules.backward) != path:
            continue
        if not _do_ends_differ(pairs, path, other) and modules.add(path, other, "order"):
            found.append((path, other))
    return found


def _find_around(outline: Outline, path: str, partners: Mapping[str, str]) -> str | None:
    """Find what holds the counterparts of all that a module holds; None where it has too few."""
    inside = [
        partners[one].split(".")
        for one in outline.iterate_below(path)
        if one != path and one in partners
    ]
    if len(inside) < 2:
        return None
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*inside, strict=False))
    return ".".join(parts[0] for parts in shared)


def _find_parent(path: str) -> str:
    return path.rpartition(".")[0]


def _do_ends_differ(pairs: SitePairs, path_a: str, path_b: str) -> bool:
    """Tell whether two modules take or give values that have other counterparts."""
    ours, theirs = _find_ends(pairs.a, path_a), _find_ends(pairs.b, path_b)
    if ours is None or theirs is None:
        return ours is not theirs
    for site, other in zip(ours, theirs, strict=True):
        match, known = pairs.by_a.get(site), pairs.by_b.get(other)
        if match is not known and match is not None and known is not None:
            return True
    return False


def _find_ends(outline: Outline, path: str) -> tuple[int, int] | None:
    """Give the origins of the first value that a module takes and of the first it gives."""
    given = next(iter(outline.ends(path, "input").values()), None)
    result = next(iter(outline.ends(path, "output").values()), None)
    if given is None or result is None:
        return None
    return outline.origin(given), outline.origin(result)


def _are_same_weights(weights: tuple[Fingerprints, Fingerprints], path_a: str, path_b: str) -> bool:
    main_a, main_b = weights[0].find_main(path_a), weights[1].find_main(path_b)
    if main_a is None or main_b is None:
        return False
    return bool(weights[0].compare([main_a], weights[1], [main_b]).all())


def _is_consistent(pairs: SitePairs, path_a: str, path_b: str) -> bool:
    """Tell whether what both modules show again are values matched with each other."""
    a, b = pairs.a, pairs.b
    for (port, visit), leaves in a.values.get(path_a, {}).items():
        others = b.ends(path_b, port, visit)
        for leaf, site in leaves.items():
            other = others.get(leaf)
            if other is None or site in pairs.by_a or other in pairs.by_b:
                continue
            match = pairs.by_a.get(a.origin(site))
            known = pairs.by_b.get(b.origin(other))
            if match is not known and match is not None and known is not None:
                return False
    return True
