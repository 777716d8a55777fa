"""An extraction by this process, alone or as one of several ranks.

Ranks that each hold the model take shares of the samples, and write a store together. Those that
hold one model together run the same batches, and the first of them writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hookline.extractions.advancing import Advance, Extraction
from hookline.extractions.feeding import Batch
from hookline.extractions.running import Runner, evaluating
from hookline.extractions.sites import SiteChoice, name_model
from hookline.extractions.sources import open_source
from hookline.extractions.teams import Team, is_spread
from hookline.extractions.work import OnError, Work, remove_store
from hookline.stores import StoreWriter
from hookline.stores.layout import SHARDS
from hookline.stores.locking import refuse_writers
from hookline.watchers.describing import read_rank

_ALONE = "part"
"""The name of a writer that does all by itself."""


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
    is_new: bool
    """Whether the store that is there is removed first."""
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
    if job.is_new:  # not before it is known that there is something to put in its place
        _make_room(job.out, rank, world)
    name = _ALONE if world == 1 else f"rank{rank}"
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
            if writer.place.local is not None:
                # Ranks may live on that nobody waits for any more, and make what is made here.
                others = "*" if world == 1 else _ALONE
                folder = writer.place.local / SHARDS
                refuse_writers(folder, writer.place.name, own=name, name=others)
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


def _make_room(out: str | os.PathLike[str], rank: int, world: int) -> None:
    """Remove the store that is there, before any rank looks at it."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        return  # what is there was made by the ranks that torchrun has started again
    if world == 1:
        remove_store(out)
        return
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError(
            f"overwrite=True with {world} ranks needs a process group, since none of them knows "
            "when the others look into the folder: remove it before they are started, or call "
            "torch.distributed.init_process_group() first"
        )
    if not rank:
        remove_store(out)
    distributed.barrier()
