"""rank-disagreement: parameters that should be the same on all ranks and are not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hookline.rules.findings import Finding
from hookline.rules.rule import Rule
from hookline.rules.steps import Step, name_site
from hookline.rules.wording import say_number
from hookline.runs import SiteFacts
from hookline.runs.step_sources import Floats
from hookline.stats.rows import MAX, MEAN, MIN, NEGINF

_Rows = Mapping[str, Floats]
"""The rows of parameters by address."""


class RankDisagreement(Rule):
    """Compare the parameters of ranks, step by step; they are shown to it rank by rank.

    A parameter counts as replicated that was the same on all ranks in the first step that they
    have in common; one that differs from the start is a part of a larger one.
    """

    name = "rank-disagreement"
    severity = "error"

    def __init__(self) -> None:
        self._replicated: set[str] | None = None
        self._is_done = False

    def compare(self, step: int, rows: Mapping[int, _Rows]) -> Finding | None:
        """Compare one step of all ranks."""
        if self._is_done or len(rows) < 2:
            return None
        first, *others = sorted(rows)
        shared = [
            address
            for address in rows[first]
            if all(address in rows[other] for other in others)
            and (self._replicated is None or address in self._replicated)
        ]
        differing = {
            address: apart
            for address in shared
            if (apart := [one for one in others if _differ(rows[first], rows[one], address)])
        }
        if self._replicated is None:
            self._replicated = set(shared) - set(differing)
            return None
        if not differing:
            return None
        self._is_done = True
        return self._explain(step, rows, first=first, differing=differing)

    def _explain(
        self,
        step: int,
        rows: Mapping[int, _Rows],
        *,
        first: int,
        differing: Mapping[str, Sequence[int]],
    ) -> Finding:
        site, *rest = differing
        rank = differing[site][0]
        here, there = rows[first][site], rows[rank][site]
        value = float(np.abs(here[[MIN, MAX, MEAN]] - there[[MIN, MAX, MEAN]]).max())
        more = f" So do {len(rest)} other parameters." if rest else ""
        return self.find(
            step,
            site,
            value=value,
            threshold=0.0,
            message=(
                f"{site} differs between ranks {first} and {rank} at step {step}, by "
                f"{say_number(value)} or more, and was the same before: the ranks train different "
                f"models.{more}"
            ),
            evidence=[
                f"rank {one}: min {row[MIN]:.9g}, max {row[MAX]:.9g}, mean {row[MEAN]:.9g}"
                for one, row in ((first, here), (rank, there))
            ],
            hint=(
                "Look for a parameter outside DistributedDataParallel, a step that only one rank "
                "takes, or an optimizer whose state differs between ranks."
            ),
            others=rest,
            more={"ranks": [first, *differing[site]]},
        )


def rows_of_parameters(step: Step) -> dict[str, Floats]:
    """Give the rows of the parameters that this step has whole, by address."""
    rows, is_there = step.spread("rows")
    return {
        name_site(step.sites[one]): rows[one].copy()
        for one in step.roster.parameters
        if is_there[one] and _is_whole(step.sites[one], rows[one])
    }


def _is_whole(site: SiteFacts, row: Floats) -> bool:
    """Tell whether all elements were measured: a sharded parameter has only a part of them."""
    return bool(row[: NEGINF + 1].sum() == math.prod(site.shape))


def _differ(one: _Rows, other: _Rows, address: str) -> bool:
    return not np.array_equal(one[address], other[address], equal_nan=True)
