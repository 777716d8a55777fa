"""What is written to a run: facts of sites, and what was measured of them in one step.

Plain values of numpy and Python; they know neither the folder nor how they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookline.stats.rows import COLUMNS

if TYPE_CHECKING:
    import numpy.typing as npt

SITE_KINDS = (
    "value",
    "gradient",
    "parameter",
    "local gradient",
    "parameter gradient",
    "update",
    "moment",
    "buffer",
)
"""What a site can be."""

WIDTHS = {
    "rows": len(COLUMNS),
    "sketch": 64,
    "counts": 3,
    "histogram": 256,
    "updates": 3,
    "units": 5,
}
"""The kinds of blocks, and how many numbers each holds for a site.

rows        the eight statistics of `hookline.stats.rows`
sketch      64 sums that depend on position
counts      zeros, tiny, huge
histogram   elements by exponent
updates     given, lost, and the norm of the weight before the step
units       units, dead, window, outlier, saturated: of the channels of a value, or of the rows of
            a weight's gradient; the last is -1 where nothing can saturate, NaN is not measured
"""


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """Say what one watched site is."""

    id: int
    """Its number in this process: 0, 1, 2, ... in the order in which sites are first met."""

    address: str
    """Its address: `layers.3.mlp:output.grad`, `layers.3.mlp.weight:update`."""

    kind: str
    """One of `SITE_KINDS`."""

    module: str = ""
    """The path of its module."""

    type: str = ""
    """The class of that module."""

    dtype: str = ""
    """The element type of the first value seen, such as `bfloat16`."""

    shape: tuple[int, ...] = ()
    """The shape of the first value seen."""

    source: str = ""
    """Where its module comes from: `model.py:48`."""

    more: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else JSON can hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Hold one kind of measurement of some sites in one step."""

    kind: str
    """One of `WIDTHS`."""

    sites: npt.NDArray[Any]
    """The ids of the sites, each at most once: int32 [n]."""

    values: npt.NDArray[Any]
    """What was measured: [n, columns]."""

    def __post_init__(self) -> None:
        expected = (len(self.sites), WIDTHS.get(self.kind, -1))
        if self.values.shape != expected:
            raise ValueError(
                f"A block of {self.kind!r} with {expected[0]} sites has the shape "
                f"{self.values.shape}. The kinds and their columns are {WIDTHS}."
            )


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """Hold everything that was measured in one step."""

    step: int
    """The number of the step."""

    time: float
    """When it ended, in seconds since 1970."""

    seconds: float | None = None
    """How long it took; None where that is not known."""

    scalars: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the step itself: loss, lr."""

    blocks: Sequence[Block] = ()
    """What was measured of sites, at most one block of each kind."""

    more: Mapping[str, Any] = field(default_factory=dict)
    """What is known of the step besides, such as where a NaN comes from; it is not stored."""

    def __post_init__(self) -> None:
        kinds = [block.kind for block in self.blocks]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"a step has one block of each kind, not {kinds}")
