"""An extraction by Ray: a pool of actors that each hold the model, and write to one store.

What is to do is cut into tasks, runs of sample numbers. A task writes one shard, named after them:
run again, after an actor or a machine was lost, it writes the same shard in the same place. Through
Ray itself go the tasks and what was done of them, not the tensors.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from hookline._errors import HooklineError
from hookline.extractions.advancing import Advance, Extraction
from hookline.extractions.sites import SiteChoice, Sites
from hookline.extractions.sources import open_source
from hookline.extractions.wanted import Ids, Wanted
from hookline.extractions.work import OnError, Work
from hookline.stores import StoreWriter
from hookline.stores.layout import SHARDS

TASK = 1024
"""Samples of a task, unless another number is given."""

_PREFIX = "ray-"
_WINDOW = 1 << 16


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Which cluster does it, and how much of it."""

    address: str | None = None
    """Of a cluster that runs, `auto` for the one this machine is part of; None starts one here."""

    actors: int | tuple[int, int] = 1
    """How many hold the model: a number, or the fewest and the most."""

    gpus: float = 0.0
    """GPUs of each."""

    cpus: float = 1.0
    """Cores of each."""

    task: int = TASK
    """Samples of a task."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What each actor does, in a form that can be sent to it."""

    make_model: Callable[[], nn.Module] | nn.Module
    data: Any
    sites: Sites
    reduce: Any
    column: str | None
    out: str
    options: dict[str, Any]
    """What `Work` takes besides."""
    on_error: OnError

    def start(self) -> tuple[Work, nn.Module]:
        """Make the model and open the data."""
        model = self.make_model
        if not isinstance(model, nn.Module):
            model = model()
        device = self.options.get("device")
        if device is not None:
            model = model.to(device)
        source = open_source(self.data, column=self.column)
        return Work(
            model, source, SiteChoice(model, self.sites, self.reduce), **self.options
        ), model


class Actor:
    """Hold the model; do one task after the other."""

    def __init__(self, plan: Plan, facts: dict[str, Any]) -> None:
        self._plan = plan
        self._work, _ = plan.start()
        self._writer = StoreWriter(
            plan.out,
            name=f"{_PREFIX}{uuid.uuid4().hex[:12]}",
            facts=facts,
            shard_bytes=1 << 62,
            shard_seconds=float("inf"),
        )

    def __call__(self, tasks: dict[str, Any]) -> dict[str, Any]:
        """Do tasks; give what was done of them."""
        told: dict[str, list[Any]] = {"samples": [], "bytes": [], "failed": []}
        for begins, ends in zip(tasks["begins"], tasks["ends"], strict=True):
            runs = list(zip(np.asarray(begins).tolist(), np.asarray(ends).tolist(), strict=True))
            result = self._work.do(
                self._writer,
                Wanted.of_ranges(runs),
                Advance(),
                on_error=self._plan.on_error,
                shard=f"ids-{runs[0][0]:012d}-{runs[-1][1]:012d}",
            )
            told["samples"].append(result.advance.samples)
            told["bytes"].append(result.advance.bytes)
            told["failed"].append([f"{id} {why}" for id, why in result.failed.items()])
        return told


def extract_with_ray(
    plan: Plan,
    cluster: RayCluster,
    *,
    on_progress: Callable[[Advance], None] | None = None,
) -> Extraction:
    """Do all that is not in the store yet, on a cluster."""
    ray = _import_ray()
    work, _ = replace(plan, options=plan.options | {"device": None}).start()
    writer = StoreWriter(plan.out, name="ray", facts=work.facts())
    work.check(writer.facts, writer.place.name)
    wanted, advance = work.find_left(writer)
    if advance.total is None:
        raise HooklineError(
            "Ray deals samples out by their numbers, so it has to be known how many there are: "
            "give data with a length, or files"
        )
    result = Extraction(writer.place.name, advance)
    tasks = list(cut_tasks(wanted, work.size, cluster.task))
    if not tasks:
        return result
    is_mine = not ray.is_initialized()
    if is_mine:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
    try:
        for told in _run(ray, plan, work.facts(), cluster, tasks):
            advance.samples += int(told["samples"])
            advance.bytes += int(told["bytes"])
            for text in told["failed"]:
                id, _, why = text.partition(" ")
                result.failed[int(id)] = why
            advance.seconds = time.perf_counter() - advance.begun
            if on_progress is not None:
                on_progress(advance)
    finally:
        if is_mine:
            ray.shutdown()
    _sweep(writer)
    return result


def cut_tasks(wanted: Wanted, size: int, count: int) -> Iterator[dict[str, list[int]]]:
    """Cut what is wanted into tasks of `count` samples: where each run of them begins and ends."""
    held: list[Ids] = []
    for begin in range(0, size, _WINDOW):
        ids = wanted.within(begin, min(begin + _WINDOW, size))
        while len(ids):
            room = count - sum(len(one) for one in held)
            held.append(ids[:room])
            ids = ids[room:]
            if sum(len(one) for one in held) == count:
                yield _describe(held)
                held = []
    if held:
        yield _describe(held)


def _describe(held: Sequence[Ids]) -> dict[str, list[int]]:
    wanted = Wanted.of_ids(np.concatenate(held))
    return {"begins": wanted.starts.tolist(), "ends": wanted.ends.tolist()}


def _run(
    ray: Any,
    plan: Plan,
    facts: dict[str, Any],
    cluster: RayCluster,
    tasks: list[dict[str, list[int]]],
) -> Iterator[dict[str, Any]]:
    """Have the tasks done by a pool of actors; give what was done of each as it is done."""
    import ray.data

    fewest, most = cluster.actors if isinstance(cluster.actors, tuple) else (cluster.actors,) * 2
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    found = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map_batches(
        Actor,
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(min_size=fewest, max_size=most),
        fn_constructor_args=(plan, facts),
        num_gpus=cluster.gpus or None,
        num_cpus=None if cluster.gpus else cluster.cpus,
    )
    yield from found.iter_rows()


def _sweep(writer: StoreWriter) -> None:
    """Remove what actors that were lost have begun."""
    if writer.place.local is not None:
        for path in (writer.place.local / SHARDS).glob(f".{_PREFIX}*.part"):
            path.unlink(missing_ok=True)


def _import_ray() -> Any:
    # Its own word about what it sends home, and about a file system it may not need.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError(f'this needs Ray ({error}): pip install "hookline[ray]"') from None
    return ray
