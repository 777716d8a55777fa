"""How alike two values of two traces are: their numbers, the weights behind them, their kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hookline.diffs.fingerprints import Fingerprints
from hookline.diffs.kinds import describe_parameters, find_family
from hookline.diffs.naming import ModulePairs
from hookline.diffs.partners import Shape, is_same_order
from hookline.diffs.traces import Measurements
from hookline.stats.rows import M2, derive

if TYPE_CHECKING:
    import numpy.typing as npt

    Codes = npt.NDArray[np.intp]
    Scores = npt.NDArray[np.float32]
    Truths = npt.NDArray[np.bool_]

T = TypeVar("T")

# What agrees in its numbers outweighs any likeness of kind, and so do equal weights.
_VALUE = 20.0
_CONSTANT_VALUE = 3.0
_WEIGHTS = 12.0
_WEIGHTS_BEHIND_INPUT = 4.0
_TYPE, _FAMILY = 2.0, 1.5
_PORT = _SHAPE = _PARAMETERS = 1.0
_NUMBER = _LAST_NAME = _ORDER_OF_SHAPE = 0.5
_SMALL = 0.25

_FAR = 0.3
"""The relative error from which on two values are no more alike than any two."""
_NEAR = 1e-2
"""The relative error up to which two values are one, whatever else differs."""


class Side:
    """Some values of one trace, and what is known of each."""

    def __init__(self, weights: Fingerprints, measured: Measurements, sites: Sequence[int]) -> None:
        self.weights = weights
        self.outline = weights.outline
        self.sites = [self.outline.sites[site] for site in sites]
        self.modules, self.module_of = _number([site.module for site in self.sites])
        self.shapes, self.shape_of = _number([site.shape for site in self.sites])
        self.is_output = np.array([site.port == "output" for site in self.sites], dtype=bool)
        rows = measured.rows[list(sites)]
        self.norms = np.nan_to_num(derive(rows, "l2"))
        self.is_constant = ~(rows[:, M2] > 0)
        self.sketches = np.nan_to_num(measured.sketches[list(sites)].astype(np.float64))

    def describe(self) -> Iterator[dict[str, object]]:
        """Say of each value what can be equal to another's; an empty text equals nothing."""
        for site in self.sites:
            numbers = [part for part in site.module.split(".") if part.isdecimal()]
            yield {
                "size": (self.outline.size(site.id), _find_dtype_family(site.dtype)),
                "type": site.type,
                "family": find_family(site.type),
                "parameters": describe_parameters(self.outline, site.module),
                "port": site.port,
                "number": numbers[0] if numbers else "",
                "last name": site.module.rpartition(".")[2],
                "leaf": site.leaf,
                "dtype": site.dtype,
                "visit": site.visit,
            }


class Scorer:
    """Score values of A against values of B."""

    def __init__(self, a: Side, b: Side, modules: ModulePairs, gaps: tuple[Codes, Codes]) -> None:
        """Take both sides, and for each value between which sure matches it stands."""
        self.a = a
        self.b = b
        self._gaps = gaps
        codes: dict[object, int] = {}
        self._codes_a = _encode(a.describe(), codes)
        self._codes_b = _encode(b.describe(), codes)
        self._weights = _compare_weights(a, b)
        self._has_weights: tuple[Truths, Truths] = (
            np.asarray(self._weights.any(axis=1)),
            np.asarray(self._weights.any(axis=0)),
        )
        self._shapes = _compare_shapes(a.shapes, b.shapes)
        self._can_be_one = _find_possible(a.modules, b.modules, modules)

    def score(self, rows: slice, *, only_strong: bool = False) -> Scores:
        """Score some values of A against all of B, [n, m]; 0 where two must not be matched."""
        a, b = self.a, self.b
        ours, theirs = a.module_of[rows], b.module_of
        port, can = self._same("port", rows), self._same("size", rows)
        both_outputs = a.is_output[rows, None] & b.is_output[None]

        errors = self._measure(rows)
        is_constant = a.is_constant[rows, None] | b.is_constant[None]
        closeness = np.clip(-np.log10(np.maximum(errors, 1e-9)) / 4, 0, 1)
        value = np.where(errors < _FAR, _VALUE * closeness, 0)
        value = np.where(is_constant, np.where(errors < _NEAR, _CONSTANT_VALUE, 0), value)
        is_value = (errors < _NEAR) & ~is_constant

        weights = self._weights[ours][:, theirs]
        is_weights = weights & both_outputs
        # A module whose weights are elsewhere on the other side is not this one.
        is_elsewhere = self._has_weights[0][ours, None] | self._has_weights[1][theirs][None]
        is_other = (is_elsewhere & both_outputs & ~weights) | ~self._can_be_one[ours][:, theirs]

        same_parameters = self._same("parameters", rows)
        is_family = self._same("family", rows) | same_parameters
        kind = np.where(self._same("type", rows), _TYPE, np.where(is_family, _FAMILY, 0))
        shape = self._shapes[a.shape_of[rows]][:, b.shape_of]
        is_strong = can & (is_value | (is_weights & (shape > 0)))
        if only_strong:
            is_allowed = is_strong & port & (kind > 0)
        else:
            is_near = self._gaps[0][rows, None] == self._gaps[1][None]
            is_alike = (kind > 0) & port & (shape > 0) & is_near & ~is_other
            is_allowed = is_strong | (can & is_alike)

        scores = value + kind + shape + _PORT * port + _PARAMETERS * same_parameters
        scores += np.where(is_weights, _WEIGHTS, _WEIGHTS_BEHIND_INPUT * (weights & port))
        scores += _NUMBER * self._same("number", rows) + _LAST_NAME * self._same("last name", rows)
        for name in ("leaf", "dtype", "visit"):
            scores += _SMALL * self._same(name, rows)
        return np.where(is_allowed, scores, 0).astype(np.float32)

    def _same(self, name: str, rows: slice) -> Truths:
        """Tell which two have the same of something."""
        ours, theirs = self._codes_a[name][rows, None], self._codes_b[name][None]
        found: Truths = (ours == theirs) & (ours >= 0)
        return found

    def _measure(self, rows: slice) -> npt.NDArray[np.float64]:
        """Estimate the relative error of each two from their sketches."""
        ours, theirs = self.a.sketches[rows], self.b.sketches
        squares = (ours**2).sum(1)[:, None] + (theirs**2).sum(1)[None] - 2 * ours @ theirs.T
        norms = np.maximum(self.a.norms[rows, None], self.b.norms[None])
        with np.errstate(invalid="ignore", divide="ignore"):
            errors = np.sqrt(np.maximum(squares, 0)) / norms
        return np.where(norms > 0, errors, np.inf)


def _find_dtype_family(dtype: str) -> str:
    families = ("float", "complex", "bool")
    return next((family for family in families if family in dtype), "integer")


def _number(things: Sequence[T]) -> tuple[list[T], Codes]:
    """Give the different ones, and of each thing which of them it is."""
    places = {thing: number for number, thing in enumerate(dict.fromkeys(things))}
    return list(places), np.array([places[thing] for thing in things], dtype=np.intp)


def _encode(facts: Iterable[dict[str, object]], codes: dict[object, int]) -> dict[str, Codes]:
    """Number facts, equal ones alike and an empty text -1."""
    found: dict[str, list[int]] = {}
    for fact in facts:
        for name, one in fact.items():
            code = -1 if one == "" else codes.setdefault((name, one), len(codes))
            found.setdefault(name, []).append(code)
    return {name: np.array(numbers, dtype=np.intp) for name, numbers in found.items()}


def _find_possible(ours: Sequence[str], theirs: Sequence[str], modules: ModulePairs) -> Truths:
    """Tell which modules can be one: both without a counterpart, or each other's."""
    is_free_a = np.array([path not in modules.forward for path in ours], dtype=bool)
    is_free_b = np.array([path not in modules.backward for path in theirs], dtype=bool)
    found: Truths = is_free_a[:, None] & is_free_b[None]
    places = {path: place for place, path in enumerate(theirs)}
    for i, path in enumerate(ours):
        if (other := modules.forward.get(path)) in places:
            found[i, places[other]] = True
    return found


def _compare_shapes(ours: Sequence[Shape], theirs: Sequence[Shape]) -> Scores:
    """Score shapes: equal, the same elements in the same order, or neither."""
    found = np.zeros((len(ours), len(theirs)), dtype=np.float32)
    for i, one in enumerate(ours):
        for j, other in enumerate(theirs):
            if one == other:
                found[i, j] = _SHAPE
            elif math.prod(one) == math.prod(other) and is_same_order(one, other):
                found[i, j] = _ORDER_OF_SHAPE
    return found


def _compare_weights(a: Side, b: Side) -> Truths:
    """Tell which modules have the same weights, where they are the only two that do."""
    found = np.zeros((len(a.modules), len(b.modules)), dtype=bool)
    main_a = {
        number: site
        for number, path in enumerate(a.modules)
        if (site := a.weights.find_main(path)) is not None
    }
    main_b = {
        number: site
        for number, path in enumerate(b.modules)
        if (site := b.weights.find_main(path)) is not None
    }
    if main_a and main_b:
        same = a.weights.compare(list(main_a.values()), b.weights, list(main_b.values()))
        is_only = (same.sum(1) == 1)[:, None] & (same.sum(0) == 1)[None]
        found[np.ix_(list(main_a), list(main_b))] = same & is_only
    return found
