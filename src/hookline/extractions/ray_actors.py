"""The actors of an extraction by Ray: each holds the model, and writes to one store.

A task writes one shard, named after its samples: run again, after an actor or a machine was lost,
it writes the same shard in the same place.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from hookline._errors import HooklineError
from hookline.extractions.advancing import Advance
from hookline.extractions.placing import place_model, unwrap
from hookline.extractions.ray_cluster import import_ray
from hookline.extractions.ray_rows import HandedRows, Part, read_parts
from hookline.extractions.sites import SiteChoice, Sites, name_model
from hookline.extractions.sources import open_source
from hookline.extractions.wanted import Wanted
from hookline.extractions.work import OnError, Work
from hookline.stores import StoreWriter

PREFIX = "ray-"
"""How the names of the actors' writers begin."""

_TRIES = 5
"""So often a task is begun: where its process dies each time, its samples may be what kills it."""


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
        model = place_model(unwrap(model), self.options.get("device"))
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


class Holder:
    """Hold the model; do one task after the other.

    What goes wrong is told with what was done, not raised: Ray would print it at length, and try
    again what cannot work.
    """

    def __init__(self, paths: list[str], sealed: bytes, facts: dict[str, Any], tries: Any) -> None:
        # A module that was found there may define the model, also where Ray did not look.
        sys.path += [one for one in paths if one not in sys.path]
        self._sealed, self._facts, self._tries = sealed, facts, tries
        self._started: tuple[Plan, Work, StoreWriter] | None = None

    def _tell(self, do: Callable[[Advance], dict[int, str]]) -> dict[str, Any]:
        """Do a task, which gives the samples that failed; tell what was done of it."""
        advance, failed, error = Advance(), {}, b""
        try:
            failed = do(advance)
        except Exception as found:
            error = _seal_error(found)
        return {
            "samples": advance.samples,
            "bytes": advance.bytes,
            "failed": "\0".join(f"{id} {why}" for id, why in failed.items()),
            "error": error,
        }

    def _do(self, wanted: Wanted, advance: Advance, at: int = 0) -> dict[int, str]:
        """Do one task, whose rows begin at a place; give the samples that failed."""
        runs = list(zip(wanted.starts.tolist(), wanted.ends.tolist(), strict=True))
        shard = name_shard(runs)
        if import_ray().get(self._tries.count.remote(f"{shard} {at}")) > _TRIES:
            raise HooklineError(
                f"the process died {_TRIES} times at samples {runs[0][0]} to {runs[-1][1] - 1}: "
                "too little memory, or a sample that crashes the model. Smaller tasks "
                "(`hl.RayCluster(task=...)`) tell which"
            )
        plan, work, writer = self._start()
        return work.do(writer, wanted, advance, on_error=plan.on_error, shard=shard).failed

    def _start(self) -> tuple[Plan, Work, StoreWriter]:
        """Make the model, and open the data and the store, the first time."""
        if self._started is not None:
            return self._started
        plan: Plan = import_ray().cloudpickle.loads(self._sealed)
        self._sealed = b""
        work, model = plan.start()
        if name_model(model) != self._facts["model"]:
            raise HooklineError(
                "the model that an actor made is another one than the first that was made: a "
                "function that makes it needs a seed, or has to load its weights"
            )
        writer = StoreWriter(
            plan.out,
            name=f"{PREFIX}{uuid.uuid4().hex[:12]}",
            facts=self._facts,
            shard_bytes=1 << 62,
            shard_seconds=float("inf"),
        )
        self._started = plan, work, writer
        return self._started


class Actor(Holder):
    """Do tasks that name samples by their numbers."""

    def __call__(self, tasks: dict[str, Any]) -> dict[str, Any]:
        """Do tasks; give what was done of them."""
        told = []
        for begins, ends in zip(tasks["begins"], tasks["ends"], strict=True):
            runs = zip(np.asarray(begins).tolist(), np.asarray(ends).tolist(), strict=True)
            wanted = Wanted.of_ranges(runs)
            told.append(self._tell(lambda advance, wanted=wanted: self._do(wanted, advance)))  # type: ignore[misc]
        return {key: [one[key] for one in told] for key in told[0]}


class RowsActor(Holder):
    """Do tasks that are rows of a Ray Dataset.

    Args:
        ids: the column that holds the samples' numbers; None where their places do.
    """

    def __init__(self, paths: list[str], facts: dict[str, Any], ids: str | None) -> None:
        super().__init__(paths, b"", facts, None)
        self._ids = ids
        self._done: Wanted | None = None

    def ready(self) -> None:
        """Tell that this actor is there."""

    def take(self, held: list[Any], parts: Sequence[Part], *blocks: Any) -> dict[str, Any]:
        """Do a task, which is a part of each block; tell what was done of it.

        `held` are references to the plan and, of samples with numbers of their own, to which of
        them the store holds already; and who counts tries.
        """
        if self._done is None:
            self._sealed, self._done = import_ray().get(held[:2])
            self._tries = held[2]
        return self._tell(lambda advance: self._take(parts, blocks, advance))

    def _take(self, parts: Sequence[Part], blocks: Sequence[Any], advance: Advance) -> Any:
        ids, rows = read_parts(parts, blocks, self._ids)
        assert self._done is not None
        wanted = Wanted.of_ids(ids).without(self._done)
        if not wanted.starts.size:
            return {}
        plan, _, _ = self._start()
        assert isinstance(plan.data, HandedRows)
        with plan.data.holding(ids, rows):
            return self._do(wanted, advance, parts[0].first + parts[0].begins[0])


def name_shard(runs: Sequence[tuple[int, int]]) -> str:
    """Name the shard of a task after all its samples: done again, it is in the same place.

    Where the first run begins and the last one ends is not enough: what was left out between them
    is done later, in a task of its own.
    """
    digest = hashlib.sha256(repr([(int(begin), int(end)) for begin, end in runs]).encode())
    return f"ids-{runs[0][0]:012d}-{runs[-1][1]:012d}-{digest.hexdigest()[:12]}"


def _seal_error(error: Exception) -> bytes:
    """Give an error so that another process can raise it."""
    cloudpickle = import_ray().cloudpickle
    with contextlib.suppress(Exception):
        sealed: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(sealed)  # not all that can be packed can be unpacked
        return sealed
    plain: bytes = cloudpickle.dumps(HooklineError(f"{type(error).__name__}: {error}"))
    return plain
