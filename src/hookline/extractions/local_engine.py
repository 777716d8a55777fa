"""An extraction by this process, alone or as one of several ranks.

Ranks that each hold the model take shares of the samples, and write a store together. Those that
hold one model together run the same batches, and the first of them writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hookline.extractions.advancing import Advance, Extraction
from hookline.extractions.feeding import Batch
from hookline.extractions.running import Runner, evaluating
from hookline.extractions.sites import SiteChoice, name_model
from hookline.extractions.sources import open_source
from hookline.extractions.teams import Team, is_spread
from hookline.extractions.work import OnError, Work
from hookline.stores import StoreWriter
from hookline.watchers.describing import read_rank


@dataclass(frozen=True, slots=True)
class Job:
    """What is extracted, and to where."""

    model: nn.Module
    choice: SiteChoice
    data: Any
    column: str | None
    out: str | os.PathLike[str]
    options: Mapping[str, Any]
    """What `Work` takes besides."""
    shard_bytes: int
    on_error: OnError
    on_progress: Callable[[Advance], None] | None


def extract_here(job: Job, *, plan: Callable[[Work], Extraction] | None = None) -> Extraction:
    """Do what falls to this process; with `plan` that, in place of an extraction."""
    rank, world = read_rank()
    if world == 1 or not is_spread(job.model):
        return _do(job, rank, world, plan)
    with Team() as team:
        named = name_model(job.model)  # of which every rank has a part
        if team.rank:
            return _follow(job, team)
        return team.lead(lambda: _do(job, 0, 1, plan, team=team, named=named))


def _do(
    job: Job, rank: int, world: int, plan: Callable[[Work], Extraction] | None, **shared: Any
) -> Extraction:
    source = open_source(job.data, column=job.column)
    work = Work(job.model, source, job.choice, **job.options, **shared)
    if plan is not None:
        return plan(work)
    name = "part" if world == 1 else f"rank{rank}"
    writer = StoreWriter(
        job.out,
        name=name,
        facts=work.facts(),
        check=lambda there: work.check(there, os.fspath(job.out)),
        shard_bytes=job.shard_bytes,
    )
    with writer:
        if writer.columns is not None:
            writer.claim()  # at once, before the model has worked for nothing
        return work.run(
            writer, on_error=job.on_error, on_progress=job.on_progress, rank=rank, world=world
        )


def _follow(job: Job, team: Team) -> Extraction:
    """Run the batches that the first rank sends."""
    is_alone = job.options["is_deterministic"]
    with evaluating(job.model, is_deterministic=is_alone):
        runner = Runner(
            job.model,
            job.choice,
            device=job.options["device"],
            dtype=job.options["dtype"],
            is_alone=is_alone,
            team=team,
        )

        def run(batch: Batch) -> None:
            for _ in runner.run(batch.ids, batch.content):
                pass

        result: Extraction = team.follow(run)
    return result
