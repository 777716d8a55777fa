"""Numbers of any size in few bytes: logarithms in steps of a fixed share of an octave.

The steps are small enough for three digits. What a browser reads is the same as what `unpack`
reads here, which is how the two are tested against each other.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from hookline.runs.step_sources import Floats

_MISSING, _ZERO, _NOT_FINITE, _FIRST = 0, 1, 2, 3
_STEPS_PER_OCTAVE = 512
_MOST = 65_535


@dataclass(frozen=True, slots=True)
class Packed:
    """Hold a table of numbers as bytes, with what is needed to read them."""

    data: bytes
    """The codes, compressed."""

    shape: tuple[int, int]
    """Rows and columns."""

    base: float
    """The binary logarithm of the smallest magnitude."""

    steps: float
    """How many codes an octave has."""

    is_signed: bool
    """Whether the lowest bit of a code is a sign."""

    def facts(self) -> dict[str, Any]:
        """Give what is needed to read the bytes."""
        rows, columns = self.shape
        return {
            "rows": rows,
            "columns": columns,
            "base": self.base,
            "steps": self.steps,
            "signed": self.is_signed,
        }


def pack(values: Floats) -> Packed:
    """Pack a table [rows, columns]; NaN means that there is no number, infinity that it has none.

    Along a row only the differences of codes are kept, low and high bytes apart: neighbours are
    alike, so that most high bytes are zero.
    """
    size = np.abs(values)
    is_number = np.isfinite(values) & (size > 0)
    is_signed = bool((values[is_number] < 0).any())
    exponents = np.log2(size, where=is_number, out=np.zeros(values.shape))
    base = float(np.floor(exponents[is_number].min())) if is_number.any() else 0.0
    reach = float(exponents[is_number].max()) - base if is_number.any() else 0.0
    room = (_MOST - _FIRST) // (2 if is_signed else 1) - 1
    steps = min(_STEPS_PER_OCTAVE, room / max(reach, 1.0))
    codes = np.round((exponents - base) * steps).astype(np.int64)
    if is_signed:
        codes = codes * 2 + (values < 0)
    codes += _FIRST
    codes[values == 0] = _ZERO
    codes[np.isinf(values)] = _NOT_FINITE
    codes[np.isnan(values)] = _MISSING
    folded = np.diff(codes, axis=1, prepend=0).astype(np.uint16)
    # A difference that is negative becomes odd, so that small ones of both signs stay small.
    signed = folded.view(np.int16).astype(np.int32)
    folded = ((signed << 1) ^ (signed >> 31)).astype(np.uint16)
    planes = np.stack([folded & 0xFF, folded >> 8]).astype(np.uint8)
    return Packed(zlib.compress(planes.tobytes(), 6), values.shape, base, steps, is_signed)


def unpack(packed: Packed) -> Floats:
    """Read what `pack` wrote, to three digits."""
    low, high = np.frombuffer(zlib.decompress(packed.data), np.uint8).reshape(2, *packed.shape)
    folded = low.astype(np.int64) | (high.astype(np.int64) << 8)
    codes = np.cumsum((folded >> 1) ^ -(folded & 1), axis=1) & 0xFFFF
    steps = codes - _FIRST
    sign = np.where(steps & 1, -1.0, 1.0) if packed.is_signed else 1.0
    found = sign * 2.0 ** (packed.base + (steps >> packed.is_signed) / packed.steps)
    found[codes == _ZERO] = 0.0
    found[codes == _NOT_FINITE] = np.inf
    found[codes == _MISSING] = np.nan
    return np.asarray(found)
