"""Where steps come from: the contract of everything that can be read like a run.

A source holds what one rank measured. The databases of a run folder are sources, and so are the
last steps in memory. Whoever reads them needs no more than this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from hookline.runs.records import WIDTHS, SiteFacts

if TYPE_CHECKING:
    import numpy.typing as npt

Integers: TypeAlias = "npt.NDArray[np.int64]"
Floats: TypeAlias = "npt.NDArray[np.float64]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"
Array: TypeAlias = "npt.NDArray[Any]"


@dataclass(frozen=True, slots=True, eq=False)
class StepIndex:
    """List the steps of a source."""

    steps: Integers
    """The numbers of the steps; each is greater than the one before it."""

    keys: Integers
    """By what the source finds each of them again."""

    times: Floats
    """When each ended, in seconds since 1970."""

    seconds: Floats
    """How long each took; NaN where that is not known."""


class StepSource(Protocol):
    """Give what one rank measured."""

    @property
    def rank(self) -> int:
        """The rank that measured."""

    def index(self) -> StepIndex:
        """List the steps that are there now."""

    def sites(self) -> Sequence[SiteFacts]:
        """List the sites, each address once, in the order in which they first ran."""

    def read(self, kind: str, keys: Integers, *, sites: Integers) -> tuple[Array, Flags]:
        """Read one kind of measurement at some steps, for sites by their place in `sites()`.

        Gives values [steps, sites, columns], and which of them were measured: [steps, sites]. A
        place of -1 is a site that this source does not have.
        """

    def scalars(self, keys: Integers) -> Mapping[str, tuple[Floats, Flags]]:
        """Read the numbers of some steps by name, and tell which of these steps have them."""


def keep_current(
    steps: Sequence[int], keys: Sequence[int], times: Sequence[float], seconds: Sequence[float]
) -> StepIndex:
    """List steps in the order of writing without those that training went back behind."""
    numbers = np.array(steps, np.int64)
    is_current = np.ones(len(numbers), bool)
    if len(numbers) > 1:
        least_later = np.minimum.accumulate(numbers[::-1])[::-1][1:]
        is_current[:-1] = numbers[:-1] < least_later
    return StepIndex(
        numbers[is_current],
        np.array(keys, np.int64)[is_current],
        np.array(times, np.float64)[is_current],
        np.array(seconds, np.float64)[is_current],
    )


class ScalarColumns(dict[str, tuple[Floats, Flags]]):
    """Collect the numbers of some steps by name."""

    def __init__(self, keys: Integers) -> None:
        super().__init__()
        self._place_of = {int(key): place for place, key in enumerate(keys)}

    def add(self, key: int, name: str, *, value: float) -> None:
        """Add one number, if its step is wanted."""
        place = self._place_of.get(key)
        if place is None:
            return
        if name not in self:
            count = len(self._place_of)
            self[name] = np.full(count, np.nan), np.zeros(count, bool)
        values, is_there = self[name]
        values[place], is_there[place] = value, True


def make_values(kind: str, steps: int, sites: int) -> tuple[Array, Flags]:
    """Make room for what `read` gives, with nothing measured yet."""
    dtype = np.float32 if kind == "sketch" else np.float64
    return np.zeros((steps, sites, WIDTHS[kind]), dtype), np.zeros((steps, sites), bool)
