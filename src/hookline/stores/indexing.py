"""The index of a store: a line for each shard, so that not every shard has to be opened.

The shards are what counts. One without a line is opened and read; a line without its shard is
nothing but a line.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookline._errors import NoSuchRun, StoreError
from hookline.stores.layout import (
    ABOUT,
    INDEX,
    SHARDS,
    SUFFIX,
    VERSION,
    Column,
    check_file_name,
    check_version,
    read_column,
)
from hookline.stores.places import Place
from hookline.stores.shard_reading import Integers, open_shards, read_integers

_MOST_RANGES = 4096
"""A line holds so many ranges of sample numbers; where there are more, the shard is asked."""


@dataclass(frozen=True, slots=True)
class About:
    """What a store says of itself."""

    columns: dict[str, Column]
    facts: dict[str, Any]
    """What its writer said of it: which model, which data."""


class DamagedAbout(StoreError):
    """Say that a store does not say any more what it holds."""


def read_about(place: Place) -> About | None:
    """Read what a store says of itself; None where there is no store yet."""
    try:
        data = place.read(ABOUT)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        told = json.loads(data)
        if not isinstance(told, dict):
            raise TypeError("it holds no names and values")
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(place, error) from None
    check_version(told, place.name)
    try:
        columns = [read_column(one) for one in told["columns"]]
        facts = dict(told["facts"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(place, error) from None
    return About({one.name: one for one in columns}, facts)


def _damaged(place: Place, error: Exception) -> DamagedAbout:
    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return DamagedAbout(
        f"`{place.name}/{ABOUT}` is damaged: {reason}. The shards beside it are as they were: put "
        "a copy of it back if there is one; an extraction begins anew with overwrite=True"
    )


def need_about(place: Place) -> About:
    """Read what a store says of itself, and say where there is none."""
    about = read_about(place)
    if about is None:
        raise NoSuchRun(
            f"`{place.name}` holds no tensor store: there is no `{ABOUT}`. A folder that "
            "`hl.extract` or `hookline extract` wrote is one."
        )
    return about


def write_about(place: Place, about: About) -> None:
    """Write what a store says of itself."""
    columns = [one.facts() for one in about.columns.values()]
    told = {"version": VERSION, "columns": columns, "facts": about.facts}
    place.write(ABOUT, json.dumps(told, indent=1).encode())


def list_shards(place: Place) -> list[str]:
    """Give the names of the finished shards."""
    return [one for one in place.names(SHARDS) if one.endswith(SUFFIX)]


def read_index(place: Place) -> dict[str, dict[str, Any]]:
    """Read the lines of all writers, by shard; a line that was cut off is left out."""
    lines: dict[str, dict[str, Any]] = {}
    for name in place.names(INDEX):
        for text in place.read(f"{INDEX}/{check_file_name(name)}").split(b"\n"):
            line = read_line(text)
            if line is not None:
                lines[check_file_name(line["file"])] = line
    return lines


def read_line(text: bytes) -> dict[str, Any] | None:
    """Read a line of an index; None if it is none, as where it was cut off."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and "file" in line else None


def find_done(place: Place, columns: Mapping[str, Column]) -> Integers:
    """Give the numbers of the samples that finished shards hold, in order."""
    lines = read_index(place)
    found = [np.empty(0, np.int64)]
    unknown: list[str] = []
    for file in list_shards(place):
        ranges = _read_ranges(lines.get(file, {}))
        # A sample's number takes eight bytes in its shard, whatever a line says.
        most = None if place.local is None else place.size(f"{SHARDS}/{file}") // 8
        is_right = most is None or sum(end - begin for begin, end in ranges or ()) <= most
        if ranges is not None and is_right:
            found += [np.arange(begin, end, dtype=np.int64) for begin, end in ranges]
        else:
            unknown.append(file)
    for shard in open_shards(place, unknown, columns):
        parts = [shard.ids_part(number) for number in range(len(shard.groups))]
        found += read_integers(place, parts)
    return np.unique(np.concatenate(found))


def _read_ranges(line: Mapping[str, Any]) -> list[tuple[int, int]] | None:
    """Give the sample numbers that a line names, if it does and they are no more than it says."""
    try:
        ranges = [(operator.index(begin), operator.index(end)) for begin, end in line["ranges"]]
        is_right = all(begin < end for begin, end in ranges)
        is_right &= sum(end - begin for begin, end in ranges) <= line["samples"]
    except (KeyError, TypeError, ValueError):
        return None
    return ranges if is_right else None


def describe_ids(ids: Iterable[Integers]) -> list[list[int]] | None:
    """Write sample numbers as ranges, unless these are many."""
    joined = np.unique(np.concatenate([np.empty(0, np.int64), *ids]))
    if not len(joined):
        return []
    breaks = np.flatnonzero(np.diff(joined) != 1)
    begins = joined[np.concatenate([[0], breaks + 1])]
    ends = joined[np.concatenate([breaks, [len(joined) - 1]])] + 1
    if len(begins) > _MOST_RANGES:
        return None
    return [[int(begin), int(end)] for begin, end in zip(begins, ends, strict=True)]
