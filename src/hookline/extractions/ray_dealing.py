"""Deal the rows of a Ray Dataset out to actors, as Ray makes them.

Ray's own pool of actors maps rows that bring their numbers along. To give rows the numbers of their
places, Ray would hold the whole data set first; here blocks are numbered as they come, and go from
where they are to the actors, not through the driver.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from hookline._errors import HooklineError
from hookline.extractions.ray_actors import Plan, RowsActor, Tries
from hookline.extractions.ray_cluster import RayCluster, give_up
from hookline.extractions.ray_rows import HandedRows, Part, RayRows, cut_blocks
from hookline.extractions.wanted import Wanted

_AHEAD = 2
"""Tasks that an actor has at once: one that it does, and one whose rows come to it meanwhile."""

_PATIENCE = 1.0
"""Seconds until it is looked again whether there is room for another actor."""


def deal_rows(
    ray: Any,
    plan: Plan,
    facts: dict[str, Any],
    cluster: RayCluster,
    done: Wanted,
    find_size: Callable[[int], int],
) -> Generator[dict[str, Any]]:
    """Have the rows that are not done put into the store; tell of each task what was done of it.

    `find_size` says how many rows a task has that comes after so many.
    """
    rows = plan.data
    assert isinstance(rows, RayRows)
    handed = replace(plan, data=HandedRows(plan.column, rows.ids))
    # Which rows are done is known by their places here, and by their numbers where these are read.
    wanted = rows.wanted.without(done) if rows.ids is None else rows.wanted
    left_out = Wanted.of_ranges([]) if rows.ids is None else done
    tries = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Tries).remote()
    given = (list(sys.path), facts, rows.ids)
    held = [ray.put(ray.cloudpickle.dumps(handed)), ray.put(left_out), tries]
    options: dict[str, Any] = {"num_gpus": cluster.gpus} if cluster.gpus else {}
    options |= {} if cluster.gpus else {"num_cpus": cluster.cpus}
    kind = ray.remote(max_restarts=-1, max_task_retries=-1, **options)(RowsActor)
    try:
        with Pool(ray, lambda: kind.remote(*given), held, cluster) as pool:
            try:
                for parts, refs in cut_blocks(rows.blocks(), wanted, find_size):
                    yield from pool.give(parts, refs)
            except ray.exceptions.RayTaskError:
                yield from pool.finish()  # what was read before this could not be
                raise
            yield from pool.finish()
    except ray.exceptions.RayError as error:
        raise give_up(error) from error


class Pool:
    """Actors that hold the model: the fewest at first, and more as long as all have enough to do.

    Actors that hold cores leave one of the cluster's to Ray, which else could not read.

    Args:
        held: references that each task comes with. To begin with an actor gets none: Ray may not
            be able to start one anew that was made with some.
    """

    def __init__(
        self, ray: Any, make: Callable[[], Any], held: list[Any], cluster: RayCluster
    ) -> None:
        self._ray, self._make, self._held = ray, make, held
        self._fewest, self._most = cluster.pool
        self._cores = 0.0 if cluster.gpus else cluster.cpus
        self._starting: dict[Any, Any] = {}
        """By what tells that it is there, each actor that is not yet."""
        self._there: list[Any] = []
        self._given: dict[Any, Any] = {}
        """By what will tell of a task, the actor that does it."""

    def __enter__(self) -> Pool:
        cores = self._ray.cluster_resources().get("CPU", 0.0)
        if self._cores and 0 < cores < 1 + self._cores:
            raise HooklineError(
                f"the cluster has {cores:g} cores and an actor takes {self._cores:g}; Ray needs "
                "one to read the data: give `hl.RayCluster(cpus=0)`"
            )
        self._start()
        while len(self._starting) < self._fewest and self._has_cores():
            self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in self._given:
            self._ray.cancel(one)  # else Ray says that it will try again
        for one in [*self._there, *self._starting.values()]:
            self._ray.kill(one)

    def give(self, parts: Sequence[Part], refs: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """Give a task to an actor once one has room; tell of those that are done meanwhile."""
        while (actor := self._find_idlest()) is None:
            if not self._starting and len(self._there) < self._most and self._has_cores():
                self._start()
            yield from self._collect(_PATIENCE)
        self._given[actor.take.remote(self._held, list(parts), *refs)] = actor
        yield from self._collect(0)

    def finish(self) -> Iterator[dict[str, Any]]:
        """Tell of the tasks that are still done."""
        while self._given:
            yield from self._collect(_PATIENCE)

    def _start(self) -> None:
        actor = self._make()
        self._starting[actor.ready.remote()] = actor

    def _has_cores(self) -> bool:
        """Tell whether there are cores for one more actor; GPUs may come with a machine more."""
        needed = (len(self._there) + len(self._starting) + 1) * self._cores
        return not self._cores or bool(needed + 1 <= self._ray.cluster_resources().get("CPU", 0.0))

    def _find_idlest(self) -> Any:
        """Give the actor with the fewest tasks; None where all have enough."""
        counts = [0] * len(self._there)
        for actor in self._given.values():
            counts[self._there.index(actor)] += 1
        least = min(counts, default=_AHEAD)
        return self._there[counts.index(least)] if least < _AHEAD else None

    def _collect(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Take in what has come; wait so long for the first."""
        waiting = [*self._starting, *self._given]
        found, _ = self._ray.wait(waiting, timeout=seconds)
        if len(waiting) > 1:
            found, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for one in found:
            if one in self._starting:
                self._ray.get(one)
                self._there.append(self._starting.pop(one))
            else:
                del self._given[one]
                yield self._ray.get(one)
