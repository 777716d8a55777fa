"""Blocks of numbers as bytes, and back.

Rows take 16 bytes a site: min, max, mean and std as float32, column by column. What that would
lose is kept beside it for the sites concerned: float64 where float32 does not hold the value, and
the counts of what is not finite. How many elements a site has is the same at most steps; it is
`shared`, so that whoever stores it can store it once. All numbers are little-endian.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hookline.runs.records import WIDTHS
from hookline.runs.step_sources import Array, Integers
from hookline.stats.rows import FINITE, M2, MAX, MEAN, MIN, NAN, NEGINF

_TINY = float(np.finfo(np.float32).tiny)
_IS_COMPRESSED = 0x80
_UNSIGNED = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_HEAD = 2 * 4

_NARROW = ("sketch", "units")
"""The kinds that float32 holds as they are."""


class Encoded(NamedTuple):
    """Hold the bytes of one block."""

    data: bytes
    """What differs from step to step."""

    shared: bytes | None = None
    """What is often the same in many steps."""

    rare: bytes | None = None
    """What most steps have none of."""


def pack_integers(values: Array) -> bytes:
    """Write whole numbers that are not negative in few bytes."""
    return _pack(np.ascontiguousarray(values).astype("<i8"))


def pack_shared(values: Array) -> bytes:
    """Do so for numbers that are likely to be those of the step before, for less then."""
    return _pack_known(np.ascontiguousarray(values).astype("<i8").tobytes())


@lru_cache(maxsize=64)
def _pack_known(raw: bytes) -> bytes:
    return _pack(np.frombuffer(raw, "<i8"))


def _pack(whole: Integers) -> bytes:
    top = int(whole.max(initial=0))
    size = next(size for size in _UNSIGNED if top < 1 << (8 * size))
    raw = whole.astype(_UNSIGNED[size]).tobytes()
    packed = zlib.compress(raw, 1)
    if len(packed) < len(raw):
        return bytes([size | _IS_COMPRESSED]) + packed
    return bytes([size]) + raw


def unpack_integers(data: bytes) -> Integers:
    """Read what `pack_integers` wrote, as one flat array."""
    if not data:
        raise ValueError("there are no bytes where numbers should be")
    raw = zlib.decompress(data[1:]) if data[0] & _IS_COMPRESSED else data[1:]
    return np.frombuffer(raw, _UNSIGNED[data[0] & ~_IS_COMPRESSED]).astype(np.int64)


def encode(kind: str, values: Array) -> Encoded:
    """Write the values of one block."""
    if kind == "rows":
        return _encode_rows(values)
    if kind in _NARROW:
        return Encoded(np.ascontiguousarray(values, "<f4").tobytes())
    if kind == "counts":
        return Encoded(pack_integers(values))
    if kind == "histogram":
        filled = np.flatnonzero(np.any(values, axis=0))
        low, high = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 0)
        return Encoded(bytes([low, high - 1 if high else 0]) + pack_integers(values[:, low:high]))
    norms = np.ascontiguousarray(values[:, 2], "<f8").tobytes()
    return Encoded(norms, shared=pack_shared(values[:, 0]), rare=pack_integers(values[:, 1]))


def decode(kind: str, blocks: Sequence[Encoded], count: int, *, at: Array) -> Array:
    """Read blocks of `count` sites each: the values of the sites at the places `at`.

    Gives [blocks, places, columns], as float32 for sketches and units, float64 for the rest.
    """
    if kind == "rows":
        return _decode_rows(blocks, count, at)
    if kind in _NARROW:
        width = WIDTHS[kind]
        joined = np.frombuffer(b"".join([block.data for block in blocks]), "<f4")
        return joined.reshape(len(blocks), count, width)[:, at]
    values = np.empty((len(blocks), len(at), WIDTHS[kind]))
    for place, block in enumerate(blocks):
        values[place] = _decode_one(kind, block, count)[at]
    return values


def _encode_rows(rows: Array) -> Encoded:
    rows = np.asarray(rows, dtype=np.float64)
    finite = rows[:, FINITE]
    totals = rows[:, : NEGINF + 1].sum(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        std = np.sqrt(rows[:, M2] / np.maximum(finite, 1))
        exact = np.stack([rows[:, MIN], rows[:, MAX], rows[:, MEAN], std])
        narrow = exact.astype("<f4")
        size = np.abs(exact[2:])
        lost = (narrow[:2] != exact[:2]) & ~np.isnan(exact[:2])
        lost |= (np.isinf(narrow[2:]) != np.isinf(size)) | ((size > 0) & (size < _TINY))
    wide = np.flatnonzero(lost.any(axis=0))
    odd = np.flatnonzero(totals != finite)
    rare = None
    if len(wide) or len(odd):
        rare = b"".join(
            [
                np.array([len(odd), len(wide)], "<u4").tobytes(),
                odd.astype("<u4").tobytes(),
                rows[odd, NAN : NEGINF + 1].astype("<i8").tobytes(),
                wide.astype("<u4").tobytes(),
                exact[:, wide].T.astype("<f8").tobytes(),
            ]
        )
    return Encoded(narrow.tobytes(), shared=pack_shared(totals), rare=rare)


def _decode_rows(blocks: Sequence[Encoded], count: int, at: Array) -> Array:
    joined = np.frombuffer(b"".join([block.data for block in blocks]), "<f4")
    parts = joined.reshape(len(blocks), 4, count)[:, :, at].astype(np.float64)
    rows = np.zeros((len(blocks), len(at), WIDTHS["rows"]))
    totals: dict[bytes | None, Array] = {}
    place_of = np.full(count, -1)
    place_of[at] = np.arange(len(at))
    for number, block in enumerate(blocks):
        if block.shared not in totals:
            totals[block.shared] = unpack_integers(block.shared or b"")[at]
        rows[number, :, FINITE] = totals[block.shared]
        if block.rare is not None:
            _add_rare(block.rare, place_of, rows[number], parts[number])
    rows[:, :, MIN], rows[:, :, MAX], rows[:, :, MEAN] = parts[:, 0], parts[:, 1], parts[:, 2]
    with np.errstate(over="ignore", invalid="ignore"):
        rows[:, :, M2] = np.where(
            rows[:, :, FINITE] > 0, parts[:, 3] * parts[:, 3] * rows[:, :, FINITE], 0
        )
    return rows


def _add_rare(rare: bytes, place_of: Array, rows: Array, parts: Array) -> None:
    """Put in what float32 does not hold, and the counts of what is not finite."""
    odd_count, wide_count = np.frombuffer(rare, "<u4", 2)
    start = _HEAD
    odd = np.frombuffer(rare, "<u4", odd_count, start)
    start += odd.nbytes
    counts = np.frombuffer(rare, "<i8", 3 * odd_count, start).reshape(-1, 3)
    start += counts.nbytes
    wide = np.frombuffer(rare, "<u4", wide_count, start)
    start += wide.nbytes
    exact = np.frombuffer(rare, "<f8", 4 * wide_count, start).reshape(-1, 4)

    places = place_of[odd]
    chosen = places >= 0
    rows[places[chosen], NAN : NEGINF + 1] = counts[chosen]
    rows[places[chosen], FINITE] -= counts[chosen].sum(axis=1)
    places = place_of[wide]
    chosen = places >= 0
    parts[:, places[chosen]] = exact[chosen].T


def _decode_one(kind: str, block: Encoded, count: int) -> Array:
    if kind == "counts":
        return unpack_integers(block.data).reshape(count, WIDTHS[kind])
    if kind == "histogram":
        low, high = block.data[0], block.data[1] + 1
        values = np.zeros((count, WIDTHS[kind]), dtype=np.int64)
        filled = unpack_integers(block.data[2:])
        if len(filled):
            values[:, low:high] = filled.reshape(count, high - low)
        return values
    return np.stack(
        [
            unpack_integers(block.shared or b"").astype(np.float64),
            unpack_integers(block.rare or b"").astype(np.float64),
            np.frombuffer(block.data, "<f8", count),
        ],
        axis=1,
    )
