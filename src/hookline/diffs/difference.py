"""What a comparison found: the first place where two runs differ, and every pair with its number.

A value that knows neither how it was found nor how it is shown; the views show it. What was found
later, such as the operation inside the module, is put in with `dataclasses.replace`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookline._errors import NoSuchSite
from hookline._tables import Table
from hookline.diffs.measuring import ErrorDetail, describe_error, split_number
from hookline.diffs.wording import write_sentence

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from hookline.diffs.matches import Match
    from hookline.diffs.traces import Trace

SCHEMA = 1
"""The version of what `to_dict` gives; grows with every change that a reader would misread."""

VERDICTS = ("agrees", "introduces", "inherits", "noise", "missing", "not compared")
"""What can be said of a pair.

agrees         within its limit
introduces     the first difference: what it was made of agrees
inherits       past its limit, after the first difference
noise          past its limit, but a sum that cancels and holds nothing but rounding, or rounding
               that grew slowly, or what comes of a difference that the user allowed
missing        there on one side alone, such as a gradient that never came
not compared   nothing was measured that could be compared
"""

COLUMNS = ("site", "site_b", "rule", "kind", "r", "limit", "floor", "r/limit", "verdict")


@dataclass(frozen=True, slots=True)
class PairResult:
    """Say how far apart the two sides of one pair are."""

    site: str
    """The address on the first side."""

    site_b: str
    """The address on the second side."""

    kind: str
    """What it is: one of `hookline.diffs.traces.KINDS`."""

    rule: str
    """By which rule the two were paired."""

    r: float | None
    """The relative error; None where nothing could be compared."""

    limit: float
    """What it may be."""

    floor: float | None
    """How far rounding alone moves it; None where that was not measured."""

    verdict: str
    """One of `VERDICTS`."""

    module: str = ""
    """The path of the module on the first side."""

    module_b: str = ""
    """The path of the module on the second side."""

    type: str = ""
    """The class of the module."""

    type_b: str = ""
    """The class of the module on the second side."""

    port: str = ""
    """`input`, `output`, `parameter` or `buffer`."""

    visit: int = 0
    """Which execution of the module in the step."""

    dtype: str = ""
    """The element type on the first side."""

    dtype_b: str = ""
    """The element type on the second side."""

    shape: tuple[int, ...] = ()
    """The shape on the first side."""

    shape_b: tuple[int, ...] = ()
    """The shape on the second side."""

    how: str = "same"
    """How the two were laid on one another: `same`, `concat`, `transposed`, `reshaped`."""

    measured: str = ""
    """What r is from: `tensor`, `sketch`, or `statistics`, which only bound it from below."""

    same_as: str = ""
    """The address of the site whose very tensor it is on the first side; empty: its own."""

    word: str = ""
    """What else there is to say: `no gradient there`."""

    match: Match | None = field(default=None, repr=False, compare=False)
    """The sites that were paired."""

    def to_dict(self) -> dict[str, Any]:
        """Give it as JSON can hold it."""
        found = {
            one.name: getattr(self, one.name)
            for one in dataclasses.fields(self)
            if one.name != "match"
        }
        for name in ("r", "limit", "floor"):
            found[name], found[f"{name}_word"] = split_number(found[name])
        found["shape"], found["shape_b"] = list(self.shape), list(self.shape_b)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Hold the relative error of every pair over the steps."""

    steps: tuple[int, ...]
    """The steps that both runs have."""

    r: npt.NDArray[np.float64]
    """The relative errors, [steps, pairs], in the order of `Difference.pairs`; NaN where none."""

    limits: npt.NDArray[np.float64]
    """What they may be, [steps, pairs]; wider where the weights have drifted already."""

    total: int = 0
    """How many steps either of the runs has."""


@dataclass(frozen=True, eq=False)
class Difference:
    """Two runs compared: whether they are the same, and if not, where they part first.

    `str(difference)` is the answer in one sentence; `difference.table()` has every pair.
    """

    same: bool
    """Whether no difference was found."""

    first: str | None = None
    """The path of the module that made the first difference, in the names of the first side."""

    first_b: str | None = None
    """Its path on the second side; None where it is not there."""

    site: str | None = None
    """The address of the first value that differs."""

    site_b: str | None = None
    """Its address on the second side."""

    direction: str | None = None
    """input, forward, backward, state, parameter gradient or update."""

    step: int | None = None
    """The step in which they part, or the first step that was compared."""

    visit: int = 0
    """Which execution of the module in that step."""

    introduced: float | None = None
    """The relative error at the site."""

    r_in: float = 0.0
    """The largest relative error of what the module was given."""

    floor: float | None = None
    """How far rounding alone moves the site; None where that was not measured."""

    limit: float = 0.0
    """What the site may differ by; where nothing differs, the usual limit."""

    gain: float | None = None
    """How much larger than what was given, or than rounding, the difference is."""

    agree_to: float = 0.0
    """The largest relative error before the site."""

    is_gradual: bool = False
    """Whether no place makes the difference: it grows little by little."""

    type: str = ""
    """The class of the blamed module."""

    type_b: str = ""
    """Its class on the second side."""

    is_own_code: bool = False
    """Whether the code of the module itself is to blame, between the modules that it calls."""

    before: str = ""
    """The module that this code calls next with the wrong value."""

    word: str = ""
    """What else there is to say of the site: `no gradient there`."""

    candidates: tuple[str, ...] = ()
    """Modules that may be to blame, the likeliest first; one where it is certain."""

    written: str = ""
    """The input that a candidate writes into, where that may be what is wrong."""

    operation: str | None = None
    """The operation inside the module: `blocks.5.attn/softmax`."""

    source: str = ""
    """Where the module, or the operation, is written."""

    source_b: str = ""
    """Where it is written on the second side."""

    causes: tuple[str, ...] = ()
    """What is set otherwise: `approximate='tanh' here, 'none' there`."""

    graft: Mapping[str, Any] | None = None
    """What running both modules on the same input says."""

    pairs: Sequence[PairResult] = field(default=(), repr=False)
    """Every pair in the order of execution."""

    alone_a: tuple[str, ...] = field(default=(), repr=False)
    """What only the first side has."""

    alone_b: tuple[str, ...] = field(default=(), repr=False)
    """What only the second side has."""

    names: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The paths of modules on the first side, and what they are called on the second."""

    notes: tuple[str, ...] = ()
    """What else is to be known: what is missing, what could not be compared."""

    titles: tuple[str, str] = ("A", "B")
    """What the two sides are called."""

    history: History | None = field(default=None, repr=False)
    """All steps; None where there is one."""

    traces: tuple[Trace, Trace] | None = field(default=None, repr=False)
    """What was compared, as long as it is there to look into."""

    steps: tuple[int, int] | None = None
    """The number of the compared step on each side."""

    def __str__(self) -> str:
        return self.sentence

    def __bool__(self) -> bool:
        """Refuse: `if hl.diff(a, b)` can be read either way."""
        raise TypeError("a Difference is neither true nor false: ask for `.same`")

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        return write_sentence(self)

    @property
    def differing(self) -> tuple[PairResult, ...]:
        """The pairs past their limits."""
        return tuple(
            pair for pair in self.pairs if pair.verdict in ("introduces", "inherits", "missing")
        )

    def table(self, kind: str | None = None, *, differing: bool = False) -> Table:
        """List the pairs in the order of execution, of one kind or those that differ."""
        chosen = self.differing if differing else self.pairs
        rows = [
            (
                _name(pair.site, pair.visit),
                _name(pair.site_b, pair.visit) if pair.site_b != pair.site else "",
                pair.rule,
                pair.kind,
                pair.r,
                pair.limit,
                pair.floor,
                _over_limit(pair),
                pair.verdict,
            )
            for pair in chosen
            if kind in (None, pair.kind)
        ]
        return Table(COLUMNS, rows, title=self.sentence, notes=self.notes)

    def find(self, address: str, *, visit: int | None = None) -> PairResult:
        """Find the pair of an address of either side; without a port it means the output."""
        for wanted in (address, f"{address}:output"):
            for pair in self.pairs:
                if wanted in (pair.site, pair.site_b) and visit in (None, pair.visit):
                    return pair
        raise NoSuchSite(
            f"`{address}` was not compared. List what was with `difference.table()`, and what has "
            "no counterpart with `difference.alone_a` and `difference.alone_b`."
        )

    def profile(self, address: str, *, visit: int | None = None) -> ErrorDetail | None:
        """Say in detail how a site differs, along each dimension; None without its tensors."""
        from hookline.diffs.gaps import read_tensors

        pair = self.find(address, visit=visit)
        if self.traces is None or self.steps is None or pair.match is None:
            return None
        tensors = read_tensors(self.traces, pair.match, self.steps)
        if tensors is None or tensors[0].numel() != tensors[1].numel():
            return None
        return describe_error(*tensors)

    def to_dict(self) -> dict[str, Any]:
        """Give all of it as JSON can hold it, under keys that stay."""
        found: dict[str, Any] = {"schema": SCHEMA, "sentence": self.sentence}
        for name in _PLAIN:
            found[name] = getattr(self, name)
        for name in _NUMBERS:
            found[name], found[f"{name}_word"] = split_number(getattr(self, name))
        for name in _LISTS:
            found[name] = list(getattr(self, name))
        found["graft"] = None if self.graft is None else to_plain(self.graft)
        found["pairs"] = [pair.to_dict() for pair in self.pairs]
        if self.history is not None:
            found["steps"] = list(self.history.steps)
        else:
            found["steps"] = [] if self.step is None else [self.step]
        return found


_PLAIN = (
    "same",
    "first",
    "first_b",
    "site",
    "site_b",
    "direction",
    "step",
    "visit",
    "is_gradual",
    "type",
    "type_b",
    "is_own_code",
    "before",
    "word",
    "operation",
    "source",
    "source_b",
)
_NUMBERS = ("introduced", "r_in", "floor", "limit", "gain", "agree_to")
_LISTS = ("candidates", "causes", "alone_a", "alone_b", "notes", "titles")


def to_plain(value: Any) -> Any:
    """Give a value as JSON can hold it; beside a number that is not finite stands its word."""
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, one in value.items():
            found[str(key)] = to_plain(one)
            if isinstance(one, float) and not math.isfinite(one):
                found[f"{key}_word"] = split_number(one)[1]
        return found
    if isinstance(value, (list, tuple)):
        return [to_plain(one) for one in value]
    if isinstance(value, float):
        return split_number(value)[0]
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def _name(address: str, visit: int) -> str:
    return f"{address} #{visit}" if visit else address


def _over_limit(pair: PairResult) -> float | None:
    if pair.r is None:
        return None
    if not pair.limit:
        return 0.0 if pair.r == 0 else float("inf")
    return pair.r / pair.limit
