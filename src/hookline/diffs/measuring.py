"""How far apart two tensors are: from the tensors themselves, or from what was measured of them.

The one number that decides is r = |x - y| / |x|, both norms summed in float64. It has no unit, it
sees a permutation, and it means the same for a gradient of 1e-9. The rest is for people to look
at. Knows no sites.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hookline.stats.rows import FINITE, M2, MAX, MEAN, MIN, NAN, NEGINF, derive

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from torch import Tensor

    Floats = npt.NDArray[np.float64]

SKETCH_SIGHT = 2e-7
"""Below this relative error a sketch, which is float32, sees nothing."""

_LEAST_SQUARE = 1e-150
"""The square of what is smaller is not to be relied on."""

_CHUNK = 1 << 20
"""How many elements are held in float64 at once."""

_MOST_ULPS = 1 << 22
"""How many elements the quantiles of ULPs are taken of at most."""

_BITS = {"torch.uint16": "int16", "torch.uint32": "int32", "torch.uint64": "int64"}
_CLOSE = 1e-3
_MOST_PROFILE = 4096
"""A longer profile is of no use to the eye."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Hold the distance of two tensors and the size of the first."""

    distance: float
    """The norm of their difference; infinite where NaN or infinities stand at other places."""

    norm: float
    """The norm of the first, of what is finite in both."""

    @property
    def r(self) -> float:
        """The relative error."""
        return divide(self.distance, self.norm)


def divide(distance: float, norm: float) -> float:
    """Give the relative error: 0 where there is no distance, infinite where there is no size."""
    if distance == 0:
        return 0.0
    return distance / norm if norm > 0 else math.inf


def relative_error(x: Tensor, y: Tensor) -> float:
    """Give |x - y| / |x| in float64; what is NaN or infinite alike in both is left out."""
    return measure_gap(x, y).r


def measure_gap(x: Tensor, y: Tensor) -> Gap:
    """Measure the distance of two tensors of as many elements, chunk by chunk."""
    if x.numel() != y.numel():
        return Gap(math.inf, 0.0)
    if _is_whole(x) and _is_whole(y):
        return _measure_whole(x, y)
    distance = norm = 0.0
    for a, b in _chunks(x, y):
        apart, size = _find_norm(a - b), _find_norm(a)
        if not (math.isfinite(apart) and math.isfinite(size)):
            # Only then is it looked at what is not finite: that costs more than the norms.
            known = _take_finite(a, b)
            if known is None:
                return Gap(math.inf, norm)
            apart, size = _find_norm(known[0] - known[1]), _find_norm(known[0])
        distance, norm = math.hypot(distance, apart), math.hypot(norm, size)
    return Gap(distance, norm)


def _is_whole(x: Tensor) -> bool:
    return not (x.dtype.is_floating_point or x.is_complex() or x.is_quantized)


def _measure_whole(x: Tensor, y: Tensor) -> Gap:
    """Measure the distance of whole numbers or flags: where one differs it is never zero."""
    import torch

    distance = norm = 0.0
    flat_x, flat_y = _flatten(x), _flatten(y)
    if flat_x.dtype != flat_y.dtype:  # all but the largest of uint64 fit
        flat_x, flat_y = flat_x.long(), flat_y.long()
    for start in range(0, len(flat_x), _CHUNK):
        a, b = flat_x[start : start + _CHUNK], flat_y[start : start + _CHUNK]
        # Of the wide unsigned ones torch knows little but their bits.
        bits = _BITS.get(str(a.dtype))
        is_other = (
            a != b if bits is None else a.view(getattr(torch, bits)) != b.view(getattr(torch, bits))
        )
        a, b = a.double(), b.double()
        # Those that float64 does not tell apart are one apart, or a few.
        apart = (a - b).abs().clamp(min=1.0) * is_other
        distance = math.hypot(distance, _find_norm(apart))
        norm = math.hypot(norm, _find_norm(a))
    return Gap(distance, norm)


def _find_norm(x: Tensor) -> float:
    """Give the norm, also where the squares leave the range of float64."""
    norm = float(x.norm())
    if _LEAST_SQUARE < norm < math.inf:
        return norm
    size = float(x.abs().max())
    return size * float((x / size).norm()) if 0 < size < math.inf else size


def _chunks(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Give both in float64, piece by piece."""
    import torch

    flat_x, flat_y = _flatten(x), _flatten(y)
    for start in range(0, len(flat_x), _CHUNK):
        piece = slice(start, start + _CHUNK)
        yield flat_x[piece].to(torch.float64), flat_y[piece].to(torch.float64)


def _take_finite(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Put zeros where both are NaN, or the same infinity; None: one of them is not."""
    import torch

    is_finite, is_finite_too = torch.isfinite(x), torch.isfinite(y)
    alike = (x == y) | (x.isnan() & y.isnan())
    if not bool((alike | (is_finite & is_finite_too)).all()):
        return None
    return torch.where(is_finite, x, 0.0), torch.where(is_finite_too, y, 0.0)


def _flatten(x: Tensor) -> Tensor:
    import torch

    x = x.detach()
    if x.layout is not torch.strided:
        x = x.to_dense()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x.cpu().reshape(-1)


def estimate_gaps(
    rows: tuple[Floats, Floats],
    sketches: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None,
    *,
    is_whole: npt.NDArray[np.bool_] | None = None,
) -> tuple[Floats, Floats]:
    """Estimate distances and norms of many pairs from statistics [..., 8] and sketches [..., 64].

    Statistics alone bound a distance from below: two tensors are at least as far apart as their
    means and spreads are. A sketch estimates it. NaN where there is neither. Of what `is_whole`,
    whole numbers, every difference counts, however small.
    """
    x, y = rows
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        norms = derive(x.reshape(-1, 8), "l2").reshape(x.shape[:-1])
        # Squares leave the range of float64 long before what is squared does.
        size = np.abs(x[..., MIN : MAX + 1]).max(axis=-1)
        is_lost = (norms < _LEAST_SQUARE) | np.isinf(norms)
        norms = np.where(is_lost & np.isfinite(size), size * np.sqrt(x[..., FINITE]), norms)
        means = np.sqrt(x[..., FINITE]) * (x[..., MEAN] - y[..., MEAN])
        spreads = np.sqrt(x[..., M2]) - np.sqrt(y[..., M2])
        bound = np.hypot(means, spreads)
        # Without a finite element the extremes are infinite on both sides.
        ends = np.abs(x[..., MIN : MAX + 1] - y[..., MIN : MAX + 1])
        ends = np.where(np.isnan(ends), 0, ends).max(axis=-1)
        # A run keeps means and spreads as float32, which cannot tell less than that; the extremes
        # of whole numbers are there to the last digit.
        is_seen = np.fmax(bound, ends) > SKETCH_SIGHT * norms
        bound = np.where(is_seen, np.fmax(bound, ends), 0)
        if is_whole is not None:
            bound = np.where(is_whole, np.fmax(bound, ends), bound)
        if sketches is not None:
            apart = sketches[0].astype(np.float64) - sketches[1]
            # Sums that float32 does not hold are infinite on both sides, and equal.
            apart = np.where(sketches[0] == sketches[1], 0, apart)
            seen = np.sqrt(np.square(apart).sum(axis=-1))
            bound = np.where(np.isnan(seen), bound, np.fmax(seen, bound))
    others = x[..., NAN : NEGINF + 1] != y[..., NAN : NEGINF + 1]
    bound = np.where(others.any(axis=-1), np.inf, bound)
    sizes = x[..., : NEGINF + 1].sum(axis=-1), y[..., : NEGINF + 1].sum(axis=-1)
    bound = np.where(sizes[0] != sizes[1], np.inf, bound)
    is_there = ~(np.isnan(x[..., 0]) | np.isnan(y[..., 0]))
    return np.where(is_there, bound, np.nan), np.where(is_there, norms, np.nan)


def divide_all(distances: Floats, norms: Floats) -> Floats:
    """Give the relative errors of many; NaN where nothing was measured."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        found = np.where(distances == 0, 0.0, distances / norms)
    found = np.where(np.isinf(distances), np.inf, found)
    return np.where(np.isnan(distances), np.nan, found)


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """Say in detail how two tensors differ, for people to look at."""

    r: float
    """The relative error, which alone decides."""

    cosine: float
    """The cosine of the angle between them."""

    largest: float
    """The largest error of an element."""

    where: tuple[int, ...]
    """Its coordinate."""

    values: tuple[float, float]
    """Both values there."""

    bias: float
    """The mean of y - x."""

    share_close: float
    """The share of elements within a thousandth of each other."""

    ulp_median: float
    """How many steps of the coarser dtype apart they are, at the median."""

    ulp_p99: float
    """And at the 99th percentile."""

    shape: tuple[int, ...] = ()
    """The shape of the first."""

    profile: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """By dimension, r of each index along it; long ones are taken together."""

    def to_dict(self) -> dict[str, Any]:
        """Give it as JSON can hold it: null, and beside it a word, for what is not finite."""
        found: dict[str, Any] = {"where": list(self.where), "shape": list(self.shape)}
        for name in _NUMBERS:
            found[name], found[f"{name}_word"] = split_number(getattr(self, name))
        values = [split_number(one) for one in self.values]
        found["values"], found["values_word"] = map(list, zip(*values, strict=True))
        found["profile"], found["profile_word"] = {}, {}
        for dim, errors in self.profile.items():
            both = [split_number(one) for one in errors]
            found["profile"][str(dim)] = [number for number, _ in both]
            if any(word for _, word in both):
                found["profile_word"][str(dim)] = [word for _, word in both]
        return found


_NUMBERS = ("r", "cosine", "largest", "bias", "share_close", "ulp_median", "ulp_p99")


def split_number(number: float | None) -> tuple[float | None, str | None]:
    """Give a number as JSON has it, or nothing and the word for it: `nan`, `infinity`."""
    written = write_number(number)
    return (None, written) if isinstance(written, str) else (written, None)


def write_number(number: float | None) -> float | str | None:
    """Write a number for JSON, which has no NaN and no infinity: those become words."""
    if number is None or math.isfinite(number):
        return number
    return "nan" if math.isnan(number) else "infinity" if number > 0 else "-infinity"


def describe_error(x: Tensor, y: Tensor) -> ErrorDetail:
    """Say in detail how two tensors of as many elements differ."""
    import torch

    if x.numel() != y.numel():
        raise ValueError(
            f"tensors of {tuple(x.shape)} and {tuple(y.shape)} have no elements in common"
        )
    coarser = _find_coarser(x, y)
    shape = tuple(x.shape)
    a, b = (_flatten(one).to(torch.float64) for one in (x, y))
    if x.is_complex():
        shape = (*shape, 2)
    alike = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(alike, 0.0, b - a).nan_to_num(torch.inf, torch.inf, -torch.inf)
    if not a.numel():
        return ErrorDetail(0.0, 1.0, 0.0, (), (0.0, 0.0), 0.0, 1.0, 0.0, 0.0, shape)
    at = int(apart.abs().argmax())
    place = tuple(int(one) for one in np.unravel_index(at, shape)) if shape else ()
    clean_a, clean_b = (torch.where(torch.isfinite(one), one, 0.0) for one in (a, b))
    sizes = _find_norm(clean_a), _find_norm(clean_b)
    ulps = _count_ulps(a, apart, coarser)
    return ErrorDetail(
        r=relative_error(x, y),
        cosine=float((clean_a / sizes[0]) @ (clean_b / sizes[1]))
        if all(sizes)
        else float(sizes[0] == sizes[1]),
        largest=float(apart[at].abs()),
        where=place,
        values=(float(a[at]), float(b[at])),
        bias=float(apart.mean()),
        share_close=float((apart.abs() <= _CLOSE * a.abs()).double().mean()),
        ulp_median=ulps[0],
        ulp_p99=ulps[1],
        shape=shape,
        profile=_make_profile(clean_a.reshape(shape), apart.reshape(shape)),
    )


def _find_coarser(x: Tensor, y: Tensor) -> Any:
    import torch

    known = [one.dtype for one in (x, y) if one.dtype.is_floating_point]
    return max(known, key=lambda dtype: torch.finfo(dtype).eps) if known else None


def _count_ulps(a: Tensor, apart: Tensor, dtype: Any) -> tuple[float, float]:
    """Give the errors in steps of a dtype at the median and the 99th percentile."""
    import torch

    if dtype is None:
        return float(apart.abs().median()), float(apart.abs().max())
    facts = torch.finfo(dtype)
    stride = -(-a.numel() // _MOST_ULPS)
    size, error = a[::stride].abs(), apart[::stride].abs()
    # A step is eps at 1 and doubles with the exponent; below the smallest it stays.
    exponent = torch.frexp(size.clamp(min=facts.tiny)).exponent - 1
    steps, _ = torch.ldexp(error / facts.eps, -exponent).sort()
    last = steps.numel() - 1
    return float(steps[last // 2]), float(steps[int(last * 0.99)])


def _make_profile(a: Tensor, apart: Tensor) -> dict[int, tuple[float, ...]]:
    """Give r along each dimension; one with too many indexes is taken in pieces."""
    import torch

    profile = {}
    for dim, size in enumerate(a.shape):
        if size < 2:
            continue
        others = [one for one in range(a.ndim) if one != dim]
        errors = apart.square().sum(dim=others) if others else apart.square()
        sizes = a.square().sum(dim=others) if others else a.square()
        piece = -(-size // _MOST_PROFILE)
        if piece > 1:
            padding = (0, -size % piece)
            errors, sizes = (
                torch.nn.functional.pad(one, padding).reshape(-1, piece).sum(dim=1)
                for one in (errors, sizes)
            )
        found = torch.where(errors == 0, 0.0, (errors / sizes).sqrt())
        profile[dim] = tuple(found.tolist())
    return profile
