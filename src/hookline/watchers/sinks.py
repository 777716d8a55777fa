"""Where a watch sends its steps besides the run: a function, or an object such as TensorBoard's.

A sink gets scalars: a few statistics of each site, never a histogram.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hookline.runs import SiteFacts, StepRecord
from hookline.stats.rows import derive


@dataclass(frozen=True, slots=True)
class Scalars:
    """The numbers of one step, as a sink receives them."""

    step: int
    """The number of the step."""

    values: dict[str, float]
    """Numbers by name: `loss`, and `rms/layers.0:output` for the statistics of sites."""


Sink = Callable[[Scalars], Any]
"""What takes the numbers of a step; an exception ends the sink, not the training."""

DEFAULT_STATS = ("rms", "absmax", "nan", "inf")


def scalars_of(
    record: StepRecord, facts: Sequence[SiteFacts], stats: Sequence[str] | None = None
) -> Scalars:
    """Gather the numbers of a step: these statistics of each site, and what was logged."""
    stats = DEFAULT_STATS if stats is None else stats
    values = dict(record.scalars)
    for block in record.blocks:
        if block.kind == "rows":
            for stat in stats:
                numbers = derive(block.values, stat)
                for site, number in zip(block.sites, numbers, strict=True):
                    values[f"{stat}/{facts[int(site)].address}"] = float(number)
        elif block.kind == "updates":
            for site, (given, lost, _) in zip(block.sites, block.values, strict=True):
                values[f"lost/{facts[int(site)].address}"] = float(lost / given) if given else 0.0
    return Scalars(record.step, values)
