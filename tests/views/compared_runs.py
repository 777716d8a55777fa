"""Differences of which everything is known, made without running a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.diffs.difference import Difference, History, PairResult
from hookline.diffs.matches import Match
from hookline.diffs.measuring import relative_error
from hookline.diffs.traces import Measurements, Trace, TraceFacts, TraceSite
from hookline.stats.reference import measure, sketch

EVIL = "</script><img src=x onerror=alert(1)>\"'&"
"""A name that breaks out of whatever is not escaped."""

BAD = "blocks.1.mlp.act"
"""The module that is to blame in a made difference."""

CAUSE = "approximate='tanh' here, 'none' there"
GRAFT = "run on the same input, the two modules differ by 2.0e-4"
LIMIT = 2e-5

Layers = Sequence[tuple[str, str]]


def list_layers(blocks: int = 3) -> list[tuple[str, str]]:
    """List the modules of a small transformer with their classes, as they end."""
    found = [("embed", "Embedding")]
    for number in range(blocks):
        path = f"blocks.{number}"
        found += [(f"{path}.attn", "Attention"), (f"{path}.mlp.fc1", "Linear")]
        found += [(f"{path}.mlp.act", "GELU"), (f"{path}.mlp", "MLP"), (path, "Block")]
    return [*found, ("head", "Linear"), ("", "GPT")]


class KeptTrace(Trace):
    """A trace of tensors in memory, of one step."""

    def __init__(self, sites: Sequence[TraceSite], tensors: Sequence[Tensor], title: str) -> None:
        environment = {"torch": {"a": "2.13", "b": "2.12"}.get(title, title), "python": "3.11"}
        self.facts = TraceFacts(title=title, environment=environment)
        self.sites = sites
        self.tensors = tensors

    @property
    def steps(self) -> Sequence[int]:
        return (0,)

    def measurements(self, step: int) -> Measurements:
        rows = np.stack([measure(one).numpy() for one in self.tensors])
        return Measurements(rows, np.stack([sketch(one).numpy() for one in self.tensors]))

    def tensor(self, site: int, step: int) -> Tensor | None:
        return self.tensors[site]


def list_sites(layers: Layers) -> list[TraceSite]:
    """List outputs, their gradients from the last to the first, weights and their gradients."""
    made = [("value", f"{path}:output", path, kind) for path, kind in layers]
    made += [("gradient", f"{path}:output.grad", path, kind) for path, kind in reversed(layers)]
    with_weight = [(path, kind) for path, kind in layers if kind in ("Linear", "Embedding")]
    made += [("parameter", f"{path}.weight", path, kind) for path, kind in with_weight]
    made += [
        ("parameter gradient", f"{path}.weight:grad", path, kind) for path, kind in with_weight
    ]
    return [
        TraceSite(
            number,
            kind,
            address,
            path,
            "output" if kind in ("value", "gradient") else "parameter",
            type=type_,
            dtype="float32",
            shape=(4, 6),
            source="model.py:48",
        )
        for number, (kind, address, path, type_) in enumerate(made)
    ]


def compare_layers(
    layers: Layers | None = None,
    *,
    bad: str | None = BAD,
    error: float = 2e-4,
    keep: bool = True,
    steps: int = 1,
    **changes: Any,
) -> Difference:
    """Make the difference of two runs of which the second is off from one module on."""
    layers = layers or list_layers()
    sites = list_sites(layers)
    random = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 6, generator=random) for _ in sites]
    others, pairs = [], []
    is_over = False
    for site, one in zip(sites, tensors, strict=True):
        is_first = site.module == bad and site.kind == "value"
        is_over = is_over or is_first
        is_wrong = is_over and site.kind != "parameter"
        noise = torch.randn(4, 6, generator=random)
        size = error if is_wrong else 0.0 if site.id == 0 else 1e-7
        other = one + noise * size * one.norm() / noise.norm()
        if is_first:
            other[2, 3] = one[2, 3] + 0.5 * error * one.norm()
        others.append(other)
        verdict = "introduces" if is_first else "inherits" if is_wrong else "agrees"
        pairs.append(pair_up(site, relative_error(one, other), verdict))
    first = next((one for one in pairs if one.verdict == "introduces"), None)
    difference = Difference(
        same=first is None,
        limit=LIMIT,
        agree_to=1e-7,
        step=0,
        pairs=tuple(pairs),
        titles=("a", "b"),
        steps=(0, 0),
        traces=(KeptTrace(sites, tensors, "a"), KeptTrace(sites, others, "b")) if keep else None,
        history=make_history(pairs, steps) if steps > 1 else None,
    )
    if first is not None:
        difference = dataclasses.replace(
            difference,
            first=first.module,
            first_b=first.module,
            site=first.site,
            site_b=first.site_b,
            direction="forward",
            introduced=first.r,
            floor=first.floor,
            gain=300.0,
            type=first.type,
            type_b=first.type_b,
            operation=f"{first.module}/gelu",
            source="model.py:48",
            source_b="port.py:91",
            causes=(CAUSE,),
            graft={"sentence": GRAFT, "error": 2e-4},
        )
    return dataclasses.replace(difference, **changes)


def pair_up(site: TraceSite, r: float | None, verdict: str) -> PairResult:
    """Pair a site with the one of the same name."""
    return PairResult(
        site.address,
        site.address,
        site.kind,
        "name",
        r,
        LIMIT,
        6e-7,
        verdict,
        module=site.module,
        module_b=site.module,
        type=site.type,
        type_b=site.type,
        port=site.port,
        dtype=site.dtype,
        dtype_b=site.dtype,
        shape=site.shape,
        shape_b=site.shape,
        measured="tensor",
        match=Match((site.id,), (site.id,), "name"),
    )


def make_history(pairs: Sequence[PairResult], steps: int) -> History:
    """Make a history in which r grows with the steps: r of step s is s + 1 times that of step 0."""
    r = np.array([[one.r or 0.0 for one in pairs]])
    limits = np.full((steps, len(pairs)), LIMIT)
    return History(tuple(range(steps)), r * np.arange(1, steps + 1)[:, None], limits)


def change_pair(difference: Difference, address: str, **changes: Any) -> Difference:
    """Give the same difference with one pair changed."""
    pairs = [
        dataclasses.replace(one, **changes) if one.site == address else one
        for one in difference.pairs
    ]
    return dataclasses.replace(difference, pairs=tuple(pairs))
