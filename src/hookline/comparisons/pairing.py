"""The operations of two forwards side by side: which one of B is which one of A.

In order, by name and shape; what lies between by name alone; and by value, where both sides came
to the same by other operations. A pair by name whose values differ gives way to one by value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from difflib import SequenceMatcher

import torch

from hookline.comparisons.operations import Call

Agree = Callable[[Call, Call], bool]
"""Tells whether the results of two operations are the same but for rounding."""

_MOST_LOOKS = 10_000
"""How many pairs are looked at by value."""


def pair_calls(
    a: Sequence[Call], b: Sequence[Call], names: Mapping[str, str], agree: Agree
) -> dict[int, int]:
    """Give for operations of A their partners in B, by number.

    `names` says what children of B are called in A.
    """
    names_a = [one.name for one in a]
    names_b = [names.get(one.name, one.name) if one.is_child else one.name for one in b]
    keys_a = [(name, one.shapes) for name, one in zip(names_a, a, strict=True)]
    keys_b = [(name, one.shapes) for name, one in zip(names_b, b, strict=True)]
    found = _match(keys_a, keys_b)
    found |= _match_between(found, names_a, names_b)
    _match_values(found, a, b, agree)
    return found


def sizes_of(call: Call) -> list[int]:
    """Give the numbers of elements of what an operation gives."""
    return [torch.Size(shape).numel() for shape in call.shapes]


def _match(a: Sequence[Hashable], b: Sequence[Hashable]) -> dict[int, int]:
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    return {
        block.a + offset: block.b + offset
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }


def _match_between(
    known: Mapping[int, int], a: Sequence[Hashable], b: Sequence[Hashable]
) -> dict[int, int]:
    """Match what lies between pairs that are known."""
    found: dict[int, int] = {}
    last_a = last_b = -1
    for here, there in [*sorted(known.items()), (len(a), len(b))]:
        inner = _match(a[last_a + 1 : here], b[last_b + 1 : there])
        found |= {last_a + 1 + x: last_b + 1 + y for x, y in inner.items()}
        last_a, last_b = here, there
    return found


def _match_values(
    found: dict[int, int], a: Sequence[Call], b: Sequence[Call], agree: Agree
) -> None:
    """Pair by value what is alone, and what differs from its partner by name."""

    def is_same(here: int, there: int) -> bool:
        return sizes_of(a[here]) == sizes_of(b[there]) and agree(a[here], b[there])

    unsure = [here for here in range(len(a)) if here not in found or not is_same(here, found[here])]
    sure = {there for here, there in found.items() if here not in set(unsure)}
    free = [there for there in range(len(b)) if there not in sure]
    looks = 0
    for here in unsure:
        for there in free:
            looks += 1
            if looks > _MOST_LOOKS:
                return
            if found.get(here) != there and is_same(here, there):
                # Whoever had it by name is alone now.
                for other in [one for one, its in found.items() if its == there]:
                    del found[other]
                found[here] = there
                free.remove(there)
                break
