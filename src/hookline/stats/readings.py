"""How the kernels read each dtype: which bits mean what, how much at once, and how it is summed.

Knows no tensors of a log and launches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hookline.stats import shares

_NATIVE_FLOAT8 = (8, 9)
"""The first GPUs that convert float8 themselves."""

STRIDED_BLOCK = 1024
STRIDED_UNROLL = 4
_COLUMNS = (1024, 256, 64, 16, 4, 1)
_UNITS = (16, 4, 1)


@dataclass(frozen=True, slots=True)
class Reading:
    """How one dtype is read."""

    code: int
    """What its bits mean; see `shares`."""
    sums: int
    """What its sums need; see `shares`."""
    block: int = 1024
    """Numbers that a program reads at once."""
    group: int = 1
    """Of these, how many that follow each other are added up first."""
    unroll: int = 8
    """How many such reads are on their way together."""
    warps: int = 8
    """How many warps a program has."""
    programs: int = 2
    """How many programs keep one multiprocessor busy."""
    in_words: bool = False
    """Whether four of them are read as one word, where they are aligned."""
    is_viewed: bool = False
    """Whether Triton is given its bytes, because it does not know the dtype."""

    def constants(self, *, is_aligned: bool) -> dict[str, Any]:
        """Give what a kernel for numbers that lie side by side is compiled with."""
        return {
            "BLOCK": self.block,
            "GROUP": self.group,
            "UNROLL": self.unroll,
            "CODE": self.code,
            "SUMS": self.sums,
            "IN_WORDS": self.in_words and is_aligned,
        }

    def see(self, values: Tensor) -> Tensor:
        """Give the tensor that Triton is shown."""
        return values.view(torch.uint8) if self.is_viewed else values


def _code(name: str) -> int:
    return int(getattr(shares, name).value)


_PLAIN = _code("PLAIN")
_FEW, _NARROW, _SINGLE, _WIDE = (_code(one) for one in ("FEW", "NARROW", "SINGLE", "WIDE"))

_BYTES: dict[str, Any] = {"sums": _FEW, "block": 4096, "group": 4}
_WORDS: dict[str, Any] = {
    "sums": _FEW,
    "block": 8192,
    "group": 16,
    "unroll": 2,
    "warps": 16,
    "is_viewed": True,
    "in_words": True,
}
_HALVES: dict[str, Any] = {"block": 2048, "group": 2, "unroll": 4}
_READINGS = {
    torch.bool: Reading(_PLAIN, is_viewed=True, **_BYTES),
    torch.int8: Reading(_PLAIN, **_BYTES),
    torch.uint8: Reading(_PLAIN, **_BYTES),
    torch.float8_e4m3fn: Reading(_code("E4M3"), **_WORDS),
    torch.float8_e5m2: Reading(_code("E5M2"), **_WORDS),
    torch.float8_e4m3fnuz: Reading(_code("E4M3_FNUZ"), is_viewed=True, **_BYTES),
    torch.float8_e5m2fnuz: Reading(_code("E5M2_FNUZ"), is_viewed=True, **_BYTES),
    torch.float8_e8m0fnu: Reading(_code("E8M0"), _WIDE, is_viewed=True),
    torch.bfloat16: Reading(_PLAIN, _NARROW, **_HALVES),
    torch.float16: Reading(_PLAIN, _NARROW, **_HALVES),
    torch.int16: Reading(_PLAIN, _NARROW),
    torch.uint16: Reading(_PLAIN, _NARROW),
    torch.float32: Reading(_PLAIN, _SINGLE, block=2048, group=4, unroll=4, warps=16),
    torch.float64: Reading(_PLAIN, _WIDE),
    torch.int32: Reading(_PLAIN, _WIDE),
    torch.uint32: Reading(_PLAIN, _WIDE),
    torch.int64: Reading(_PLAIN, _WIDE),
    torch.uint64: Reading(_PLAIN, _WIDE),
}
_OF_OTHER_GPUS = {
    torch.float8_e4m3fn: Reading(_code("E4M3_BITS"), is_viewed=True, **_BYTES),
    torch.float8_e5m2: Reading(_code("E5M2"), is_viewed=True, **_BYTES),
}

READABLE = frozenset(_READINGS)
"""Every dtype that is read as it is."""


@cache
def reading_of(dtype: torch.dtype, capability: tuple[int, int]) -> Reading:
    """Give how a GPU of this compute capability reads a dtype."""
    if dtype in _OF_OTHER_GPUS and (capability < _NATIVE_FLOAT8 or torch.version.hip is not None):
        return _OF_OTHER_GPUS[dtype]
    return _READINGS[dtype]


@cache
def tile_columns(inner: int) -> int:
    """Give how many numbers of a run a tile takes: many, but with few places left empty."""

    def waste(columns: int) -> float:
        return -(-inner // columns) * columns / inner

    return next((one for one in _COLUMNS if waste(one) <= 1.125), min(_COLUMNS, key=waste))


def unit_of(inner: int, step: int) -> int:
    """Give how many numbers can be read at once, as far as runs and steps tell."""
    return next(one for one in _UNITS if not inner % one and not step % one)
