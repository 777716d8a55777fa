"""What was measured in one step, on its way out of the training's thread, and what it becomes.

Another thread waits for the rows and sorts them by site: that is the record of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hookline.runs import Block, SiteFacts, StepRecord
from hookline.stats import Log, Taken
from hookline.stats.rows import MEAN, derive, scale_rows
from hookline.watchers.sorting import Event, SiteSorter, UpdateEvent, sort_updates
from hookline.watchers.units import UnitCounter, UnitsTaken


@dataclass(slots=True)
class Harvest:
    """Everything measured in one step, on its way out of the training thread."""

    step: int
    """The number of the step."""

    time: float
    """When it ended, in seconds since 1970."""

    seconds: float
    """How long it took."""

    taken: dict[Log, Taken]
    """The rows, by the log they are in; they may still be on their way from a device."""

    events: list[Event]
    """Which site each row belongs to."""

    updates: list[UpdateEvent]
    """Update site, the row of the update, the row of the weight before it, their log."""

    unscaled: dict[tuple[int, Log], int]
    """Rows of gradients that a GradScaler has scaled, with the row of the scale."""

    scale: tuple[int, Log] | None
    """The row of the factor that is in the gradients of values."""

    gradients: frozenset[int]
    """The sites that are gradients of values, or local, where there is such a factor."""

    scalars: dict[str, float]
    """Numbers that are known already."""

    pending: list[tuple[str, int, Log]]
    """Numbers that are on a device: name and row."""

    losses: list[tuple[int, Log]]
    """The rows of what backward was called on."""

    units: UnitsTaken | None
    """The channels that were looked at."""

    sketches: list[tuple[int, Tensor]]
    """Sketches that were made elsewhere, of parts that this rank has."""

    more: dict[str, Any]
    """What is known of the step besides."""

    sites: list[SiteFacts]
    """Sites that were met for the first time."""

    calls: Sequence[Any] = ()
    """The calls of models in this step, where somebody may want their arguments."""

    def arrive(self, sorter: SiteSorter, counter: UnitCounter) -> StepRecord:
        """Wait for the rows and sort them by site."""
        measured = {log: taken.wait() for log, taken in self.taken.items()}
        scalars = dict(self.scalars)
        for name, row, log in self.pending:
            scalars[name] = _read_number(measured[log].rows[row : row + 1])
        for (row, log), scale_row in self.unscaled.items():
            rows = measured[log].rows
            scale = rows[scale_row, MEAN]
            if scale:
                rows[row] = scale_rows(rows[row : row + 1], 1 / scale)[0]
        blocks = sorter.sort(self.events, measured)
        if self.sketches:
            blocks = _add_sketches(blocks, self.sketches)
        scale = 1.0
        if self.scale is not None:
            row, log = self.scale
            scale = float(measured[log].rows[row, MEAN])
            blocks = [self._unscale(block, scale) for block in blocks]
        if self.losses and "loss" not in scalars:  # one that was logged is what the user means
            parts = [_read_number(measured[log].rows[row : row + 1]) for row, log in self.losses]
            loss = sum(parts)
            if self.scale is None or not math.isinf(loss):  # else it was the factor that did it
                scalars["loss"] = loss / (scale or 1.0)
        if self.updates:
            blocks.append(sort_updates(self.updates, measured))
        if self.units is not None:
            blocks.append(counter.count(self.units))
        return StepRecord(self.step, self.time, self.seconds, scalars, blocks, self.more)

    def _unscale(self, block: Block, scale: float) -> Block:
        """Take the factor out of gradients; what was counted is of the values as they flowed."""
        if block.kind not in ("rows", "sketch") or not scale:
            return block
        factors = np.array([1 / scale if site in self.gradients else 1.0 for site in block.sites])
        if block.kind == "rows":
            return Block(block.kind, block.sites, scale_rows(block.values, factors))
        values = (block.values * factors[:, None]).astype(block.values.dtype)
        return Block(block.kind, block.sites, values)


def _add_sketches(blocks: list[Block], sketches: list[tuple[int, Tensor]]) -> list[Block]:
    """Put sketches that were made elsewhere among the others; those of one site add up."""
    own = [block for block in blocks if block.kind == "sketch"]
    sites = [*(block.sites for block in own), np.array([site for site, _ in sketches], np.int32)]
    made = np.stack([sketch.cpu().numpy() for _, sketch in sketches]).astype(np.float32)
    unique, groups = np.unique(np.concatenate(sites), return_inverse=True)
    values = np.zeros((len(unique), made.shape[1]), np.float32)
    np.add.at(values, groups, np.concatenate([*(block.values for block in own), made]))
    others = [block for block in blocks if block.kind != "sketch"]
    return [*others, Block("sketch", unique.astype(np.int32), values)]


def _read_number(row: Any) -> float:
    """Give back the one number that a row was measured of."""
    if derive(row, "posinf")[0]:
        return float("inf")
    return float("-inf") if derive(row, "neginf")[0] else float(derive(row, "mean")[0])
