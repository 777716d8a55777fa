"""Match what names do not: values in the order of execution.

Works on values and not on modules, so that it does not matter how modules are nested.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hookline.diffs.fingerprints import Fingerprints
from hookline.diffs.kinds import can_be_of_one_kind
from hookline.diffs.naming import ModulePairs
from hookline.diffs.outlines import Outline
from hookline.diffs.partners import SitePairs
from hookline.diffs.scoring import Scorer, Side
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


def pair_by_place(pairs: SitePairs, modules: ModulePairs) -> None:
    """Match values of unknown kinds that stand between the same matches, as many on each side."""
    left_a, left_b = list_left(pairs, modules)
    gaps_a, gaps_b = find_gaps(pairs, left_a, left_b)
    ours = _sort_by_place(pairs.a, left_a, gaps_a.tolist())
    theirs = _sort_by_place(pairs.b, left_b, gaps_b.tolist())
    for key, sites in ours.items():
        others = theirs.get(key, [])
        for site, other in zip(sites, others, strict=False) if len(sites) == len(others) else ():
            path, other_path = pairs.a.sites[site].module, pairs.b.sites[other].module
            is_free = modules.forward.get(path, other_path) == other_path
            is_free &= modules.backward.get(other_path, path) == path
            if is_free and can_be_of_one_kind(pairs.a, path, pairs.b, other_path):
                pairs.add_one(site, other, "order")


def _sort_by_place(
    outline: Outline, sites: list[int], gaps: list[int]
) -> dict[tuple[object, ...], list[int]]:
    found: dict[tuple[object, ...], list[int]] = {}
    for number, gap in zip(sites, gaps, strict=True):
        site = outline.sites[number]
        found.setdefault((gap, site.port, site.shape, site.dtype), []).append(number)
    return found


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
