"""An extraction by Ray: a pool of actors that each hold the model, and write to one store.

What is to do is cut into tasks, runs of sample numbers; through Ray itself go the tasks and what
was done of them, not the tensors. Of a Ray Dataset the tasks are its rows, and Ray brings them.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hookline._errors import HooklineError, StoreError
from hookline.extractions.advancing import Advance, Extraction
from hookline.extractions.ray_actors import PREFIX, Actor, Plan, Tries
from hookline.extractions.ray_cluster import RayCluster, give_up, import_ray, running_ray
from hookline.extractions.ray_dealing import deal_rows
from hookline.extractions.ray_rows import RayRows
from hookline.extractions.wanted import Ids, Wanted
from hookline.extractions.work import check_room, remove_store
from hookline.stores import StoreWriter
from hookline.stores.failures import FailureLog
from hookline.stores.indexing import find_done, read_about
from hookline.stores.layout import SHARDS

_TASK = 1024
_FEW, _MANY = 8, 2048
"""Tasks that each actor has at least, and that there are about at most, where that can be."""

_BATCH = 64
"""A task has a multiple of so many samples where it is not known how large batches are."""

_BLOCKS = 4096
"""Ray holds each of its blocks apart; where there are more tasks, a block has several."""

_WINDOW = 1 << 16


def extract_with_ray(
    plan: Plan,
    cluster: RayCluster,
    *,
    overwrite: bool = False,
    on_progress: Callable[[Advance], None] | None = None,
) -> Extraction:
    """Do all that is not in the store yet, on a cluster."""
    ray = import_ray()
    work, _ = replace(plan, options=plan.options | {"device": None}).start()
    facts = work.facts()
    if overwrite:  # not before it is known that there is something to put in its place
        remove_store(plan.out)
    writer = StoreWriter(plan.out, name="ray", facts=facts)
    work.check(writer.facts, writer.place.name)
    wanted, advance = work.find_left(writer)
    result = Extraction(writer.place.name, advance)
    size = None if advance.total is None else work.size
    del work  # the model is with the actors
    if isinstance(plan.data, RayRows):
        done = Wanted.everything().without(wanted)
        if plan.data.ids is not None and advance.before:
            advance.total = None  # which rows are done is known once they are read
        told = deal_rows(ray, plan, facts, cluster, done, find_sizes(plan, cluster, advance.total))
    elif size is None or advance.total is None:
        raise HooklineError(
            "Ray deals samples out by their numbers, so it has to be known how many there are: "
            "give data with a length, or files"
        )
    else:
        count = find_sizes(plan, cluster, advance.total)(0)
        told = _run(ray, plan, facts, cluster, list(cut_tasks(wanted, size, count)))
    if advance.total == 0:
        return result
    with writer:
        writer.claim()  # another driver would take what its actors write for what they have left
        _sweep(writer)
        log = FailureLog(writer.place, writer.name)
        with running_ray(ray, cluster), contextlib.closing(told) as found:
            for one in found:
                _take_in(ray, one, result, writer)
                log.write(result.failed)
                if on_progress is not None:
                    on_progress(advance)
        _sweep(writer)
    if isinstance(plan.data, RayRows) and plan.data.ids is not None:
        _check_numbers(writer, advance, plan.data.ids)
    result.failed = dict(sorted(result.failed.items()))
    return result


def _take_in(ray: Any, told: dict[str, Any], result: Extraction, writer: StoreWriter) -> None:
    """Take into account what was done of a task."""
    advance = result.advance
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


def _check_numbers(writer: StoreWriter, advance: Advance, column: str) -> None:
    """Refuse numbers that several samples had; of each the store gives one."""
    about = read_about(writer.place)
    held = 0 if about is None else len(find_done(writer.place, about.columns))
    missing = advance.before + advance.samples - held
    if missing > 0:
        raise StoreError(
            f"{missing:,} samples have a number that another has too: the column `{column}` that "
            f"ids= names does not tell samples apart. `{writer.place.name}` holds one of each"
        )


def find_sizes(plan: Plan, cluster: RayCluster, total: int | None) -> Callable[[int], int]:
    """Give a function that says how many samples a task has that comes after so many.

    Where it is not known how many there are in all, tasks become larger as more of them come.
    """
    batch, (_, most) = plan.options.get("batch_size") or _BATCH, cluster.pool

    def find(seen: int) -> int:
        known = max(seen, _FEW * most * batch) if total is None else total
        return cluster.task or find_task(known, most, batch)

    return find


def find_task(total: int, actors: int, batch: int) -> int:
    """Give how many samples a task has: many whole batches, but some tasks for each actor."""
    size = max(1, total // _MANY, min(_TASK, -(-total // (_FEW * actors))))
    return size if size < batch else -(-size // batch) * batch


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
) -> Generator[dict[str, Any]]:
    """Have the tasks done by a pool of actors; give what was done of each as it is done."""
    fewest, most = cluster.pool
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
            raise give_up(error) from error
        finally:
            logger.setLevel(level)


def _sweep(writer: StoreWriter) -> None:
    """Remove what actors that are gone have left: shards that they had begun, and locks."""
    if writer.place.local is not None:
        for path in (writer.place.local / SHARDS).glob(f".{PREFIX}*"):
            path.unlink(missing_ok=True)
