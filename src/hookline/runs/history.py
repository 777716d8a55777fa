"""Read steps by name: series, tables and maps, merged over ranks.

The same for a run on disk and for the last steps in memory: all it knows of them is that they are
sources of steps.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hookline._errors import NotRecorded
from hookline._tables import Table
from hookline.runs.directory import SiteDirectory, Where
from hookline.runs.measures import MEASURES, WHOLE, blocks_for, compute, is_of_updates, merge
from hookline.runs.records import WIDTHS, SiteFacts
from hookline.runs.series import HistogramMap, Series, StatMap
from hookline.runs.step_sources import Array, Flags, Floats, Integers, StepIndex, StepSource

_AT_ONCE = 4_000_000
"""How many numbers are held at once while many steps are read."""

OF_STEPS = ("time", "seconds")
"""The numbers that every step has; no others can have these names."""


class History(ABC):
    """Read what was measured over steps."""

    @abstractmethod
    def _sources(self) -> Sequence[StepSource]:
        """List where steps are read from, one for each rank."""

    @property
    def steps(self) -> Integers:
        """The numbers of all steps that are there now."""
        return _unite([source.index() for source in self._sources()])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have written something."""
        return tuple(source.rank for source in self._sources())

    @property
    def scalars(self) -> tuple[str, ...]:
        """The numbers of steps that `scalar` reads."""
        names: dict[str, None] = {}
        for source in self._sources():
            names.update(dict.fromkeys(source.scalars(source.index().keys)))
        return tuple(dict.fromkeys((*names, *OF_STEPS)))

    def sites(self, where: Where = None, kind: str | Iterable[str] | None = None) -> Table:
        """List the sites, or those that an address or pattern means."""
        rows = []
        for site in self.describe_sites(where, kind):
            shape = "x".join(map(str, site.shape))
            rows.append((site.address, site.kind, site.type, shape, site.dtype, site.source))
        return Table(("site", "kind", "type", "shape", "dtype", "source"), rows)

    def describe_sites(
        self, where: Where = None, kind: str | Iterable[str] | None = None
    ) -> list[SiteFacts]:
        """Give all that is known of the sites, or of those that an address or pattern means."""
        directory = SiteDirectory(self._sources())
        return [directory.facts[number] for number in directory.select(where, kind)]

    def site(self, address: str) -> SiteFacts:
        """Give what is known of one site."""
        directory = SiteDirectory(self._sources())
        return directory.facts[directory.find(address)]

    def source(self, address: str) -> str:
        """Say where the module of a site comes from: `model.py:48`; empty where not known."""
        return self.site(address).source

    def series(self, site: str, stat: str = "rms", *, rank: int | None = None) -> Series:
        """Read one statistic of one site over all steps; of all ranks together unless one is given.

        At a step that a rank has not written, the others are merged.
        """
        view = _View(self._sources(), rank)
        number = view.directory.find(site)
        facts = view.directory.facts[number]
        _check_stat(stat)
        if is_of_updates(stat) and facts.kind != "update":
            own = f"{facts.address}:update"
            nearest = f" Nearest: `{own}`." if own in view.directory else ""
            raise NotRecorded(
                f"`{stat}` is measured of updates, and `{facts.address}` is a {facts.kind}."
                f"{nearest} List the updates with `run.sites(kind='update')`."
            )
        values = view.measure([stat], view.steps, np.array([number]))[0][stat]
        return Series(facts.address, stat, view.steps, values[:, 0])

    def map(
        self,
        stat: str = "rms",
        *,
        where: Where = None,
        kind: str | Iterable[str] | None = None,
        rank: int | None = None,
    ) -> StatMap:
        """Read one statistic of many sites over all steps."""
        return self.maps([stat], where=where, kind=kind, rank=rank)[stat]

    def maps(
        self,
        stats: Sequence[str],
        steps: Integers | None = None,
        *,
        where: Where = None,
        kind: str | Iterable[str] | None = None,
        rank: int | None = None,
    ) -> dict[str, StatMap]:
        """Read several statistics of many sites at once, over all steps or some of `run.steps`."""
        for stat in stats:
            _check_stat(stat)
        view = _View(self._sources(), rank)
        sites = view.directory.select(where, kind)
        chosen = view.steps if steps is None else steps
        measured, _ = view.measure(stats, chosen, sites)
        addresses = [view.directory.facts[one].address for one in sites]
        return {stat: StatMap(chosen, addresses, values.T) for stat, values in measured.items()}

    def table(
        self,
        step: int = -1,
        stats: Sequence[str] = ("rms", "mean", "std", "absmax", "nan", "inf"),
        *,
        where: Where = None,
        kind: str | Iterable[str] | None = None,
        rank: int | None = None,
    ) -> Table:
        """Read statistics of all sites at one step: its number, or -1 for the last, -2 and so on.

        Sites that were not measured at that step are left out.
        """
        stats = [stats] if isinstance(stats, str) else list(stats)
        for stat in stats:
            _check_stat(stat)
        view = _View(self._sources(), rank)
        number = _find_step(view.steps, step)
        sites = view.directory.select(where, kind)
        measured, is_there = view.measure(stats, np.array([number]), sites)
        rows = []
        for place in np.flatnonzero(is_there[0]):
            facts = view.directory.facts[sites[place]]
            cells = [_to_cell(stat, measured[stat][0, place], facts) for stat in stats]
            rows.append((facts.address, facts.type, *cells))
        left_out = len(sites) - len(rows)
        notes = [f"{left_out} more sites were not measured at this step"] if left_out else []
        return Table(("site", "type", *stats), rows, title=f"step {number}", notes=notes)

    def plot(self, what: str | Sequence[str] = "rms", stat: str = "rms", **options: Any) -> Any:
        """Draw a matplotlib figure of a statistic, a site, or a number of the steps.

            run.plot("rms")                           a map of all values over steps
            run.plot("rms", kind="gradient")          of their gradients; where= chooses sites
            run.plot("layers.3.mlp", "absmax")        one site over steps; a list or a pattern too
            run.plot("loss")                          a number of the steps

        `log` makes the scale logarithmic or linear where the default is wrong, `rank` reads one
        rank, `ax` draws into axes that are there. Needs `pip install "hookline[plot]"`.
        """
        from hookline.runs.plotting import plot_history

        return plot_history(self, what, stat, **options)

    def sketch(self, site: str, step: int = -1, *, rank: int = 0) -> Floats:
        """Read the 64 numbers of a site's sketch at one step; ranks see different elements."""
        return self._read_one("sketch", site, step, rank=rank)

    def histogram(self, site: str, step: int = -1, *, rank: int | None = None) -> Integers:
        """Read how many elements of a site have each of the 256 exponents at one step."""
        return self._read_one("histogram", site, step, rank=rank).astype(np.int64)

    def histograms(
        self,
        steps: Integers | None = None,
        *,
        where: Where = None,
        kind: str | Iterable[str] | None = None,
        rank: int | None = None,
    ) -> HistogramMap:
        """Read the exponents of many sites at once, over all steps or some of `run.steps`."""
        view = _View(self._sources(), rank)
        sites = view.directory.select(where, kind)
        chosen = view.steps if steps is None else steps
        counts, is_there = view.read("histogram", chosen, sites)
        addresses = [view.directory.facts[one].address for one in sites]
        return HistogramMap(chosen, addresses, counts.swapaxes(0, 1), is_there.T)

    def scalar(self, name: str, *, rank: int | None = None) -> Series:
        """Read a number of the steps themselves, such as `loss`; the mean over the ranks.

        `time` (in seconds since 1970) and `seconds` (how long a step took) are there always.
        """
        view = _View(self._sources(), rank)
        total, count = np.zeros(len(view.steps)), np.zeros(len(view.steps))
        names: dict[str, None] = {}
        for source, index in zip(view.sources, view.indexes, strict=True):
            found = dict(source.scalars(index.keys))
            everywhere = np.ones(len(index.steps), bool)
            found.update(time=(index.times, everywhere), seconds=(index.seconds, everywhere))
            names.update(dict.fromkeys(found))
            if name in found:
                values, is_there = found[name]
                at = np.searchsorted(view.steps, index.steps[is_there])
                # A NaN that a rank wrote stays: a loss that is NaN on one rank is no good mean.
                total[at] += values[is_there]
                count[at] += 1
        if name not in names:
            raise NotRecorded(
                f"no step has a number called {name!r}; there are {', '.join(names)}."
                f"{_suggest(name, names)} Statistics of sites are `run.series(site, stat)`."
            )
        with np.errstate(invalid="ignore"):
            return Series("", name, view.steps, total / count)

    def _read_one(self, kind: str, site: str, step: int, *, rank: int | None) -> Array:
        view = _View(self._sources(), rank)
        place = np.array([view.directory.find(site)])
        number = _find_step(view.steps, step)
        values, is_there = view.read(kind, np.array([number]), place)
        if not is_there[0, 0]:
            every = view.read(kind, view.steps, place)[1][:, 0]
            there = view.steps[every]
            have = f"the last step that has one is {there[-1]}" if len(there) else "no step has one"
            address = view.directory.facts[place[0]].address
            raise NotRecorded(f"`{address}` has no {kind} at step {number}; {have}.")
        return np.asarray(values[0, 0])


class _View:
    """The sources as they are at one moment, all of them or one rank."""

    def __init__(self, sources: Sequence[StepSource], rank: int | None) -> None:
        self.sources = [source for source in sources if rank is None or source.rank == rank]
        if rank is not None and not self.sources:
            ranks = ", ".join(str(source.rank) for source in sources) or "none"
            raise NotRecorded(f"there is no rank {rank}; there are {ranks}.")
        self.indexes = [source.index() for source in self.sources]
        self.steps = _unite(self.indexes)
        self.directory = SiteDirectory(self.sources)

    def measure(
        self, stats: Sequence[str], steps: Integers, sites: Integers
    ) -> tuple[dict[str, Floats], Flags]:
        """Compute statistics [steps, sites], and tell where there is anything to compute from."""
        kinds = dict.fromkeys(kind for stat in stats for kind in blocks_for(stat))
        found = {stat: np.full((len(steps), len(sites)), np.nan) for stat in stats}
        is_there = np.zeros((len(steps), len(sites)), bool)
        width = max(1, len(sites) * len(self.sources) * sum(WIDTHS[kind] for kind in kinds))
        stride = max(1, _AT_ONCE // width)
        for start in range(0, len(steps), stride):
            chosen = slice(start, start + stride)
            blocks = {kind: self.read(kind, steps[chosen], sites) for kind in kinds}
            for _, flags in blocks.values():
                is_there[chosen] |= flags
            for stat in stats:
                found[stat][chosen] = compute(stat, blocks)
        return found, is_there

    def read(self, kind: str, steps: Integers, sites: Integers) -> tuple[Array, Flags]:
        """Read one kind of block at some steps, merged over the ranks."""
        parts = []
        for source, index, places in zip(
            self.sources, self.indexes, self.directory.places, strict=True
        ):
            own = places[sites]
            is_there = np.isin(steps, index.steps)
            keys = index.keys[np.searchsorted(index.steps, steps[is_there])]
            values, flags = source.read(kind, keys, sites=own)
            if not is_there.all():
                values, flags = _spread(values, is_there), _spread(flags, is_there)
            parts.append((values, flags))
        if not parts:
            shape = (len(steps), len(sites))
            return np.zeros((*shape, WIDTHS[kind])), np.zeros(shape, bool)
        return merge(kind, parts)


def _spread(values: Array, is_there: Flags) -> Array:
    """Put the values of some steps among all of them."""
    spread = np.zeros((len(is_there), *values.shape[1:]), values.dtype)
    spread[is_there] = values
    return spread


def _unite(indexes: Sequence[StepIndex]) -> Integers:
    if len(indexes) == 1:
        return indexes[0].steps
    return np.unique(np.concatenate([np.empty(0, np.int64), *(one.steps for one in indexes)]))


def _find_step(steps: Integers, step: int) -> int:
    """Find a step by its number, or from the end."""
    if not len(steps):
        raise NotRecorded("there are no steps yet.")
    if -len(steps) <= step < 0:
        return int(steps[step])
    if step >= 0 and step in steps:
        return step
    near = steps[np.argsort(np.abs(steps - step), kind="stable")[:2]]
    raise NotRecorded(
        f"there is no step {step}; there are {len(steps)} from {steps[0]} to {steps[-1]}. "
        f"Nearest: {', '.join(map(str, sorted(near)))}. All of them are `run.steps`."
    )


def _check_stat(stat: str) -> None:
    if stat not in MEASURES:
        raise NotRecorded(
            f"`{stat}` is no statistic of a site.{_suggest(stat, MEASURES)} "
            f"There are {', '.join(MEASURES)}."
        )


def _suggest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f" Nearest: {', '.join(f'`{one}`' for one in near)}." if near else ""


def _to_cell(stat: str, value: float, facts: SiteFacts) -> float | int | None:
    if np.isnan(value) and (stat in WHOLE or (is_of_updates(stat) and facts.kind != "update")):
        return None
    return int(value) if stat in WHOLE else float(value)
