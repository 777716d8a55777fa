"""What is off everywhere: a loss, a clip, a rate or another optimizer, and no module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hookline.diffs.gaps import Gaps
from hookline.diffs.phases import DIRECTIONS, PARAMETER_GRADIENT, UPDATE, Pair

_SHARE = 0.9
"""The share that must be off by the same factor."""
_MOST = 0.75
"""The share that must be off at all."""
_SPREAD = 0.01
"""How far the factors of single parameters may lie from the common one, relative."""
_REST = 0.05
"""What may be left of the difference once the factor is taken out, relative to it."""
_FEWEST = 2


def find_factor(
    pairs: Sequence[Pair], gaps: Gaps, phase: int, differs: Callable[[Pair], bool]
) -> str:
    """Say how all gradients, or all updates, are off; empty where only some are."""
    own = [pair for pair in pairs if pair.phase == phase and not pair.missing]
    own = [pair for pair in own if not pair.match.is_group and gaps.norms[pair.place] > 0]
    off = [pair for pair in own if differs(pair)]
    if len(off) < _FEWEST or len(off) < _MOST * len(own):
        return ""
    what = "gradient" if phase == PARAMETER_GRADIENT else DIRECTIONS[phase]
    common = _find_common(off, gaps, len(own))
    if common is not None:
        times = f"{common:.2f}" if abs(common) >= 0.1 else f"{common:.3g}"
        return f"every {what} is {times} times"
    # A gradient has its own module, but whatever changes nearly all updates has none.
    return f"{len(off)} of {len(own)} updates differ" if phase == UPDATE else ""


def _find_common(off: Sequence[Pair], gaps: Gaps, count: int) -> float | None:
    """Find the factor that nearly all of them are off by; None where there is none."""
    factors = []
    for pair in off:
        x = gaps.sizes[0].sketches[pair.a.id].astype(np.float64)
        y = gaps.sizes[1].sketches[pair.b.id].astype(np.float64)
        size = float(x @ x)
        if not np.isfinite(size) or not size or not np.isfinite(y).all():
            return None
        factor = float(x @ y) / size
        rest = float(np.linalg.norm(y - factor * x)) / np.sqrt(size)
        if rest > _REST * max(abs(factor - 1), 1e-6):
            continue
        factors.append(factor)
    if len(factors) < _SHARE * count:
        return None
    common = float(np.median(factors))
    if common == 0 or np.abs(np.array(factors) / common - 1).max() > _SPREAD:
        return None
    return common
