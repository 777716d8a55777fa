"""Steps read back from a run folder, a few at a time, as they were when they were judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hookline.runs import Block, StepRecord
from hookline.runs.step_sources import Integers, StepSource

_KINDS = ("rows", "counts", "updates", "units")
"""The blocks that rules look at."""

_AT_ONCE = 64
"""How many steps are read together."""


def read_steps(
    source: StepSource, origins: Mapping[int, Mapping[str, Any]] | None = None
) -> Iterator[StepRecord]:
    """Give the steps of one rank in order; `origins` says where a NaN came from, by step."""
    index = source.index()
    places = np.arange(len(source.sites()))
    for start in range(0, len(index.steps), _AT_ONCE):
        chosen = slice(start, start + _AT_ONCE)
        keys = index.keys[chosen]
        read = {kind: source.read(kind, keys, sites=places) for kind in _KINDS}
        scalars = source.scalars(keys)
        for at, number in enumerate(index.steps[chosen].tolist()):
            origin = (origins or {}).get(number)
            yield StepRecord(
                step=number,
                time=float(index.times[start + at]),
                scalars={
                    name: float(values[at])
                    for name, (values, is_there) in scalars.items()
                    if is_there[at]
                },
                blocks=list(_make_blocks(read, at, places)),
                more={"origin": origin} if origin else {},
            )


def _make_blocks(read: Mapping[str, Any], at: int, places: Integers) -> Iterator[Block]:
    for kind, (values, is_there) in read.items():
        chosen = is_there[at]
        if chosen.all():
            yield Block(kind, places, values[at])
        elif chosen.any():
            yield Block(kind, places[chosen], values[at, chosen])
