"""Children of a list by number: where one was put in or left out, the others have moved."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hookline.diffs.naming import ModulePairs
from hookline.diffs.outlines import Outline
from hookline.diffs.sequences import match_in_order

_SAME_WEIGHTS = 4.0
_SAME_TYPE = 1.0
_SAME_NUMBER = 0.25

Likeness = Callable[[str, str], float]
"""How sure it is that two modules have the same weights, from 0 to 1."""


def renumber(a: Outline, b: Outline, pairs: ModulePairs, likeness: Likeness) -> list[str]:
    """Pair the numbered children of two lists anew where their numbers mislead; say where."""
    notes = []
    lists_a, lists_b = _find_lists(a), _find_lists(b)
    for path_a, children_a in lists_a.items():
        path_b = pairs.forward.get(path_a)
        if path_b is None or path_b not in lists_b or pairs.rules[path_a] == "map":
            continue
        children_b = lists_b[path_b]
        if len(children_a) == len(children_b):
            continue
        moved = _align(a, b, children_a, children_b, likeness)
        by_number = {one: pairs.forward[one] for one in children_a if one in pairs.forward}
        if moved == by_number:
            continue
        for child in children_a:
            for below in a.iterate_below(child):
                if below in pairs.forward and pairs.rules[below] != "map":
                    pairs.remove(below)
        for child, other in moved.items():
            for below in a.iterate_below(child):
                target = other + below[len(child) :]
                if target in b.types:
                    pairs.add(below, target, "order" if target != below else "name")
        notes.append(
            f"`{path_a}` has {len(children_a)} numbered modules here and {len(children_b)} there; "
            "they are matched in order, not by number"
        )
    return notes


def _find_lists(outline: Outline) -> dict[str, list[str]]:
    """Find the modules that have numbered children, in the order of their numbers."""
    lists: dict[str, list[str]] = {}
    for path in outline.types:
        parent, _, last = path.rpartition(".")
        if last.isdecimal():
            lists.setdefault(parent, []).append(path)
    for children in lists.values():
        children.sort(key=lambda path: int(path.rpartition(".")[2]))
    return lists


def _align(
    a: Outline, b: Outline, ours: list[str], theirs: list[str], likeness: Likeness
) -> dict[str, str]:
    """Match two lists in order, so that most classes and weights agree."""
    scores = np.zeros((len(ours), len(theirs)), dtype=np.float32)
    for i, one in enumerate(ours):
        for j, other in enumerate(theirs):
            if a.types[one] == b.types[other]:
                is_number = one.rpartition(".")[2] == other.rpartition(".")[2]
                scores[i, j] = _SAME_TYPE + _SAME_NUMBER * is_number
                scores[i, j] += _SAME_WEIGHTS * likeness(one, other)
    found = match_in_order(len(ours), len(theirs), lambda rows: scores[rows])
    return {ours[i]: theirs[j] for i, j in found}
