"""Match two sequences in order, so that the sum of the scores of the pairs is largest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Scores = npt.NDArray[np.float32]

_ROWS_AT_ONCE = 256
_TAKE, _SKIP_OURS, _SKIP_THEIRS = range(3)


def match_in_order(
    count: int, others: int, score: Callable[[slice], Scores]
) -> list[tuple[int, int]]:
    """Give the pairs of the best order-preserving match.

    `score` gives for some of the first sequence the scores against all of the second; two that
    score 0 or less are never paired. Of equally good matches the one furthest to the front wins.
    """
    moves = np.empty((count, others), dtype=np.uint8)
    after = np.zeros(others + 1, dtype=np.float32)
    for start in range((count - 1) // _ROWS_AT_ONCE * _ROWS_AT_ONCE, -1, -_ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, count))
        block = score(rows)
        for row in range(rows.stop - 1, start - 1, -1):
            scores = block[row - start]
            take = np.where(scores > 0, scores + after[1:], -np.inf)
            best = np.maximum(after[:-1], take)
            # Skipping some of theirs: the best of everything from here to the end.
            best = np.maximum.accumulate(best[::-1])[::-1]
            moves[row] = np.where(
                take == best, _TAKE, np.where(after[:-1] == best, _SKIP_OURS, _SKIP_THEIRS)
            )
            after[:-1] = best
    pairs = []
    i = j = 0
    while i < count and j < others:
        move = moves[i, j]
        if move == _TAKE:
            pairs.append((i, j))
        i += move != _SKIP_THEIRS
        j += move != _SKIP_OURS
    return pairs


def longest_rising(numbers: list[int]) -> list[int]:
    """Give the places of a longest rising subsequence."""
    ends: list[int] = []
    places: list[int] = []
    before: list[int] = [-1] * len(numbers)
    for place, number in enumerate(numbers):
        at = bisect_left(ends, number)
        before[place] = places[at - 1] if at else -1
        if at == len(ends):
            ends.append(number)
            places.append(place)
        else:
            ends[at], places[at] = number, place
    found: list[int] = []
    place = places[-1] if places else -1
    while place >= 0:
        found.append(place)
        place = before[place]
    return found[::-1]
