"""Samples that are not in a store because they failed, and why: lines that each writer adds to.

What counts are the shards: a sample that one of them holds did not fail in the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from hookline.stores.layout import ABOUT, FAILED
from hookline.stores.places import Place
from hookline.stores.shard_reading import Integers

_LONGEST = 1000
"""So many letters of a reason are kept."""

_AT_ONCE = 1000
"""A line has so many samples at most."""


class FailureLog:
    """Note the samples that failed for one writer, each once."""

    def __init__(self, place: Place, name: str) -> None:
        self._place, self._file = place, f"{FAILED}/{name}.jsonl"
        self._known: dict[int, str] = {}
        self._has_store = False

    def write(self, failed: Mapping[int, str]) -> None:
        """Add those that are new; nothing before there is a store."""
        new = [(id, why) for id, why in failed.items() if self._known.get(id) != why]
        if not new:
            return
        self._has_store = self._has_store or self._place.exists(ABOUT)
        if not self._has_store:
            return
        for first in range(0, len(new), _AT_ONCE):
            some = new[first : first + _AT_ONCE]
            line = {"failed": [[id, why[:_LONGEST]] for id, why in some]}
            self._place.append_line(self._file, json.dumps(line))
            self._known.update(some)


def read_failed(place: Place, ids: Integers) -> dict[int, str]:
    """Give by number why samples failed, over all writers; but for those that are there now."""
    found: dict[int, str] = {}
    for name in place.names(FAILED):
        if name.endswith(".jsonl"):
            for text in place.read(f"{FAILED}/{name}").split(b"\n"):
                found |= _read_line(text)
    numbers = np.array(sorted(found), np.int64)
    return {int(id): found[int(id)] for id in np.setdiff1d(numbers, ids)}


def _read_line(text: bytes) -> dict[int, str]:
    """Read a line; nothing where it is none, as where it was cut off."""
    try:
        return {int(id): str(why) for id, why in json.loads(text)["failed"]}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
