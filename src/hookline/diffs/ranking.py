"""Compare two run folders: rank by rank where both have as many, else all ranks put together."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from hookline.diffs.comparing import compare
from hookline.diffs.difference import Difference
from hookline.diffs.reading import list_ranks, open_trace
from hookline.diffs.traces import Trace
from hookline.runs import Run, open_run

RunLike = str | os.PathLike[str] | Run


def compare_runs(a: RunLike, b: RunLike, **options: Any) -> Difference:
    """Find the first place where two run folders differ; the options are those of `compare`."""
    return compare_ranks(a, b, lambda x, y: compare(x, y, **options))


def compare_ranks(
    a: RunLike, b: RunLike, compare_traces: Callable[[Trace, Trace], Difference]
) -> Difference:
    """Compare two run folders by comparing traces: one of each rank, or of all together."""
    runs = [one if isinstance(one, Run) else open_run(one) for one in (a, b)]
    ranks = [list_ranks(run) for run in runs]
    if len(ranks[0]) < 2 or ranks[0] != ranks[1]:
        return compare_traces(open_trace(runs[0]), open_trace(runs[1]))
    found: list[tuple[int, Difference]] = []
    for rank in ranks[0]:
        one = compare_traces(open_trace(runs[0], rank=rank), open_trace(runs[1], rank=rank))
        found.append((rank, one))
    differing = [one for one in found if not one[1].same]
    if not differing:
        largest = max(found, key=lambda one: one[1].agree_to)[1]
        return _note(largest, f"{len(found)} ranks were compared, each with its counterpart")
    rank, first = min(differing, key=lambda one: _find_moment(one[1]))
    others = [number for number, _ in differing if number != rank]
    listed = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
    told = ", and no other does"
    if others:
        told = f"; so does rank {listed}" if len(others) == 1 else f"; so do ranks {listed}"
    return _note(first, f"rank {rank} differs first{told}")


def _find_moment(difference: Difference) -> tuple[int, int]:
    """Give when a difference shows: the step, and the place in it."""
    verdicts = [pair.verdict for pair in difference.pairs]
    place = verdicts.index("introduces") if "introduces" in verdicts else len(verdicts)
    return difference.step or 0, place


def _note(difference: Difference, text: str) -> Difference:
    return dataclasses.replace(difference, notes=(text, *difference.notes))
