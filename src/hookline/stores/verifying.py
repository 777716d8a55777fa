"""Look whether a store is as it was written, and put aside what is not.

Opening a store stops at the first shard that is damaged; this goes on and finds all of them.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hookline._errors import CorruptShard, NewerRun, StoreError
from hookline.stores.failures import read_failed
from hookline.stores.indexing import describe_ids, list_shards, need_about, read_line
from hookline.stores.layout import ABOUT, INDEX, SHARDS, Column, check_file_name
from hookline.stores.locking import find_writer, is_held
from hookline.stores.places import Place, open_place
from hookline.stores.shard_reading import Integers, Shard, read_integers

DAMAGED = "damaged"
"""The folder beside `shards` for what is put aside."""

_THREADS = 4
_FEW = 5
"""So many sample numbers are named in a message."""

_PART = re.compile(r"\..+\.(\d{1,9})\.(?:part|tmp)")
"""A file on its way, with the process that writes it."""

Progress = Callable[[int, int], None]
"""Is told how many bytes have been read, and of how many."""


@dataclass(slots=True)
class Verdict:
    """What was found in a store."""

    shards: int = 0
    """Shards that are as they were written."""
    samples: int = 0
    """Samples in them, each counted once."""
    bytes: int = 0
    """Bytes of these shards."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """The file that each is about, and what is wrong with it."""
    repairs: list[str] = field(default_factory=list)
    """What was done about them."""
    failed: dict[int, str] = field(default_factory=dict)
    """By number, the samples that an extraction skipped, and why; which is no problem."""

    @property
    def is_good(self) -> bool:
        """Whether nothing was found that is wrong."""
        return not self.problems


def verify(
    where: str | os.PathLike[str], *, repair: bool = False, on_progress: Progress | None = None
) -> Verdict:
    """Read all of a store and compare it with its checksums, its columns and its index.

    With `repair` damaged shards go to the folder `damaged`, so that the same extraction makes
    their samples anew; lines of the index that are not true and files that were never finished
    are removed. Nobody should write to the store meanwhile.

    Args:
        where: a folder, or an address that fsspec knows.
        repair: put right what can be.
        on_progress: is called with the bytes that were read so far, and with all there are.
    """
    place = open_place(where)
    verdict = Verdict()
    try:
        columns = need_about(place).columns
    except StoreError as error:
        verdict.problems.append((ABOUT, str(error)))
        return verdict
    ids = _judge_shards(place, columns, verdict, repair, on_progress)
    verdict.samples = _judge_samples(ids, verdict)
    every = np.concatenate([np.empty(0, np.int64), *(own for _, own in ids.values())])
    verdict.failed = read_failed(place, every)
    _judge_index(place, ids, verdict, repair)
    _judge_parts(place, verdict, repair)
    return verdict


def _judge_shards(
    place: Place,
    columns: Mapping[str, Column],
    verdict: Verdict,
    repair: bool,
    on_progress: Progress | None,
) -> dict[str, tuple[Shard, Integers]]:
    """Read every shard; give those that are right, each with the numbers of its samples."""
    files = list_shards(place)
    reading = _Reading(place, files, on_progress)

    def check(file: str) -> tuple[Shard, Integers] | Exception:
        try:
            shard = Shard(place, file, columns)
            for size in shard.check():
                reading.add(size)
            return shard, _read_samples(place, shard, columns)
        except (StoreError, NewerRun, OSError) as error:
            return error

    found: dict[str, tuple[Shard, Integers]] = {}
    threads = ThreadPoolExecutor(_THREADS, "hookline-verify")
    try:
        for file, one in zip(files, threads.map(check, files), strict=True):
            name = f"{SHARDS}/{file}"
            if isinstance(one, tuple):
                found[file] = one
                verdict.shards += 1
                verdict.bytes += one[0].size
                continue
            reason = one.reason if isinstance(one, CorruptShard) else str(one)
            verdict.problems.append((name, reason))
            # What cannot be reached now, or what a newer hookline wrote, may well be right.
            if repair and isinstance(one, StoreError):
                _put_aside(place, name, verdict)
    finally:
        threads.shutdown(cancel_futures=True)
    reading.end()
    return found


def _read_samples(place: Place, shard: Shard, columns: Mapping[str, Column]) -> Integers:
    """Give the numbers of a shard's samples, and look whether it says whose its rows are."""
    groups = range(len(shard.groups))
    ragged = [(group, one.name) for group in groups for one in columns.values() if one.is_ragged]
    parts = [shard.ids_part(group) for group in groups]
    read = read_integers(place, [*parts, *(shard.ends_part(*one) for one in ragged)])
    for (group, name), ends in zip(ragged, read[len(parts) :], strict=True):
        shard.check_ends(group, name, ends)
    return np.concatenate([np.empty(0, np.int64), *read[: len(parts)]])


def _judge_samples(ids: Mapping[str, tuple[Shard, Integers]], verdict: Verdict) -> int:
    """Name samples that are there more than once; give how many different ones there are."""
    files = list(ids)
    own = [one for _, one in ids.values()]
    every = np.concatenate([np.empty(0, np.int64), *own])
    homes = np.repeat(np.arange(len(own)), np.array([len(one) for one in own], np.int64))
    found, firsts, which = np.unique(every, return_index=True, return_inverse=True)
    again = np.flatnonzero(firsts[which] != np.arange(len(every)))
    pairs = np.stack([homes[again], homes[firsts[which[again]]]], axis=1)
    for mine, other in np.unique(pairs, axis=0).tolist():
        twins = np.unique(every[again[(pairs == (mine, other)).all(axis=1)]])
        where = "twice" if mine == other else f"that `{SHARDS}/{files[other]}` holds too"
        named = ", ".join(map(str, twins[:_FEW].tolist()))
        more = f" and {len(twins) - _FEW:,} more" if len(twins) > _FEW else ""
        what = f"holds samples {where}: {named}{more}"
        verdict.problems.append((f"{SHARDS}/{files[mine]}", what))
    return len(found)


def _judge_index(
    place: Place, ids: Mapping[str, tuple[Shard, Integers]], verdict: Verdict, repair: bool
) -> None:
    """Name lines that are not true, or lead out of the folder; drop them."""
    files = set(list_shards(place))
    put_aside = {one.removeprefix(f"{SHARDS}/") for one, _ in verdict.problems} - files
    texts: dict[str, list[bytes]] = {}
    dropped: dict[str, set[int]] = {}
    last: dict[str, tuple[str, int, dict[str, Any]]] = {}

    def complain(name: str, number: int, what: str) -> None:
        verdict.problems.append((name, f"line {number + 1} {what}"))
        dropped[name].add(number)

    for file in place.names(INDEX):
        name = f"{INDEX}/{file}"
        try:
            check_file_name(file)
            texts[name] = place.read(name).split(b"\n")
        except (StoreError, OSError) as error:
            verdict.problems.append((name, str(error)))
            if repair and isinstance(error, StoreError):
                _put_aside(place, name, verdict)
            continue
        dropped[name] = set()
        for number, text in enumerate(texts[name]):
            line = read_line(text)
            if not text.strip():
                continue
            if line is None:
                complain(name, number, "cannot be read")
                continue
            try:
                shard = check_file_name(line["file"])
            except StoreError as error:
                complain(name, number, f"leads out of the folder: {error}")
                continue
            if shard in put_aside:
                dropped[name].add(number)
            elif shard not in files:
                complain(name, number, f"names `{SHARDS}/{shard}`, which is not there")
            else:
                last[shard] = name, number, line
    for file, (name, number, line) in last.items():
        if file in ids and not _is_true(line, *ids[file]):
            complain(name, number, f"is not true of `{SHARDS}/{file}`")
    for name, numbers in dropped.items():
        if repair and numbers:
            left = [one for at, one in enumerate(texts[name]) if one and at not in numbers]
            place.write(name, b"".join(one + b"\n" for one in left))
            many = f"{len(numbers):,} line{'s' * (len(numbers) > 1)}"
            verdict.repairs.append(f"{many} of `{name}` dropped")


def _is_true(line: Mapping[str, Any], shard: Shard, ids: Integers) -> bool:
    """Tell whether a line of the index says what a shard holds."""
    is_true = line.get("bytes") == shard.size and line.get("samples") == len(ids)
    ranges = line.get("ranges")
    return is_true and (ranges is None or ranges == describe_ids([ids]))


def _judge_parts(place: Place, verdict: Verdict, repair: bool) -> None:
    """Name files that were never finished, but for those that somebody is writing; remove them."""
    if place.local is None:
        return  # elsewhere nothing has a name before it is whole
    for folder in ("", f"{SHARDS}/", f"{INDEX}/"):
        for path in sorted((place.local / folder).glob(".*")):
            found = _PART.fullmatch(path.name)
            if found is None or _is_running(int(found[1])):
                continue
            writer = find_writer(path.name)
            if writer is not None and is_held(path.parent, writer):
                continue
            name = f"{folder}{path.name}"
            verdict.problems.append((name, "was never finished"))
            if repair:
                place.remove(name)
                verdict.repairs.append(f"`{name}` removed")


def _is_running(process: int) -> bool:
    """Tell whether a process of this machine has that number."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return process > 0


def _put_aside(place: Place, name: str, verdict: Verdict) -> None:
    """Move a file to those that are damaged, in the place of none of them."""
    taken = set(place.names(DAMAGED))
    target = next(one for one in _number_names(name.rpartition("/")[2]) if one not in taken)
    place.move(name, f"{DAMAGED}/{target}")
    verdict.repairs.append(f"`{name}` moved to `{DAMAGED}/{target}`")


def _number_names(file: str) -> Iterator[str]:
    yield file
    for number in itertools.count(2):
        yield f"{file}.{number}"


class _Reading:
    """Count bytes for whoever watches."""

    def __init__(self, place: Place, files: list[str], on_progress: Progress | None) -> None:
        self._tell = on_progress
        self._total = sum(_find_size(place, one) for one in files) if on_progress else 0
        self._done = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self._done += size
            if self._tell is not None:
                self._tell(self._done, self._total)

    def end(self) -> None:
        """Count what nobody read: heads, and shards that are damaged."""
        self.add(max(self._total - self._done, 0))


def _find_size(place: Place, file: str) -> int:
    try:
        return place.size(f"{SHARDS}/{file}")
    except OSError:
        return 0
