"""Find values and parameters that are one tensor on one side and several on the other.

A fused projection gives q, k and v in one tensor. Its weights say so: their statistics are those of
the pieces together. Where the parameters themselves are at hand, they also say in which order the
pieces lie, and whether they lie side by side at all and not head by head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from torch import Tensor

from hookline.diffs.fingerprints import Fingerprints, compare_rows
from hookline.diffs.kinds import find_family
from hookline.diffs.matches import Match
from hookline.diffs.ordering import find_gaps
from hookline.diffs.outlines import Outline
from hookline.diffs.partners import Shape, SitePairs, find_joint
from hookline.stats.rows import Rows, merge_rows

_MOST_PIECES = 4
_AGREES = 1e-2
_CUSTOMARY = "qkv"

# The class of transformers whose weight lies the other way round than that of nn.Linear.
_TURNED = "Conv1D"


@dataclass(frozen=True, slots=True)
class _Layout:
    """How pieces lie in a whole."""

    order: tuple[int, ...]
    how: str
    dim: int


class Joiner:
    """Look for wholes on one side and their pieces on the other."""

    def __init__(
        self,
        pairs: SitePairs,
        weights: tuple[Fingerprints, Fingerprints],
        steps: tuple[int, int],
        *,
        is_whole_a: bool,
    ) -> None:
        """Take what is matched, the weights and the steps of both; wholes are in A or in B."""
        self.pairs = pairs
        self.is_whole_a = is_whole_a
        first, second = (0, 1) if is_whole_a else (1, 0)
        self._weights = weights[first], weights[second]
        self._steps = steps[first], steps[second]
        matched = (pairs.by_a, pairs.by_b)
        self._matched = matched[first], matched[second]
        self.refused: list[str] = []
        """The modules whose pieces do not lie side by side."""

    def join_by_weights(self) -> None:
        """Match the outputs and parameters of modules with those of pieces of equal weights."""
        whole, parts = self._list_modules(0), self._list_modules(1)
        for count in range(2, _MOST_PIECES + 1):
            windows = [parts[i : i + count] for i in range(len(parts) - count + 1)]
            mains = [self._find_mains(0, [path])[0] for path in whole]
            others = [self._find_mains(1, window) for window in windows]
            for i, j in self._find_same(mains, others):
                self._join(whole[i], windows[j])

    def join_by_kind(self) -> None:
        """Match the outputs of modules with those of neighbours of a kind that add up to them."""
        whole, parts = self._list_modules(0), self._list_modules(1)
        gaps = self._find_gaps(whole, parts)
        for path in whole:
            near = [part for part in parts if gaps[1][part] == gaps[0][path]]
            for window in _slide(near):
                if self._fits(path, window):
                    self._join(path, window)
                    break

    def join_parameters(self) -> None:
        """Match parameters with the pieces they are cut into, by their statistics."""
        whole, parts = self._list_parameters(0), self._list_parameters(1)
        for count in range(2, _MOST_PIECES + 1):
            windows = [parts[i : i + count] for i in range(len(parts) - count + 1)]
            for i, j in self._find_same(whole, windows):
                layout = self._lay(whole[i], windows[j])
                if layout is not None:
                    self._add(whole[i], windows[j], layout)

    def _list_modules(self, side: int) -> list[str]:
        """List the modules with parameters whose output has no counterpart, as they ran."""
        weights, matched = self._weights[side], self._matched[side]
        outline = weights.outline
        return [
            path
            for path in outline.values
            if (output := _find_output(outline, path)) is not None
            and output not in matched
            and weights.find_main(path) is not None
        ]

    def _list_parameters(self, side: int) -> list[int]:
        outline, matched = self._weights[side].outline, self._matched[side]
        return [
            site
            for path in outline.slots
            for site in outline.parameters(path).values()
            if site not in matched
        ]

    def _find_mains(self, side: int, paths: Sequence[str]) -> list[int]:
        found = [self._weights[side].find_main(path) for path in paths]
        return [site for site in found if site is not None]

    def _find_same(
        self, whole: Sequence[int], windows: Sequence[Sequence[int]]
    ) -> list[tuple[int, int]]:
        """Find which wholes have the statistics of which pieces together."""
        if not whole or not windows:
            return []
        flat = [site for window in windows for site in window]
        groups = np.repeat(np.arange(len(windows)), [len(window) for window in windows])
        merged: Rows = merge_rows(self._weights[1].rows[flat], groups, len(windows))
        same = compare_rows(self._weights[0].rows[list(whole)], merged)
        return [(int(i), int(j)) for i, j in np.argwhere(same)]

    def _find_gaps(
        self, whole: Sequence[str], parts: Sequence[str]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Say between which matches the outputs of modules stand."""
        sites = [
            [_find_output(weights.outline, path) or 0 for path in paths]
            for weights, paths in zip(self._weights, (whole, parts), strict=True)
        ]
        ours, theirs = sites if self.is_whole_a else reversed(sites)
        found = find_gaps(self.pairs, ours, theirs)
        first, second = found if self.is_whole_a else found[::-1]
        return (
            dict(zip(whole, first.tolist(), strict=True)),
            dict(zip(parts, second.tolist(), strict=True)),
        )

    def _fits(self, path: str, window: Sequence[str]) -> bool:
        """Tell whether some modules may be the pieces of one: class, size of weights, output."""
        whole, parts = self._weights[0].outline, self._weights[1].outline
        families = {find_family(parts.types[one]) for one in window}
        if families != {find_family(whole.types[path])}:
            return False
        sizes = [parts.size(site) for site in self._find_mains(1, window)]
        dim = self._find_output_joint(path, window)
        last = len(whole.sites[_find_output(whole, path) or 0].shape) - 1
        return whole.size(self._find_mains(0, [path])[0]) == sum(sizes) and dim == last

    def _find_output_joint(self, path: str, window: Sequence[str], visit: int = 0) -> int | None:
        whole, parts = self._weights[0].outline, self._weights[1].outline
        output = _find_output(whole, path, visit)
        outputs = [_find_output(parts, one, visit) for one in window]
        shapes = [parts.sites[one].shape for one in outputs if one is not None]
        if output is None or len(shapes) < len(window):
            return None
        return find_joint(whole.sites[output].shape, shapes)

    def _join(self, path: str, window: Sequence[str]) -> None:
        """Match the outputs of a module, and its parameters, with those of its pieces."""
        whole, parts = self._weights[0].outline, self._weights[1].outline
        if self._find_output_joint(path, window) is None:
            return
        layout = self._lay(self._find_mains(0, [path])[0], self._find_mains(1, window))
        if layout is None:
            self.refused.append(path)
            return
        ordered = [window[place] for place in layout.order]
        for visit in range(whole.count_visits(path)):
            dim = self._find_output_joint(path, ordered, visit)
            output = _find_output(whole, path, visit)
            outputs = [_find_output(parts, one, visit) for one in ordered]
            if dim is not None and output is not None:
                pieces = [one for one in outputs if one is not None]
                self._add(output, pieces, _Layout(tuple(range(len(pieces))), "concat", dim))
        for name, site in whole.parameters(path).items():
            pieces = [
                parts.parameters(one)[name] for one in ordered if name in parts.parameters(one)
            ]
            ways = _find_ways(whole, site, parts, pieces) if len(pieces) == len(ordered) else []
            fitting = [way for way in ways if way[0] == layout.how] or ways
            if fitting:
                self._add(site, pieces, _Layout(tuple(range(len(pieces))), *fitting[0]))

    def _add(self, whole: int, parts: Sequence[int], layout: _Layout) -> None:
        one, several = (whole,), tuple(parts[place] for place in layout.order)
        a, b = (one, several) if self.is_whole_a else (several, one)
        self.pairs.add(Match(a, b, "order", layout.how, layout.dim))

    def _lay(self, whole: int, pieces: Sequence[int]) -> _Layout | None:
        """Find how pieces lie in a whole; None where they do not."""
        outline, others = self._weights[0].outline, self._weights[1].outline
        ways = _find_ways(outline, whole, others, pieces)
        if not ways:
            return None
        customary = _find_customary_order([others.sites[piece].module for piece in pieces])
        tensor = outline.trace.tensor(whole, self._steps[0])
        tensors = [others.trace.tensor(piece, self._steps[1]) for piece in pieces]
        if tensor is None or any(one is None for one in tensors):
            return _Layout(customary, *ways[0])
        known = [one for one in tensors if one is not None]
        best, most = None, 0
        for how, dim in ways:
            turned = tensor.T if how == "transposed" else tensor
            for order in permutations(customary):
                count = _count_agreeing(turned, [known[place] for place in order], dim)
                if count > most:
                    best, most = _Layout(order, how, dim), count
                if count == len(pieces):
                    return best
        return best


def _slide(paths: Sequence[str]) -> Iterator[Sequence[str]]:
    """Go through the neighbours, most at a time first."""
    for count in range(_MOST_PIECES, 1, -1):
        for start in range(len(paths) - count + 1):
            yield paths[start : start + count]


def _find_output(outline: Outline, path: str, visit: int = 0) -> int | None:
    return next(iter(outline.ends(path, "output", visit).values()), None)


def _find_ways(
    whole: Outline, site: int, parts: Outline, pieces: Sequence[int]
) -> list[tuple[str, int]]:
    """List how pieces can make up a whole by their shapes, the likeliest first."""
    shape: Shape = whole.sites[site].shape
    shapes = [parts.sites[piece].shape for piece in pieces]
    ways = []
    if (dim := find_joint(shape, shapes)) is not None:
        ways.append(("concat", dim))
    if len(shape) == 2 and (dim := find_joint(shape[::-1], shapes)) is not None:
        ways.append(("transposed", dim))
    # A linear layer's outputs are the rows of its weight; square pieces fit either way.
    is_turned = parts.sites[pieces[0]].type == _TURNED
    return sorted(ways, key=lambda way: way[1] != int(is_turned))


def _find_customary_order(paths: Sequence[str]) -> tuple[int, ...]:
    """Put q, k and v in this order; leave anything else as it ran."""
    letters = [path.rpartition(".")[2][:1].lower() for path in paths]
    if sorted(letters) == sorted(_CUSTOMARY):
        return tuple(letters.index(letter) for letter in _CUSTOMARY)
    return tuple(range(len(paths)))


def _count_agreeing(whole: Tensor, pieces: Sequence[Tensor], dim: int) -> int:
    """Count the pieces that are where they would be, put one after the other along `dim`."""
    count = start = 0
    for piece in pieces:
        cut = whole.narrow(dim, start, piece.shape[dim]).double()
        start += piece.shape[dim]
        count += bool((cut - piece.double()).norm() <= _AGREES * cut.norm())
    return count
