"""Match what names do not: values in the order of execution, then the modules around them.

Works on values and not on modules, so that it does not matter how modules are nested.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hookline.diffs.fingerprints import Fingerprints
from hookline.diffs.naming import ModulePairs
from hookline.diffs.outlines import Outline
from hookline.diffs.partners import SitePairs, pair_values
from hookline.diffs.scoring import Scorer, Side, describe_parameters, find_family
from hookline.diffs.sequences import longest_rising, match_in_order
from hookline.diffs.traces import Measurements

if TYPE_CHECKING:
    import numpy.typing as npt

# Independent branches that ran in another order: one more pass finds each.
_MOST_PASSES = 4


def pair_in_order(
    pairs: SitePairs,
    modules: ModulePairs,
    weights: tuple[Fingerprints, Fingerprints],
    measured: tuple[Measurements, Measurements],
) -> int:
    """Match values in the order of execution; give how many are matched against that order."""
    count = 0
    for number in range(_MOST_PASSES):
        left_a, left_b = list_left(pairs, modules)
        if not left_a or not left_b:
            break
        scorer = Scorer(
            Side(weights[0], measured[0], left_a),
            Side(weights[1], measured[1], left_b),
            modules,
            find_gaps(pairs, left_a, left_b),
        )
        is_later = number > 0
        score = partial(scorer.score, only_strong=is_later)
        found = match_in_order(len(left_a), len(left_b), score)
        for i, j in found:
            pairs.add_one(left_a[i], left_b[j], "order")
        count += len(found) if is_later else 0
        if not found:
            break
    return count


def list_left(pairs: SitePairs, modules: ModulePairs) -> tuple[list[int], list[int]]:
    """List the values without a counterpart that the user's map does not name."""
    mapped_a = {path for path, rule in modules.rules.items() if rule == "map"}
    mapped_b = {modules.forward[path] for path in mapped_a}
    a, b = pairs.a, pairs.b
    left_a = [
        site for site in a.fresh if site not in pairs.by_a and a.sites[site].module not in mapped_a
    ]
    left_b = [
        site for site in b.fresh if site not in pairs.by_b and b.sites[site].module not in mapped_b
    ]
    return left_a, left_b


def find_gaps(
    pairs: SitePairs, left_a: list[int], left_b: list[int]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Say of each value between which of the matches that are in order it stands."""
    known = [
        (site, match.b[0])
        for site in pairs.a.fresh
        if (match := pairs.by_a.get(site)) is not None
        and match.a[0] == site
        and pairs.b.sites[match.b[0]].same_as is None
    ]
    rising = [known[place] for place in longest_rising([other for _, other in known])]
    fences = np.array(rising, dtype=np.intp).reshape(-1, 2)
    return np.searchsorted(fences[:, 0], left_a), np.searchsorted(fences[:, 1], left_b)


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
        if ours.port == theirs.port and _are_of_one_kind(a, ours.module, b, theirs.module):
            votes[ours.module, theirs.module] += 2 if ours.port == "output" else 1
    new = [pair for pair, _ in votes.most_common() if modules.add(*pair, "order")]
    new += _pair_by_ends(pairs, modules)
    for path_a, path_b in new:
        if _are_same_weights(weights, path_a, path_b) or _is_consistent(pairs, path_a, path_b):
            pair_values(pairs, path_a, path_b, "order")


def _are_of_one_kind(a: Outline, path_a: str, b: Outline, path_b: str) -> bool:
    type_a, type_b = a.types[path_a], b.types[path_b]
    family = find_family(type_a)
    if type_a == type_b or (family and family == find_family(type_b)):
        return True
    parameters = describe_parameters(a, path_a)
    return parameters != "" and parameters == describe_parameters(b, path_b)


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
            if _are_of_one_kind(a, path, b, other)
        ]
        # Of several around one another those of a kind go together, else from outside in.
        in_order = list(zip(paths, others, strict=False)) if len(paths) == len(others) else []
        found += [(x, y) for x, y in alike + in_order if modules.add(x, y, "order")]
    return found


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
