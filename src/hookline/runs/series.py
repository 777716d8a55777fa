"""What is read from a run: one statistic of one site over steps, and of many sites."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hookline._tables import format_number, import_optional
from hookline.runs.pictures import draw_line, draw_map
from hookline.runs.step_sources import Flags, Floats, Integers


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Series:
    """One number over steps: `steps, values = series`, or `numpy.asarray(series)`."""

    address: str
    """The site; empty for a number of the step itself, such as the loss."""

    stat: str
    """The name of the number."""

    steps: Integers
    """The steps of the run."""

    values: Floats
    """The number at each of them; NaN where it was not measured."""

    def __iter__(self) -> Iterator[Any]:
        yield self.steps
        yield self.values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.values, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        name = f"{self.address} {self.stat}".strip()
        is_there = ~np.isnan(self.values)
        if not is_there.any():
            return f"Series {name}: {len(self.steps)} steps, all NaN"
        steps, values = self.steps[is_there], self.values[is_there]
        facts = {"first": values[0], "last": values[-1], "min": values.min(), "max": values.max()}
        written = ", ".join(f"{fact} {format_number(value)}" for fact, value in facts.items())
        missing = len(self.steps) - len(steps)
        gaps = f", {missing} more are NaN" if missing else ""
        return f"Series {name}: {len(steps)} steps ({steps[0]} to {steps[-1]}){gaps}; {written}"

    def _repr_html_(self) -> str:
        """Draw it small, for a notebook."""
        return draw_line(self.steps, self.values, title=f"{self.address} {self.stat}".strip())

    def to_pandas(self) -> Any:
        """Give a pandas Series by step."""
        index = import_optional("pandas").Index(self.steps, name="step")
        name = f"{self.address} {self.stat}".strip()
        return import_optional("pandas").Series(self.values, index=index, name=name)

    def to_polars(self) -> Any:
        """Give a polars DataFrame of two columns, `step` and the statistic."""
        return import_optional("polars").DataFrame({"step": self.steps, self.stat: self.values})


class StatMap(NamedTuple):
    """One statistic of many sites over steps, for a heat map."""

    steps: Integers
    """The steps of the run."""

    addresses: list[str]
    """The sites, in the order in which they first ran."""

    values: Floats
    """The statistic [sites, steps]; NaN where it was not measured."""

    def _repr_html_(self) -> str:
        """Draw it small, for a notebook."""
        title = f"{len(self.addresses)} sites over {len(self.steps)} steps"
        return draw_map(self.values, title=title)


class HistogramMap(NamedTuple):
    """How many elements of many sites have each exponent, over steps."""

    steps: Integers
    """The steps."""

    addresses: list[str]
    """The sites, in the order in which they first ran."""

    counts: Floats
    """Elements [sites, steps, 256] by exponent; zeros in the first bin, what is not finite in the
    last."""

    is_there: Flags
    """Whether there is a histogram [sites, steps]; they are taken in few of the steps."""
