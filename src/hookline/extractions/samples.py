"""What every source of samples can do, and a sample that cannot be read.

Knows no files and no data sets.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookline._errors import HooklineError
from hookline.extractions.wanted import Wanted

_WINDOW = 2**14
"""For how many items in a row it is looked up at once whether they are wanted."""


class SampleError(HooklineError, RuntimeError):
    """Say which sample cannot be read, and why."""

    def __init__(self, id: int, cause: Exception) -> None:
        super().__init__(id, cause)
        self.id = id
        """The sample's position in the data."""
        self.cause = cause
        """What reading it raised."""
        self.__cause__ = cause

    def __str__(self) -> str:
        reason = f"{type(self.cause).__name__}: {self.cause}"
        return f"sample {self.id} cannot be read: {reason}"


@dataclass(frozen=True, slots=True)
class Broken:
    """Stand in for a sample that cannot be read, so that those after it are read all the same."""

    error: SampleError
    """Which sample it is and what reading it raised; raise it to stop there."""


class Source(ABC):
    """Samples by id, in the order of their ids."""

    is_batched = False
    """Whether `samples` gives batches that are made already, each with the ids of its rows."""

    batch: int | None = None
    """How many rows such a batch has, where that is known; the last ones may have fewer."""

    def __init__(self, name: str, size: int | None, *, is_repeatable: bool = True) -> None:
        self.name = name
        """What the samples come from: a path, or the name of a class."""
        self.size = size
        """How many samples there are; None where that is not known."""
        self.is_repeatable = is_repeatable
        """Whether the samples can be read more than once."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Give a text that tells other data apart, the same in every process."""

    def probe(self) -> dict[str, str] | None:
        """Give digests of a few samples by position; None where none can be read by itself."""
        return None

    @abstractmethod
    def samples(self, wanted: Wanted) -> Generator[tuple[Any, Any]]:
        """Yield the wanted samples, each after its id, ascending; `Broken` for an unreadable one.

        A batched source yields each batch with at least one wanted sample, after an array of the
        ids of all its rows, and `Broken` after an array of one id.
        """

    def __repr__(self) -> str:
        size = "samples" if self.size is None else f"{self.size:,} samples"
        return f"<{type(self).__name__} {self.name}: {size}>"


def read_sample(id: int, read: Callable[[Any], Any], item: Any, column: str | None = None) -> Any:
    """Read one sample from an item and pick a column of it; what fails becomes `Broken`."""
    try:
        return pick_column(read(item), column)
    except Exception as error:
        return Broken(SampleError(id, error))


def pick_column(sample: Any, column: str | None) -> Any:
    """Give one field of a dict or, by its place, one value of a tuple; all of it without one."""
    if column is None:
        return sample
    if isinstance(sample, (tuple, list)) and column.isdecimal():
        if int(column) >= len(sample):
            raise IndexError(f"column={column} is not among the {len(sample)} values of a sample")
        return sample[int(column)]
    if not isinstance(sample, Mapping):
        raise TypeError(
            f"column={column!r} picks a field of dict samples, and this one is a "
            f"`{type(sample).__name__}`"
        )
    if column not in sample:
        raise KeyError(f"column={column!r} is not among the fields: {', '.join(map(str, sample))}")
    return sample[column]


def follow(wanted: Wanted, items: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
    """Number items and yield the wanted ones; take none after the last that is wanted."""
    if wanted.end <= start:
        return
    low = high = start
    flags: list[bool] = []
    for number, item in enumerate(items, start):
        if number == high:
            low, high = high, high + _WINDOW
            mask = np.zeros(_WINDOW, dtype=np.bool_)
            mask[wanted.within(low, high) - low] = True
            flags = mask.tolist()
        if flags[number - low]:
            yield number, item
        if number + 1 >= wanted.end:
            return


def digest(facts: Iterable[object]) -> str:
    """Give a short text that stands for facts, the same in every process."""
    summed = hashlib.sha256()
    for fact in facts:
        summed.update(ascii(fact).encode() + b"\n")
    return summed.hexdigest()[:16]
