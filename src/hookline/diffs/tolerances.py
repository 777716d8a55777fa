"""How far two values may be apart and still be called the same: every constant of the verdict.

A limit is the user's, or ten times the floor that was measured at the site, or else a table by the
precision that the value was made with. What a value was made with is not only its own dtype: what
has once gone through bfloat16 stays that coarse. Knows no models.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hookline.addresses.pattern import compile_path, is_regex, read_path, unescape
from hookline.diffs.traces import Trace, TraceSite

if TYPE_CHECKING:
    import numpy.typing as npt

    from hookline.diffs.phases import Pair

    Floats = npt.NDArray[np.float64]

EXACT, FLOAT64, FLOAT32, FLOAT16, TF32, BFLOAT16, FLOAT8 = range(7)
"""Precisions from the finest to the coarsest; whole numbers and flags are exact."""

TABLE = (0.0, 1e-12, 2e-5, 2.5e-3, 5e-3, 2e-2, 2e-1)
"""The limit of each precision where no floor was measured."""

UNITS = (0.0, 2.0**-53, 2.0**-24, 2.0**-11, 2.0**-11, 2.0**-8, 2.0**-4)
"""The unit round-off of each precision."""

TIMES_FLOOR = 10.0
"""A difference is one where it is more than this many times the floor."""

FAR = 1.0
"""But not more than this, or than the floor and a half: values with nothing in common are that far
apart."""

LEAST_UNITS = 10.0
"""And more than this many units of round-off, however small the floor."""

TELLING_UNITS = 12.0
"""With another sign of a difference, such as another setting, this many units are enough."""

TELLING_FLOORS = 1.2
"""And, where the floor was measured, this many times that."""

SUDDEN_UNITS = 40.0
"""What is made of bits that are the same on both sides differs by rounding inside one module alone:
by less than this many units, times what the module makes of rounding."""

SUDDEN_LEAF_UNITS = 30.0
"""The same of a module that calls no other, where no floor was measured."""

SLOW_LIMITS = 3.0
"""What nowhere grows at once may be this many limits of the table, where no floor was measured."""

USUAL_UNITS = 4.0
"""What rounding alone usually leaves at one site; what a gain is measured against."""

TELLING_GAIN = 8.0
"""A module that makes a difference this much larger than what it was given has introduced it."""

NOISE_UNITS = 16.0
"""A parameter's gradient may be off by this many units of what is summed up in it."""

CANCELLING_UNITS = 32.0
"""A sum that cancels may be off by this many units of what was summed."""

CANCELLED = 1e-4
"""What is smaller than this share of what it was made of has cancelled."""

UPDATE_ROOT = 5.0
"""Adaptive optimizers turn an error r of a gradient into one of about sqrt(r) of the update."""

WEIGHT_UNITS = 4.0
"""An update is read off a weight, and may be off by this many units of the weight."""

_BY_NAME = {
    "float64": FLOAT64,
    "complex128": FLOAT64,
    "float32": FLOAT32,
    "complex64": FLOAT32,
    "float16": FLOAT16,
    "half": FLOAT16,
    "complex32": FLOAT16,
    "bfloat16": BFLOAT16,
}


def read_precision(dtype: str) -> int:
    """Give the precision of a dtype; what is no floating-point number is exact."""
    name = dtype.removeprefix("torch.")
    return _BY_NAME.get(name, FLOAT8 if name.startswith(("float8", "float4")) else EXACT)


def unit_of(precision: int) -> float:
    """Give the unit round-off of a precision."""
    return UNITS[precision]


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Hold for each pair what it is measured against."""

    precisions: tuple[int, ...]
    """What it was made with, the coarser side."""

    units: Floats
    """The unit round-off of that."""

    floors: Floats
    """How far rounding alone moves it; NaN where that was not measured."""

    limits: Floats
    """What it may differ by."""

    is_given: npt.NDArray[np.bool_]
    """Whether the user gave the limit."""

    is_allowed: npt.NDArray[np.bool_]
    """Whether the user gave it to this site and not to all."""

    @property
    def usual(self) -> Floats:
        """What rounding alone leaves: the floor, or what is usual."""
        return np.where(np.isnan(self.floors), USUAL_UNITS * self.units, self.floors)


def set_limits(
    traces: tuple[Trace, Trace],
    pairs: Sequence[Pair],
    *,
    floors: Floats | None = None,
    allow: Mapping[str, float] | None = None,
    tolerance: float | None = None,
) -> Limits:
    """Find the limit of each pair; the pairs are in the order of execution."""
    precisions = _follow(traces, pairs, (0, 1))
    units = np.array([UNITS[one] for one in precisions])
    own_floors = np.full(len(pairs), np.nan)
    if floors is not None:
        alone = _follow(traces, pairs, (0,))
        for place, pair in enumerate(pairs):
            # Measured with the rounding of the first side; the other may round more coarsely.
            scale = units[place] / UNITS[alone[place]] if alone[place] else 1.0
            own_floors[place] = floors[pair.a.id] * max(1.0, scale)
    table = np.array([TABLE[one] for one in precisions])
    least = np.minimum(LEAST_UNITS * units, table)
    wide = np.minimum(TIMES_FLOOR * own_floors, np.maximum(FAR, 1.5 * own_floors))
    limits = np.where(np.isnan(own_floors), table, np.fmax(wide, least))
    is_exact = np.array([one == EXACT for one in precisions], bool)
    limits = np.where(is_exact, 0.0, limits)
    is_given, is_allowed = np.zeros(len(pairs), bool), np.zeros(len(pairs), bool)
    if tolerance is not None:
        limits = np.where(is_exact, limits, tolerance)
        is_given |= ~is_exact
    for pattern, allowed in (allow or {}).items():
        is_meant = _make_matcher(pattern)
        here = np.array([is_meant(pair.a) or is_meant(pair.b) for pair in pairs], bool)
        limits = np.where(here, allowed, limits)
        is_allowed |= here
    return Limits(tuple(precisions), units, own_floors, limits, is_given | is_allowed, is_allowed)


def find_unused(allow: Mapping[str, float] | None, pairs: Sequence[Pair]) -> list[str]:
    """List the patterns that name nothing."""
    found = []
    for pattern in allow or {}:
        is_meant = _make_matcher(pattern)
        if not any(is_meant(pair.a) or is_meant(pair.b) for pair in pairs):
            found.append(pattern)
    return found


def refuse_unknown(patterns: Iterable[str], traces: tuple[Trace, Trace]) -> None:
    """Refuse a pattern that names no site of either side: it is misspelt."""
    sites = [site for trace in traces for site in trace.sites]
    for pattern in patterns:
        if any(map(_make_matcher(pattern), sites)):
            continue
        known = dict.fromkeys(name for site in sites for name in (site.module, site.address))
        near = difflib.get_close_matches(pattern, [name for name in known if name], 3, 0.5)
        meant = f" Nearest are: {', '.join(f'`{one}`' for one in near)}." if near else ""
        raise ValueError(f"`{pattern}` in allow= names no site of either side.{meant}")


def _make_matcher(pattern: str) -> Callable[[TraceSite], bool]:
    """Give what tells whether a pattern means a site: its module, a parameter, or its address."""
    if is_regex(pattern):
        matches = compile_path(pattern)
        return lambda site: bool(matches(site.module) or matches(site.address))
    path = read_path(pattern).text
    rest = pattern[len(path) :]
    matches = compile_path(path)

    def is_meant(site: TraceSite) -> bool:
        if pattern == site.address:
            return True
        own, end = _split(site.address)
        if rest and not end.startswith(rest):
            return False
        return bool(matches(site.module) or matches(unescape(own)))

    return is_meant


@functools.lru_cache(maxsize=16384)
def _split(address: str) -> tuple[str, str]:
    """Split an address into its path and what follows."""
    path = read_path(address).text
    return path, address[len(path) :]


def _follow(traces: tuple[Trace, Trace], pairs: Sequence[Pair], sides: Sequence[int]) -> list[int]:
    """Follow the coarsest precision through the pairs, as some sides make it.

    Autocast, parameters and inputs of the model coarsen what comes after them. A value that is
    coarser on one side alone, without any of these, was cast where it should not have been.
    """
    weights = [_find_weights(traces[side]) for side in sides]
    running = max(map(_find_start, (traces[side] for side in sides)), default=EXACT)
    found = []
    for pair in pairs:
        sites = [(pair.a, pair.b)[side] for side in sides]
        dtypes = [read_precision(site.dtype) for site in sites]
        if pair.kind not in ("value", "gradient"):
            # Parameters do not pass their own precision on here: their modules' outputs do.
            own = max(dtypes)
            late = pair.kind not in ("parameter", "buffer")
            found.append(max(own, running) if late and own else own)
            continue
        shared = min(dtypes)
        if pair.kind == "value" and shared:
            for place, site in enumerate(sites):
                maker = site.module if site.port == "output" else site.caller
                running = max(running, weights[place].get(maker or "", EXACT))
                if cast := site.more.get("autocast"):
                    running = max(running, read_precision(cast))
            running = max(running, shared)
        # A number on one side and a whole number on the other are compared as numbers.
        own = shared or max(dtypes)
        found.append(max(running, own) if own else EXACT)
    return found


def _find_start(trace: Trace) -> int:
    """Find what is coarse from the beginning on: autocast, TF32 and the model's own inputs."""
    start = read_precision(trace.facts.autocast) if trace.facts.autocast else EXACT
    if trace.facts.has_tf32 and any(site.dtype == "float32" for site in trace.sites):
        start = max(start, TF32)
    inputs = [
        read_precision(site.dtype)
        for site in trace.sites
        if site.kind == "value" and site.port == "input" and not site.module
    ]
    return max([start, *inputs])


def _find_weights(trace: Trace) -> dict[str, int]:
    """Find the coarsest parameter of each module."""
    found: dict[str, int] = {}
    for site in trace.sites:
        if site.kind == "parameter":
            own = read_precision(site.dtype)
            found[site.module] = max(found.get(site.module, EXACT), own)
    return found
