"""Steps made by hand: a small network's sites, and numbers for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hookline.rules import Finding, Judge, Rule
from hookline.runs import Block, SiteFacts, StepRecord

Row = Mapping[str, float]
"""What is special about a row: rms, mean, min, max, nan, posinf, neginf, count."""


class Network:
    """The sites of a chain of layers, numbered as a watch numbers them."""

    def __init__(
        self,
        *layers: str,
        width: int = 16,
        batch: int = 32,
        dtype: str = "float32",
        weights: str = "float32",
        types: Mapping[str, str] | None = None,
        biases: Sequence[str] = (),
        without_weight: Sequence[str] = (),
        silent: Sequence[str] = (),
    ) -> None:
        self.sites: list[SiteFacts] = []
        types = types or {}

        def add(address: str, kind: str, module: str, shape: tuple[int, ...], one: str) -> None:
            self.sites.append(
                SiteFacts(
                    id=len(self.sites),
                    address=address,
                    kind=kind,
                    module=module,
                    type=types.get(module, "Linear"),
                    dtype=one,
                    shape=shape,
                    source=f"model.py:{len(self.sites)}",
                    more={"requires_grad": True} if "parameter" in kind or kind == "update" else {},
                )
            )

        ran = [one for one in layers if one not in silent]
        for layer in ran:
            add(f"{layer}:output", "value", layer, (batch, width), dtype)
        for layer in reversed(ran):
            add(f"{layer}:output.grad", "gradient", layer, (batch, width), dtype)
        parameters = [
            (f"{layer}.{name}", layer, shape)
            for layer in layers
            if layer not in without_weight
            for name, shape in (("weight", (width, width)), ("bias", (width,)))
            if name == "weight" or layer in biases
        ]
        for name, layer, shape in parameters:
            add(name, "parameter", layer, shape, weights)
        for name, layer, shape in parameters:
            add(f"{name}:grad", "parameter gradient", layer, shape, weights)
        for name, layer, shape in parameters:
            add(f"{name}:update", "update", layer, shape, weights)

    def step(
        self,
        number: int,
        rows: Mapping[str, Row | None] | None = None,
        *,
        updates: Mapping[str, Sequence[float]] | None = None,
        counts: Mapping[str, Sequence[float]] | None = None,
        units: Mapping[str, Sequence[float]] | None = None,
        more: Mapping[str, Any] | None = None,
        **scalars: float,
    ) -> StepRecord:
        """Make a step: all rows are of rms 1 (updates: 0.001) but those that are given.

        None leaves a row out. The updates are given, lost and the weight's norm.
        """
        rows = rows or {}
        chosen = [one for one in self.sites if rows.get(one.address, {}) is not None]
        values = [make_row(one, rows.get(one.address) or {}) for one in chosen]
        blocks = [_block("rows", [one.id for one in chosen], values)]
        changed = [one for one in chosen if one.kind == "update"]
        if changed:
            norm = {one.address: math.sqrt(math.prod(one.shape)) for one in changed}
            given = [
                (updates or {}).get(one.address, (math.prod(one.shape), 0, norm[one.address]))
                for one in changed
            ]
            blocks.append(_block("updates", [one.id for one in changed], given))
        ids = {one.address: one.id for one in self.sites}
        for kind, extra in (("counts", counts), ("units", units)):
            if extra:
                at = [ids[address] for address in extra]
                blocks.append(_block(kind, at, list(extra.values())))
        return StepRecord(number, float(number), 0.1, scalars, blocks, more=more or {})


def make_row(site: SiteFacts, facts: Row) -> list[float]:
    """Make the row of a site."""
    count = facts.get("count", math.prod(site.shape))
    rms = facts.get("rms", 0.001 if site.kind == "update" else 1.0)
    mean = facts.get("mean", 0.0)
    bad = [facts.get(name, 0.0) for name in ("nan", "posinf", "neginf")]
    finite = count - sum(bad)
    spread = math.sqrt(max(rms**2 - mean**2, 0.0))
    low, high = facts.get("min", mean - 3 * spread), facts.get("max", mean + 3 * spread)
    return [finite, *bad, low, high, mean, finite * spread**2]


def judge(rule: Rule, network: Network, steps: Sequence[StepRecord]) -> list[Finding]:
    """Show steps to one rule; it must not fail."""
    court = Judge([rule])
    for step in steps:
        court.see(step, network.sites)
    court.end()
    assert court.failures == []
    return court.findings


def _block(kind: str, sites: Sequence[int], values: Sequence[Sequence[float]]) -> Block:
    return Block(kind, np.array(sites, np.int32), np.array(values, np.float64))
