"""`run.plot`: figures of a run for notebooks and papers, by matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hookline._tables import import_optional
from hookline.runs.directory import Where
from hookline.runs.measures import MEASURES
from hookline.runs.series import Series, StatMap
from hookline.runs.step_sources import Flags

if TYPE_CHECKING:
    from hookline.runs.history import History

_MOST_LABELS = 40
_BAD = "#e0115f"
_NOT_FINITE = ("nan", "posinf")
"""What is marked in a map; masks are full of -inf, and right."""

_WIDE_RANGE = 30
"""Where the largest is so many times the smallest, an axis is logarithmic unless one says."""


def plot_history(
    history: History,
    what: str | Sequence[str],
    stat: str = "rms",
    *,
    where: Where = None,
    kind: str | Iterable[str] | None = None,
    rank: int | None = None,
    log: bool | None = None,
    ax: Any = None,
) -> Any:
    """Draw a map of a statistic, the series of sites, or a number of the steps."""
    names = [what] if isinstance(what, str) else list(what)
    if len(names) == 1 and names[0] in MEASURES:
        chosen = ("value" if where is None else None) if kind is None else kind
        found = history.maps([names[0], *_NOT_FINITE], where=where, kind=chosen, rank=rank)
        is_bad = np.logical_or.reduce([found[one].values > 0 for one in _NOT_FINITE])
        return _draw_map(found[names[0]], names[0], is_bad=is_bad, log=log, ax=ax)
    series: list[Series] = []
    for name in names:
        if name in history.scalars:
            series.append(history.scalar(name, rank=rank))
        elif any(letter in name for letter in "*?["):
            addresses = [str(site["site"]) for site in history.sites(name, kind or "value")]
            series += [history.series(one, stat, rank=rank) for one in addresses]
        else:
            series.append(history.series(name, stat, rank=rank))
    return _draw_lines(series, log=log, ax=ax)


def _make_axes(ax: Any, size: tuple[float, float]) -> tuple[Any, Any]:
    """Give a figure with axes: those that were given, or new ones."""
    if ax is not None:
        return ax.figure, ax
    pyplot = import_optional("matplotlib.pyplot", extra="plot")
    figure, ax = pyplot.subplots(figsize=size, layout="constrained")
    # A notebook shows what a cell gives; left open, pyplot would show it there once more.
    pyplot.close(figure)
    return figure, ax


def _draw_lines(series: Sequence[Series], *, log: bool | None, ax: Any) -> Any:
    figure, ax = _make_axes(ax, (8, 3.5))
    for one in series:
        is_there = ~np.isnan(one.values)
        name = f"{one.address} {one.stat}".strip()
        ax.plot(one.steps[is_there], one.values[is_there], label=name, linewidth=1.3)
    every = np.concatenate([one.values for one in series]) if series else np.zeros(0)
    if _is_log(every, log):
        ax.set_yscale("log")
    ax.set_xlabel("step")
    stats = {one.stat for one in series}
    if len(stats) == 1:
        ax.set_ylabel(next(iter(stats)))
    if len(series) == 1 and series[0].address:
        ax.set_title(series[0].address, loc="left", fontsize="medium")
    elif len(series) > 1:
        ax.legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_map(found: StatMap, stat: str, *, is_bad: Flags, log: bool | None, ax: Any) -> Any:
    """Draw a heat map; a cell with something that is not finite has a colour of its own."""
    matplotlib = import_optional("matplotlib", extra="plot")
    rows = max(1, len(found.addresses))
    figure, ax = _make_axes(ax, (9, min(12.0, 1.2 + 0.16 * rows)))
    values = np.where(np.isinf(found.values), np.nan, found.values)
    colours = import_optional("matplotlib.colors", extra="plot")
    positive = values[values > 0]
    is_log = _is_log(values, log) and positive.size > 0
    norm = colours.LogNorm(positive.min(), positive.max()) if is_log else colours.Normalize()
    shades = matplotlib.colormaps["viridis"].with_extremes(under="#d9d9d9")
    # Edges and not centres: the steps of a run need not be one apart.
    edges = _find_edges(found.steps)
    mesh = ax.pcolormesh(
        edges, np.arange(rows + 1), values, norm=norm, cmap=shades, rasterized=True
    )
    if is_bad.any():
        bad = np.ma.masked_where(~is_bad, np.ones(is_bad.shape))
        only = colours.ListedColormap([_BAD])
        ax.pcolormesh(edges, np.arange(rows + 1), bad, cmap=only, rasterized=True)
        patch = import_optional("matplotlib.patches", extra="plot").Patch
        ax.legend(
            handles=[patch(color=_BAD, label="NaN or Inf")],
            loc="lower left",
            frameon=False,
            bbox_to_anchor=(0, 1),
            borderaxespad=0.2,
            fontsize="small",
        )
    stride = -(-rows // _MOST_LABELS)
    ax.set_yticks(
        np.arange(0, len(found.addresses), stride) + 0.5,
        found.addresses[::stride],
        fontsize="x-small",
    )
    ax.invert_yaxis()
    ax.set_xlabel("step")
    figure.colorbar(mesh, ax=ax, label=stat)
    return figure


def _find_edges(steps: Any) -> Any:
    if not len(steps):
        return np.array([0.0, 1.0])
    middles = (steps[1:] + steps[:-1]) / 2
    first = steps[0] - (middles[0] - steps[0] if len(middles) else 0.5)
    last = steps[-1] + (steps[-1] - middles[-1] if len(middles) else 0.5)
    return np.concatenate([[first], middles, [last]])


def _is_log(values: Any, wanted: bool | None) -> bool:
    """Tell whether an axis is logarithmic: as one says, or where the numbers are far apart."""
    if wanted is not None:
        return wanted
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    if not positive.size or (finite < 0).any():
        return False
    return bool(positive.max() > _WIDE_RANGE * positive.min())
