"""What is in a tensor: whether it has NaN or infinities, and its statistics as JSON holds them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.stats import Extras, open_log
from hookline.stats.preparing import prepare, undisturbed, widen
from hookline.stats.rows import FINITE, MAX, MEAN, MIN, NAN, NEGINF, POSINF

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Look(NamedTuple):
    """Whether a tensor has non-finite elements, and of which kind."""

    nan: bool
    posinf: bool
    neginf: bool

    @property
    def is_fine(self) -> bool:
        """Whether every element is finite."""
        return not (self.nan or self.posinf or self.neginf)

    @property
    def kind(self) -> str:
        """`nan` or `inf`."""
        return "nan" if self.nan else "inf"


FINE = Look(False, False, False)


def is_floating(value: Any) -> bool:
    """Tell whether a value is a tensor that can hold NaN."""
    if not isinstance(value, Tensor):
        return False
    with torch._C.DisableTorchFunction():
        return value.dtype.is_floating_point or value.dtype.is_complex


def look_at(tensor: Tensor) -> Look:
    """Look whether a tensor has NaN or infinities; what cannot be read passes for finite."""
    try:
        with undisturbed():
            values = _numbers(tensor)
            if values.numel() == 0 or bool(torch.isfinite(values).all()):
                return FINE
            return Look(
                bool(torch.isnan(values).any()),
                bool((values == torch.inf).any()),
                bool((values == -torch.inf).any()),
            )
    except Exception:  # a tensor without memory, or of a class that does not show its numbers
        return FINE


def describe(tensor: Tensor, name: str = "") -> dict[str, Any]:
    """Give shape, dtype and statistics of a tensor; extremes and mean are of finite elements."""
    with torch._C.DisableTorchFunction():
        facts: dict[str, Any] = {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
    try:
        with undisturbed():
            log = open_log(tensor.device)
            log.add(tensor.detach(), Extras.COUNTS)
            measured = log.take().wait()
    except Exception:  # as above; its shape is known all the same
        return facts
    row = measured.rows[0]
    has_finite = bool(row[FINITE])
    facts["min"] = float(row[MIN]) if has_finite else None
    facts["max"] = float(row[MAX]) if has_finite else None
    facts["mean"] = float(row[MEAN]) if has_finite else None
    facts["nan"] = int(row[NAN])
    facts["inf"] = int(row[POSINF] + row[NEGINF])
    facts["zeros"] = int(measured.counts[0][0])
    return facts


def numbers_of(tensor: Tensor) -> Tensor:
    """Give the elements of a tensor as plain numbers of its shape, wide enough for arithmetic."""
    with undisturbed():
        plain = tensor.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if plain.dtype.is_complex:
            plain = torch.view_as_real(plain.resolve_conj())
        return plain.to(torch.float64)


def _numbers(tensor: Tensor) -> Tensor:
    if tensor.dtype in _FLOATS and type(tensor) in (Tensor, torch.nn.Parameter):
        plain = tensor.detach()
        if plain.layout is torch.strided:
            return plain
    return widen(prepare(tensor).values)


def storage_of(tensor: Tensor) -> int:
    """Tell tensors apart by the memory they lie in; 0 where there is none."""
    try:
        with undisturbed():
            return tensor.untyped_storage().data_ptr()
    except Exception:  # sparse, or a subclass that has no memory of its own
        return 0
