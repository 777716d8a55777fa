"""Pair the sites of two modules that are known to be one: ports, leaves and visits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hookline._trees import Path
from hookline.diffs.matches import Match
from hookline.diffs.outlines import Outline

Shape = tuple[int, ...]


class SitePairs:
    """Which sites have a counterpart already."""

    def __init__(self, a: Outline, b: Outline) -> None:
        self.a = a
        self.b = b
        self.by_a: dict[int, Match] = {}
        """The match of each site of A that has one."""
        self.by_b: dict[int, Match] = {}
        self.unlike: list[tuple[int, int, str]] = []
        """Sites of one name and different sizes, and the rule: kept where nothing fits better."""

    def add(self, match: Match) -> bool:
        """Take a match unless one of its sites has another."""
        if any(site in self.by_a for site in match.a) or any(site in self.by_b for site in match.b):
            return False
        self.by_a.update(dict.fromkeys(match.a, match))
        self.by_b.update(dict.fromkeys(match.b, match))
        return True

    def add_one(self, a: int, b: int, rule: str) -> bool:
        """Match two sites, or remember that they have one name and different sizes."""
        shape_a, shape_b = self.a.sites[a].shape, self.b.sites[b].shape
        if math.prod(shape_a) != math.prod(shape_b):
            self.unlike.append((a, b, rule))
            return False
        how = "same" if shape_a == shape_b else "reshaped"
        return self.add(Match((a,), (b,), rule, how))

    def partner(self, a: int) -> int | None:
        """Give the one site of B that a site of A is matched with."""
        match = self.by_a.get(a)
        return match.b[0] if match is not None and not match.is_group else None

    def keep_unlike(self) -> list[tuple[int, int]]:
        """Match what has one name and different sizes and found nothing better; give those."""
        return [(a, b) for a, b, rule in self.unlike if self.add(Match((a,), (b,), rule))]


def pair_values(pairs: SitePairs, path_a: str, path_b: str, rule: str) -> None:
    """Pair the values of two modules, visit by visit."""
    a, b = pairs.a, pairs.b
    visits_a, visits_b = a.count_visits(path_a), b.count_visits(path_b)
    if visits_a != visits_b and min(visits_a, visits_b):
        _pair_pieces(pairs, path_a, path_b, rule)
    for (port, visit), leaves_a in a.values.get(path_a, {}).items():
        _pair_leaves(pairs, leaves_a, b.ends(path_b, port, visit), rule)


def find_joint(whole: Shape, pieces: Sequence[Shape]) -> int | None:
    """Find the dimension along which pieces make up a whole; None where they do not."""
    if len(pieces) < 2 or any(len(piece) != len(whole) for piece in pieces):
        return None
    for dim, size in enumerate(whole):
        is_rest_equal = all(
            piece[:dim] == whole[:dim] and piece[dim + 1 :] == whole[dim + 1 :] for piece in pieces
        )
        if is_rest_equal and sum(piece[dim] for piece in pieces) == size:
            return dim
    return None


def is_same_order(one: Shape, other: Shape) -> bool:
    """Tell whether a shape becomes the other by joining or splitting neighbouring dimensions."""
    ends, others = _find_ends(one), _find_ends(other)
    return ends <= others or others <= ends


def _find_ends(shape: Shape) -> set[int]:
    """Give after how many elements, counted from behind, each dimension ends."""
    ends, product = set(), 1
    for size in reversed(shape):
        product *= size
        ends.add(product)
    return ends - {1}


def _pair_leaves(
    pairs: SitePairs, leaves_a: Mapping[Path, int], leaves_b: Mapping[Path, int], rule: str
) -> None:
    for leaf, site in leaves_a.items():
        if leaf in leaves_b and site not in pairs.by_a and leaves_b[leaf] not in pairs.by_b:
            pairs.add_one(site, leaves_b[leaf], rule)
    # Called or returned otherwise: an argument by name here and by place there, one of a tuple.
    left_a = _list_left(leaves_a.values(), pairs.by_a)
    left_b = _list_left(leaves_b.values(), pairs.by_b)
    sites_a, sites_b = pairs.a.sites, pairs.b.sites
    for site in left_a:
        fitting = (other for other in left_b if sites_b[other].shape == sites_a[site].shape)
        found = next(fitting, None)
        if found is not None and pairs.add_one(site, found, rule):
            left_b.remove(found)


def _list_left(sites: Iterable[int], matched: Mapping[int, Match]) -> list[int]:
    return [site for site in sites if site not in matched]


def _pair_pieces(pairs: SitePairs, path_a: str, path_b: str, rule: str) -> None:
    """Pair one visit with the several that took its batch in pieces."""
    a, b = pairs.a, pairs.b
    visits_a, visits_b = a.count_visits(path_a), b.count_visits(path_b)
    few, many = min(visits_a, visits_b), max(visits_a, visits_b)
    if many % few:
        return
    is_split_b = visits_b == many
    whole, parts = (a, b) if is_split_b else (b, a)
    path_whole, path_parts = (path_a, path_b) if is_split_b else (path_b, path_a)
    pieces = many // few
    # Where what is around it ran once a piece, all visits of the first piece come first.
    is_outermost = _count_around(parts, whole, path_parts, path_whole) == pieces
    for (port, visit), leaves in whole.values.get(path_whole, {}).items():
        numbers = (
            [visit + few * piece for piece in range(pieces)]
            if is_outermost
            else [visit * pieces + piece for piece in range(pieces)]
        )
        for leaf, site in leaves.items():
            found = [parts.ends(path_parts, port, number).get(leaf) for number in numbers]
            sites = tuple(one for one in found if one is not None)
            dim = find_joint(whole.sites[site].shape, [parts.sites[one].shape for one in sites])
            if len(sites) == pieces and dim is not None:
                one, several = ((site,), sites) if is_split_b else (sites, (site,))
                pairs.add(Match(one, several, rule, "concat", dim))


def _count_around(parts: Outline, whole: Outline, path_parts: str, path_whole: str) -> float:
    """Give how often the module around ran on the one side for once on the other."""
    while path_parts and path_whole:
        path_parts, path_whole = path_parts.rpartition(".")[0], path_whole.rpartition(".")[0]
        counts = parts.count_visits(path_parts), whole.count_visits(path_whole)
        if all(counts):  # a list of modules does not run itself
            return counts[0] / counts[1]
    return parts.count_visits("") / max(1, whole.count_visits(""))
