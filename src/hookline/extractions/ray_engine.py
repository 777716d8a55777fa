"""An extraction by Ray: a pool of actors that each hold the model, and write to one store.

What is to do is cut into tasks, runs of sample numbers. A task writes one shard, named after them:
run again, after an actor or a machine was lost, it writes the same shard in the same place. Through
Ray itself go the tasks and what was done of them, not the tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import tempfile
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
from hookline.extractions.work import OnError, Work, check_room
from hookline.stores import StoreWriter
from hookline.stores.layout import SHARDS

_TASK = 1024
_FEW, _MANY = 8, 2048
"""Tasks that each actor has at least, and that there are about at most, where that can be."""

_BATCH = 64
"""A task has a multiple of so many samples where it is not known how large batches are."""

_BLOCKS = 4096
"""Ray holds each of its blocks apart; where there are more tasks, a block has several."""

_TRIES = 5
"""So often a task is begun: where its process dies each time, its samples may be what kills it."""

_LEVEL = "RAY_BACKEND_LOG_LEVEL"
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

    task: int | None = None
    """Samples of a task, which is what is done again after an actor was lost; found from the
    number of samples unless given."""


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


class Tries:
    """Count how often each task was begun, in an actor of its own."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}

    def count(self, task: str) -> int:
        """Give how often a task was begun, with this time."""
        self._begun[task] = self._begun.get(task, 0) + 1
        return self._begun[task]


class Actor:
    """Hold the model; do one task after the other.

    What goes wrong is told with what was done, not raised: Ray would print it at length, and try
    again what cannot work.
    """

    def __init__(self, paths: list[str], sealed: bytes, facts: dict[str, Any], tries: Any) -> None:
        # A module that was found there may define the model, also where Ray did not look.
        sys.path += [one for one in paths if one not in sys.path]
        self._sealed, self._facts, self._tries = sealed, facts, tries
        self._ready: tuple[Plan, Work, StoreWriter] | None = None

    def __call__(self, tasks: dict[str, Any]) -> dict[str, Any]:
        """Do tasks; give what was done of them."""
        told: dict[str, list[Any]] = {"samples": [], "bytes": [], "failed": [], "error": []}
        for begins, ends in zip(tasks["begins"], tasks["ends"], strict=True):
            runs = list(zip(np.asarray(begins).tolist(), np.asarray(ends).tolist(), strict=True))
            advance, failed, error = Advance(), {}, b""
            try:
                failed = self._do(runs, advance)
            except Exception as found:
                error = _seal_error(found)
            told["samples"].append(advance.samples)
            told["bytes"].append(advance.bytes)
            told["failed"].append("\0".join(f"{id} {why}" for id, why in failed.items()))
            told["error"].append(error)
        return told

    def _do(self, runs: list[tuple[int, int]], advance: Advance) -> dict[int, str]:
        """Do one task; give the samples that failed."""
        shard = name_shard(runs)
        if _import_ray().get(self._tries.count.remote(shard)) > _TRIES:
            raise HooklineError(
                f"the process died {_TRIES} times at samples {runs[0][0]} to {runs[-1][1] - 1}: "
                "too little memory, or a sample that crashes the model. Smaller tasks "
                "(`hl.RayCluster(task=...)`) tell which"
            )
        if self._ready is None:
            self._ready = self._start()
        plan, work, writer = self._ready
        wanted = Wanted.of_ranges(runs)
        result = work.do(writer, wanted, advance, on_error=plan.on_error, shard=shard)
        return result.failed

    def _start(self) -> tuple[Plan, Work, StoreWriter]:
        """Make the model, and open the data and the store."""
        plan: Plan = _import_ray().cloudpickle.loads(self._sealed)
        self._sealed = b""
        work, _ = plan.start()
        writer = StoreWriter(
            plan.out,
            name=f"{_PREFIX}{uuid.uuid4().hex[:12]}",
            facts=self._facts,
            shard_bytes=1 << 62,
            shard_seconds=float("inf"),
        )
        return plan, work, writer


def name_shard(runs: Sequence[tuple[int, int]]) -> str:
    """Name the shard of a task after all its samples: done again, it is in the same place.

    Where the first run begins and the last one ends is not enough: what was left out between them
    is done later, in a task of its own.
    """
    digest = hashlib.sha256(repr([(int(begin), int(end)) for begin, end in runs]).encode())
    return f"ids-{runs[0][0]:012d}-{runs[-1][1]:012d}-{digest.hexdigest()[:12]}"


def _seal_error(error: Exception) -> bytes:
    """Give an error so that another process can raise it."""
    cloudpickle = _import_ray().cloudpickle
    with contextlib.suppress(Exception):
        sealed: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(sealed)  # not all that can be packed can be unpacked
        return sealed
    plain: bytes = cloudpickle.dumps(HooklineError(f"{type(error).__name__}: {error}"))
    return plain


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
    batch = plan.options.get("batch_size") or _BATCH
    size = cluster.task or find_task(advance.total, _most_actors(cluster), batch)
    tasks = list(cut_tasks(wanted, work.size, size))
    if not tasks:
        return result
    _sweep(writer)
    facts = work.facts()
    del work  # the model is with the actors
    with _running_ray(ray, cluster):
        for told in _run(ray, plan, facts, cluster, tasks):
            is_first = not advance.samples
            advance.samples += int(told["samples"])
            advance.bytes += int(told["bytes"])
            for text in filter(None, str(told["failed"]).split("\0")):
                id, _, why = text.partition(" ")
                result.failed[int(id)] = why
            if told["error"]:
                raise ray.cloudpickle.loads(told["error"])
            if is_first:
                check_room(writer.place, advance, advance.total)
            advance.seconds = time.perf_counter() - advance.begun
            if on_progress is not None:
                on_progress(advance)
    _sweep(writer)
    result.failed = dict(sorted(result.failed.items()))
    return result


def _most_actors(cluster: RayCluster) -> int:
    return cluster.actors[1] if isinstance(cluster.actors, tuple) else cluster.actors


def find_task(total: int, actors: int, batch: int) -> int:
    """Give how many samples a task has: many whole batches, but some tasks for each actor."""
    size = max(1, total // _MANY, min(_TASK, -(-total // (_FEW * actors))))
    return size if size < batch else -(-size // batch) * batch


@contextlib.contextmanager
def _running_ray(ray: Any, cluster: RayCluster) -> Iterator[None]:
    """Have Ray run: as it does already, or one of its own, which says nothing that need not be."""
    if ray.is_initialized():
        yield
        return
    level = os.environ.get(_LEVEL)
    os.environ.setdefault(_LEVEL, "fatal")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if cluster.address is None and "RAY_ADDRESS" not in os.environ:
        options["include_dashboard"] = False
    try:
        with _hushed():
            ray.init(address=cluster.address, **options)
        yield
    finally:
        ray.shutdown()
        if level is None:
            os.environ.pop(_LEVEL, None)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Keep what is written to the standard error, from any language; pass it on after an error."""
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        shown = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        except BaseException:
            file.seek(0)
            os.write(shown, file.read())
            raise
        finally:
            os.dup2(shown, 2)
            os.close(shown)


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
    fewest, most = cluster.actors if isinstance(cluster.actors, tuple) else (cluster.actors,) * 2
    # Ray itself tries again without end.
    tries = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Tries).remote()
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    logger = logging.getLogger("ray.data")
    level = logger.level
    with ray.data.DataContext.current(context):
        found = ray.data.from_items(tasks, override_num_blocks=min(len(tasks), _BLOCKS))
        found = found.map_batches(
            Actor,
            batch_size=1,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(min_size=fewest, max_size=most),
            fn_constructor_args=(list(sys.path), ray.cloudpickle.dumps(plan), facts, tries),
            num_gpus=cluster.gpus or None,
            num_cpus=None if cluster.gpus else cluster.cpus,
        )
        logger.setLevel(logging.CRITICAL)  # what it says of errors is in the error
        try:
            yield from found.iter_rows()
        except ray.exceptions.RayError as error:
            raise HooklineError(
                f"Ray gave up: {_shorten(error)}. Every finished shard stays; run the same again "
                "to go on"
            ) from error
        finally:
            logger.setLevel(level)


def _shorten(error: Exception) -> str:
    """Give the first line that an error of Ray says something in."""
    lines = [one.strip() for one in str(error).splitlines() if one.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(". ")


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
