"""Runs of which everything is known, made without training: healthy, broken, hostile, large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hookline.rules import Finding
from hookline.runs import Block, Run, RunWriter, SiteFacts, StepRecord, open_run
from hookline.stats.rows import empty_rows

EVIL = "</script><img src=x onerror=alert(1)>\"'&"
"""A name that breaks out of whatever is not escaped."""

FORWARD = """def forward(self, x):
    scores = x @ x.T
    return scores.softmax(-1)
"""

NAN = Finding(
    rule="non-finite",
    severity="error",
    site="blocks.1.attn/softmax",
    step=7,
    value=3.0,
    threshold=0.0,
    message="blocks.1.attn/softmax made the first NaN at step 7 (model.py:12).",
    source="model.py:12",
    evidence=("3 of 32 elements are NaN", "step 6: finite"),
    hint="Look at rows that are masked as a whole.",
    others=("blocks.1.mlp:output", "head:output"),
    more={"inputs": [{"name": "input", "shape": [4, 4], "min": -1.0, "max": 2.0, "nan": 0}]},
)
FOLLOWS = Finding(
    rule="lost-updates",
    severity="warning",
    site="head.weight:update",
    step=8,
    value=1.0,
    threshold=0.5,
    message="Nothing of head.weight changed at step 8.",
    cause="blocks.1.attn/softmax",
)
SPIKE = Finding("spike", "info", "head:output", 3, 14.0, 10.0, "head was 14 times its usual size.")


def list_sites(paths: Sequence[str]) -> list[SiteFacts]:
    """Describe the outputs, gradients, weights, weight gradients and updates of modules."""
    made: list[tuple[str, str, str]] = [(f"{path}:output", "value", path) for path in paths]
    made += [(f"{path}:output.grad", "gradient", path) for path in reversed(paths)]
    for suffix, kind in (("", "parameter"), (":grad", "parameter gradient"), (":update", "update")):
        made += [(f"{path}.weight{suffix}", kind, path) for path in paths]
    return [
        SiteFacts(number, address, kind, path, "Linear", "float32", (8, 4), "model.py:10")
        for number, (address, kind, path) in enumerate(made)
    ]


def rms_of(site: int, step: int) -> float:
    """Tell the RMS that a made run has of a site at a step."""
    return float(np.float32(2.0 ** (site % 7 - 3) * (1 + 0.01 * step)))


def make_step(
    step: int, sites: Sequence[SiteFacts], *, bad: Sequence[int] = (), scale: float = 1
) -> StepRecord:
    """Measure a step: an RMS that tells the site and the step, NaN at some sites."""
    rows = empty_rows(len(sites))
    size = np.array([rms_of(site.id, step) * scale for site in sites])
    rows[:, 0], rows[:, 6], rows[:, 7] = 32, 0, size**2 * 32
    rows[:, 4], rows[:, 5] = -2 * size, 2 * size
    rows[list(bad), 0], rows[list(bad), 1] = 29, 3
    ids = np.arange(len(sites), dtype=np.int32)
    blocks = [Block("rows", ids, rows)]
    updates = ids[[site.kind == "update" for site in sites]]
    norms = np.stack([np.full(len(updates), 32), np.zeros(len(updates)), size[updates] * 60], 1)
    blocks.append(Block("updates", updates, norms))
    if step % 2 == 0:
        counts = np.tile(np.array([8, 0, 0]), (len(ids), 1))
        histogram = np.zeros((len(ids), 256), np.int64)
        histogram[:, 0], histogram[:, 126] = 8, 24
        blocks += [Block("counts", ids, counts), Block("histogram", ids, histogram)]
    loss = float("nan") if len(bad) else 1 / (step + 1)
    return StepRecord(step, 1000.0 + step, 0.5, {"loss": loss, "lr": 0.1}, blocks)


def write_run(
    folder: Path,
    *,
    paths: Sequence[str] = ("embed", "blocks.0.attn", "blocks.1.attn", "blocks.1.mlp", "head"),
    steps: int = 10,
    bad: Callable[[int], Sequence[int]] = lambda step: (),
    findings: Sequence[Finding] = (),
    scale: Callable[[int], float] = lambda step: 1,
    rank: int = 0,
    world: int = 1,
) -> Run:
    """Write a run that was judged while it was recorded."""
    sites = list_sites(paths)
    with RunWriter(folder, rank=rank, world=world) as writer:
        writer.add_sites(sites)
        writer.describe("watch", {"rules": True})
        writer.describe("environment", {"python": "3.11", "command": ["train.py", EVIL]})
        lines = FORWARD.splitlines()
        writer.describe("sources", {"model.py:10": {"first_line": 10, "lines": lines}})
        cost = {"steps": steps, "watched": steps, "ratio": 1.02, "overhead": 0.02}
        writer.describe("cost", cost)
        for step in range(steps):
            writer.write(make_step(step, sites, bad=bad(step), scale=scale(step)))
        for finding in findings:
            writer.add_finding(finding.to_dict())
    return open_run(folder)


def write_broken(folder: Path) -> Run:
    """Write a run that goes wrong at step 7, with three findings of two causes."""
    return write_run(
        folder,
        bad=lambda step: (2, 3, 4) if step >= 7 else (),
        findings=[NAN, FOLLOWS, SPIKE],
    )


def write_large(folder: Path, *, sites: int = 500, steps: int = 2000) -> Run:
    """Write a run of outputs that all differ, with a NaN at one site in one step."""
    random = np.random.default_rng(0)
    ids = np.arange(sites, dtype=np.int32)
    base = random.normal(0, 2, sites)
    with RunWriter(folder) as writer:
        writer.describe("watch", {"rules": True})
        writer.add_sites(
            SiteFacts(number, f"model.layers.{number}.mlp:output", "value", type="Linear")
            for number in range(sites)
        )
        for step in range(steps):
            size = 2.0 ** (base + random.normal(0, 0.07, sites))
            rows = empty_rows(sites)
            rows[:, 0], rows[:, 6], rows[:, 7] = 1024, size * 0.01, size**2 * 1024
            rows[:, 4], rows[:, 5] = -size * 4, size * (4 + random.gamma(2, 0.4, sites))
            rows[sites * 2 // 3, 1] = step == 777
            writer.write(
                StepRecord(step, 1000.0 + step, 0.1, {"loss": 1.0}, [Block("rows", ids, rows)])
            )
    return open_run(folder)
