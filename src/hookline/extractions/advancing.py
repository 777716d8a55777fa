"""What an extraction tells of itself: before, meanwhile and after."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hookline.stores import Store, open_store

_STEPS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(slots=True)
class Advance:
    """How far an extraction is."""

    samples: int = 0
    """Samples that went through the model, those that were there before not counted."""

    total: int | None = None
    """How many there are to do; None where that is not known."""

    bytes: int = 0
    """Bytes of their rows."""

    seconds: float = 0.0
    """Since it began."""

    batch: int = 0
    """How many samples go through the model at once."""

    before: int = 0
    """Samples that the store held already."""

    begun: float = field(default_factory=time.perf_counter)
    """When it began, by the clock of this process."""

    @property
    def rate(self) -> float:
        """Samples in a second."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def left(self) -> float | None:
        """Seconds that it will take still; None where that is not known."""
        if self.total is None or not self.rate:
            return None
        return max(self.total - self.samples, 0) / self.rate


@dataclass(slots=True)
class Estimate:
    """What an extraction will take."""

    samples: int | None
    """How many samples there are to do; None where that is not known."""

    columns: dict[str, float]
    """By column, how many bytes a sample takes."""

    seconds: float
    """How long a sample took in the model, on a few of them."""

    free: int | None
    """How many bytes the disk has; None where that cannot be asked."""

    before: int = 0
    """Samples that the store holds already."""

    @property
    def each(self) -> float:
        """Bytes of one sample."""
        return sum(self.columns.values())

    @property
    def bytes(self) -> int | None:
        """Bytes of all that is to do."""
        return None if self.samples is None else round(self.samples * self.each)

    def __str__(self) -> str:
        lines = [f"{name}: {show_bytes(size)} a sample" for name, size in self.columns.items()]
        if self.samples is None:
            lines.append(f"how many samples there are is not known; {self.seconds:.3g} s each")
        else:
            assert self.bytes is not None
            took = show_seconds(self.samples * self.seconds)
            lines.append(
                f"{self.samples:,} samples to do, {show_bytes(self.bytes)} to write, about {took}"
            )
        if self.before:
            lines.append(f"{self.before:,} samples are in the store already")
        if self.free is not None:
            is_short = self.bytes is not None and self.bytes > self.free
            lines.append(f"{show_bytes(self.free)} are free{', too few' if is_short else ''}")
        return "\n".join(lines)


@dataclass(slots=True)
class Extraction:
    """What an extraction did."""

    out: str
    """Where the store is."""

    advance: Advance
    """How much it was and how long it took."""

    failed: dict[int, str] = field(default_factory=dict)
    """By number, the samples that were skipped, and why."""

    estimate: Estimate | None = None
    """What it will take; of a dry run alone."""

    def open(self) -> Store:
        """Open the store."""
        return open_store(self.out)

    def __str__(self) -> str:
        if self.estimate is not None:
            return str(self.estimate)
        done = self.advance
        text = f"{done.samples:,} samples, {show_bytes(done.bytes)}, {done.rate:,.1f} samples/s"
        text += f"; {done.before:,} were there before" if done.before else ""
        text += f"; {len(self.failed):,} skipped" if self.failed else ""
        return f"{text}: {self.out}"


def show_bytes(size: float) -> str:
    """Write a number of bytes so that it can be read."""
    for step in _STEPS:
        if size < 1024 or step == _STEPS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {step}" if step == "B" else f"{size:.3g} {step}"


def show_seconds(seconds: float) -> str:
    """Write a time so that it can be read."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, _ = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min"
    days, hours = divmod(hours, 24)
    return f"{hours} h {minutes:02d} min" if not days else f"{days} d {hours} h"
