"""The largest numbers of a run: where one looks first, also when no rule has anything to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hookline._tables import Table
from hookline.runs import History

_PORTION = 2_000_000
"""About how many numbers are held at once while reading."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What is looked for, and where."""

    what: str
    """In words."""

    kind: str
    """Of which sites."""

    stat: str
    """The statistic of which the largest is looked for."""


_QUESTIONS = (
    _Question("largest value", "value", "absmax"),
    _Question("most zeros", "value", "zero_share"),
    _Question("largest gradient", "gradient", "absmax"),
    _Question("largest weight", "parameter", "absmax"),
    _Question("largest update/weight", "update", "ratio"),
)


def find_extremes(history: History) -> Table:
    """List where the largest values, gradients, weights and updates were."""
    best: dict[_Question, tuple[str, int, float]] = {}
    for kind in dict.fromkeys(question.kind for question in _QUESTIONS):
        _search(history, [one for one in _QUESTIONS if one.kind == kind], best)
    rows = [(one.what, *best[one]) for one in _QUESTIONS if one in best]
    return Table(("", "site", "step", "value"), rows)


def _search(
    history: History,
    questions: Sequence[_Question],
    best: dict[_Question, tuple[str, int, float]],
) -> None:
    """Look through all steps for the largest of some statistics of one kind of site."""
    steps = history.steps
    kind = questions[0].kind
    sites = history.describe_sites(kind=kind)
    if not sites:
        return
    # A bias that begins at zero makes any ratio; the rules look at matrices alone, too.
    is_wanted = np.array([kind != "update" or len(site.shape) > 1 for site in sites])
    portion = max(1, _PORTION // (len(sites) * len(questions)))
    for start in range(0, len(steps), portion):
        part = steps[start : start + portion]
        found = history.maps([one.stat for one in questions], part, kind=kind)
        for question in questions:
            read = found[question.stat]
            own = read.values[: len(sites)]  # others may have been met since they were counted
            values = np.where(np.isfinite(own) & is_wanted[:, None], own, 0.0)
            row, column = np.unravel_index(values.argmax(), values.shape)
            value = float(values[row, column])
            if value > (best[question][2] if question in best else 0.0):
                best[question] = read.addresses[row], int(part[column]), value
