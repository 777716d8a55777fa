"""One extraction at work: from samples to a store, in one process."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hookline import _trees
from hookline._errors import RunWriteError, StoreError
from hookline.extractions.advancing import Advance, Estimate, Extraction, show_bytes
from hookline.extractions.feeding import Batch, Feed
from hookline.extractions.probing import differ
from hookline.extractions.running import Failed, Made, ModelFailed, Runner, bytes_of, evaluating
from hookline.extractions.samples import SampleError, Source
from hookline.extractions.saving import Saver
from hookline.extractions.selecting import name_function
from hookline.extractions.sites import SiteChoice, name_model
from hookline.extractions.sizing import BatchSize
from hookline.extractions.teams import Team
from hookline.extractions.wanted import Ids, Wanted
from hookline.stores import StoreWriter
from hookline.stores.failures import FailureLog
from hookline.stores.indexing import DamagedAbout, find_done, read_about
from hookline.stores.layout import ABOUT, FAILED, INDEX, SHARDS, name_dtype
from hookline.stores.locking import refuse_writers
from hookline.stores.places import Place, open_place

OnError = Literal["stop", "skip"]

_TELL_EVERY = 0.5
_NOTE_EVERY = 10.0
_TRIED = 3
"""Batches that an estimate is made from, besides one to warm up."""

_SHARED = 8
"""Samples of a batch of ranks that hold the model together, unless given."""

_SAME = ("sites", "model", "data", "dtype", "prepare", "collate", "deterministic")
"""What has to be the same when an extraction goes on."""


class Work:
    """What is to be done, and doing it."""

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        choice: SiteChoice,
        *,
        prepare: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        batch_size: int | None = None,
        limit: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        is_deterministic: bool = False,
        team: Team | None = None,
        named: Mapping[str, Any] | None = None,
    ) -> None:
        """Take what `hl.extract` takes; `named` is what the model is called, once that is known.

        Of a team, this is the work of the first rank.
        """
        self._model, self._source, self._choice = model, source, choice
        self._team, self._named = team, named
        self._facts: dict[str, Any] | None = None
        if team is not None and batch_size is None:
            batch_size = _SHARED  # how fast a batch is, or whether it fits, differs between ranks
        self._prepare, self._collate = prepare, collate
        # Alone in its batch, a sample is not filled up to the length of others.
        self._size = BatchSize(1 if is_deterministic and batch_size is None else batch_size)
        if is_deterministic:
            self._size.now = 1
        self._dtype, self._device = dtype, device
        self._is_deterministic = is_deterministic
        self._all = Wanted.of_ranges([(0, limit)])
        self._limit = limit
        self.failed: dict[int, str] = {}

    @property
    def size(self) -> int:
        """How many samples there are, done or not, where that is known."""
        size = self._source.size
        if size is None:
            raise ValueError("it is not known how many samples there are")
        return size if self._limit is None else min(size, self._limit)

    def facts(self) -> dict[str, Any]:
        """Say what is extracted of what, so that a store can tell."""
        if self._facts is not None:
            return self._facts
        source, named = self._source, self._named
        self._facts = {
            "sites": self._choice.facts(),
            "model": dict(name_model(self._model) if named is None else named),
            "data": {
                "name": source.name,
                "fingerprint": source.fingerprint(),
                "samples": source.probe(),
            },
            "dtype": None if self._dtype is None else name_dtype(self._dtype),
            "prepare": name_function(self._prepare),
            "collate": name_function(self._collate),
            "deterministic": self._is_deterministic,
        }
        return self._facts

    def check(self, there: Mapping[str, Any], place: str) -> None:
        """Refuse to add to a store that says of itself that it holds something else."""
        mine = json.loads(json.dumps(self.facts()))
        other = [key for key in _SAME if _without_name(there.get(key)) != _without_name(mine[key])]
        told = [f"{key}: {there.get(key)} there, {mine[key]} now" for key in other]
        known = there.get("data")
        samples = differ(
            known.get("samples") if isinstance(known, Mapping) else None, mine["data"]["samples"]
        )
        if samples and not told:
            told = [
                f"data: as many samples of the same type, but others, such as sample {samples[0]}"
            ]
        if told:
            raise StoreError(
                f"`{place}` holds another extraction ({'; '.join(told)}). Name another folder, or "
                "replace it with overwrite=True. A model of random weights needs a seed to be "
                "the same"
            )

    def run(
        self,
        writer: StoreWriter,
        *,
        on_error: OnError = "stop",
        on_progress: Callable[[Advance], None] | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> Extraction:
        """Do all that is not in the store yet."""
        done = writer.find_done()
        if len(done) and not self._source.is_repeatable:
            raise StoreError(
                f"`{writer.place.name}` holds samples already, and an iterator that was begun does "
                "not tell which: give something that can be read from the beginning"
            )
        wanted = self._all.without(done)
        total = self._count(wanted)
        wanted = wanted.share(rank, world, block=self._block(world))
        advance = Advance(total=self._count(wanted), before=len(done))
        return self.do(
            writer, wanted, advance, on_error=on_error, on_progress=on_progress, total=total
        )

    def find_left(self, writer: StoreWriter) -> tuple[Wanted, Advance]:
        """Give what is not in the store yet, and how much that is."""
        done = writer.find_done()
        wanted = self._all.without(done)
        return wanted, Advance(total=self._count(wanted), before=len(done))

    def do(
        self,
        writer: StoreWriter,
        wanted: Wanted,
        advance: Advance,
        *,
        on_error: OnError = "stop",
        on_progress: Callable[[Advance], None] | None = None,
        shard: str | None = None,
        total: int | None = None,
    ) -> Extraction:
        """Send the wanted samples through the model; in one shard of this name, if it has one.

        `total` is how many there are to do for all that write to the store.
        """
        if on_error not in ("stop", "skip"):
            raise ValueError(f'on_error is "stop" or "skip", not {on_error!r}')
        self.failed = {}
        begun = told = noted = time.perf_counter()
        saver = Saver(writer, shard)
        # Of a task that may be done again, whoever gave it keeps account.
        log = FailureLog(writer.place, writer.name) if shard is None else None
        is_known = False
        try:
            with (
                evaluating(self._model, is_deterministic=self._is_deterministic),
                self._feed(wanted) as batches,
            ):
                runner = self._runner()
                runner.tokenless = _find_tokenless(writer)
                for batch in batches:
                    start = time.perf_counter()
                    weight = self._run_batch(runner, batch, saver, wanted, on_error)
                    now = time.perf_counter()
                    self._size.learn(len(batch.ids), now - start, weight)
                    advance.batch = self._size.now
                    advance.samples, advance.bytes = saver.samples, saver.bytes
                    advance.seconds = now - begun
                    if saver.samples and not is_known:
                        check_room(writer.place, advance, total)
                        is_known = True
                    if on_progress is not None and now - told >= _TELL_EVERY:
                        on_progress(advance)
                        told = now
                    if log is not None and now - noted >= _NOTE_EVERY:
                        log.write(self.failed)
                        noted = now
        finally:
            try:
                saver.close()
            finally:
                if log is not None:
                    log.write(self.failed)
        advance.samples, advance.bytes = saver.samples, saver.bytes
        advance.seconds = time.perf_counter() - begun
        if on_progress is not None:
            on_progress(advance)
        return Extraction(writer.place.name, advance, dict(sorted(self.failed.items())))

    def plan(self, out: str | os.PathLike[str], *, is_new: bool = False) -> Extraction:
        """Send a few samples through the model, and tell what all of them will take.

        `is_new` where the store that is there, if there is one, will be removed.
        """
        if not self._source.is_repeatable:
            raise ValueError(
                f"dry_run=True reads the first samples, and a `{self._source.name}` gives each of "
                "them once: they would be missing from the extraction. Give data that can be read "
                "again, such as a list, a data set or a file"
            )
        place = open_place(out)
        about = None if is_new else read_about(place)
        done: Ids | None = None
        wanted = self._all
        if about is not None:
            self.check(about.facts, place.name)
            done = find_done(place, about.columns)
            wanted = wanted.without(done)
        sizes: dict[str, float] = {}
        count, seconds = 0, 0.0
        with (
            evaluating(self._model, is_deterministic=self._is_deterministic),
            self._feed(wanted) as batches,
        ):
            runner = self._runner()
            for number, batch in zip(range(_TRIED + 1), batches, strict=False):
                if number == 1 and count:
                    count, seconds, sizes = 0, 0.0, {}  # the first one warmed up
                begun = time.perf_counter()
                for made in runner.run(batch.ids, batch.content):
                    if isinstance(made, Failed):
                        continue
                    for name, rows in made.arrive().items():
                        sizes[name] = sizes.get(name, 0.0) + bytes_of(rows)
                    count += len(made.ids)
                seconds += time.perf_counter() - begun
        left = self._count(wanted)
        if not count and left != 0:
            raise StoreError(f"none of the first samples of {self._source.name} went through")
        estimate = Estimate(
            left,
            {name: size / count for name, size in sizes.items()},
            seconds / max(count, 1),
            free=_free_bytes(place.local),
            before=0 if done is None else len(done),
        )
        return Extraction(place.name, Advance(total=estimate.samples), estimate=estimate)

    def _block(self, world: int) -> int:
        """Give how many samples in a row go to one rank: many, but the same for all of them.

        A batch that is made already goes to one rank alone: another that has a part of it would
        send all of it through the model as well.
        """
        size, batch = self._source.size, self._source.batch
        block = 64 if size is None else max(1, min(1024, size // (16 * world)))
        if not self._source.is_batched:
            return block
        return 1024 if batch is None else -(-block // batch) * batch

    def _count(self, wanted: Wanted) -> int | None:
        size = self._source.size
        if size is not None and self._limit is not None:
            size = min(size, self._limit)
        return wanted.count(size)

    @contextlib.contextmanager
    def _feed(self, wanted: Wanted) -> Iterator[Iterator[Batch]]:
        """Give the batches of samples; those of a team to all ranks."""
        feed = Feed(self._source, wanted, self._size, prepare=self._prepare, join=self._collate)
        with feed as batches:
            yield batches if self._team is None else self._team.send(batches)

    def _runner(self) -> Runner:
        return Runner(
            self._model,
            self._choice,
            device=self._device,
            dtype=self._dtype,
            is_alone=self._is_deterministic,
            team=self._team,
        )

    def _run_batch(
        self, runner: Runner, batch: Batch, saver: Saver, wanted: Wanted, on_error: OnError
    ) -> int:
        """Run a batch; give how many bytes it has, of what comes in or what goes out."""
        for broken in batch.broken:
            self._fail(broken, on_error)
        if not len(batch.ids):
            return 0
        kept_bytes = 0
        kept: Ids | None = None
        if self._source.is_batched:
            kept = wanted.within(int(batch.ids[0]), int(batch.ids[-1]) + 1)
        made: Iterable[Made | Failed] = runner.run(batch.ids, batch.content)
        if self._team is not None:
            made = list(made)  # what fails from here on fails on this rank alone
        for found in made:
            if isinstance(found, Failed):
                if kept is None or found.id in kept:
                    self._fail(ModelFailed(found.id, found.error), on_error)
                continue
            if self._size.grows:
                found.arrive()  # else it is not known how long the batch takes
            kept_bytes += found.nbytes
            saver.save(found, kept)
        if runner.most is not None:
            self._size.shrink(2 * runner.most)
        if not self._size.grows:
            return 0
        return max(kept_bytes, sum(one.nbytes for _, one in _trees.leaves(batch.content)))

    def _fail(self, error: SampleError, on_error: OnError) -> None:
        if on_error == "stop":
            raise error
        self.failed[error.id] = f"{type(error.cause).__name__}: {error.cause}"


def remove_store(out: str | os.PathLike[str]) -> None:
    """Remove a store, and nothing else that is in its folder."""
    place = open_place(out)
    with contextlib.suppress(DamagedAbout):  # which is why it is to be gone
        if read_about(place) is None:
            return
    if place.local is not None:
        refuse_writers(place.local / SHARDS, place.name)
    for folder in (SHARDS, INDEX, FAILED):
        for name in place.names(folder):
            place.remove(f"{folder}/{name}")
    place.remove(ABOUT)


def check_room(place: Place, advance: Advance, total: int | None) -> None:
    """Refuse to go on where the disk cannot hold all of it, as far as the first samples tell."""
    free = _free_bytes(place.local)
    if free is None or total is None or not advance.samples:
        return
    needed = round(advance.bytes / advance.samples * max(total - advance.samples, 0))
    if needed > free:
        raise RunWriteError(
            f"{total:,} samples need about {show_bytes(needed)} more; {show_bytes(free)} are "
            f"free at `{place.name}`: keep less (`reduce=`, `dtype=`, `limit=`, fewer sites), "
            "or name another disk. What is written so far stays, and is not made again"
        )


def _free_bytes(folder: Path | None) -> int | None:
    """Give how many bytes the disk of a folder has left."""
    while folder is not None:
        try:
            return shutil.disk_usage(folder).free
        except FileNotFoundError:
            folder = folder.parent
        except OSError:
            return None
    return None


def _find_tokenless(writer: StoreWriter) -> set[str]:
    """Name the columns of a store that hold a row for each sample."""
    return {name for name, one in (writer.columns or {}).items() if not one.is_ragged}


def _without_name(fact: Any) -> Any:
    """Give a fact without what the data are called: the same files may be found by another path."""
    if isinstance(fact, Mapping) and "fingerprint" in fact:
        return fact["fingerprint"]
    return fact
