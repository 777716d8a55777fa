"""What torch's operations are, as far as their name tells.

Names are those of addresses: `add` for `+`, `add_` where it happens in place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from hookline import _trees
from hookline.addresses.inside import canonical_operation

FRESH = frozenset(
    ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"]
)
"""They give memory that nobody has written to."""

FILLING = frozenset(
    [
        "bernoulli_",
        "cauchy_",
        "copy_",
        "exponential_",
        "fill_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "trunc_normal_",
        "uniform_",
        "zero_",
    ]
)
"""They write over what they are called on, whatever was there."""

MASKING = frozenset(
    [
        "as_tensor",
        "fill",
        "fill_",
        "from_numpy",
        "full",
        "full_like",
        "index_fill",
        "index_fill_",
        "masked_fill",
        "masked_fill_",
        "new_full",
        "new_tensor",
        "scalar_tensor",
        "scatter",
        "scatter_",
        "setitem",
        "tensor",
        "where",
    ]
)
"""They give an infinity only where one was put in on purpose."""


def is_intended(name: str, arguments: Iterable[Any]) -> bool:
    """Tell whether an infinity was written there: a mask, or a literal among the arguments."""
    if name in MASKING:
        return True
    return any(isinstance(one, float) and math.isinf(one) for one in arguments)


def changed_in_place(
    func: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Give the tensor that an operation writes to; None for one that only gives a result."""
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out
    first = next(iter((*args, *kwargs.values())), None)
    if not isinstance(first, Tensor):
        return None
    if len(names) > 1 or (names and names[0] == "setitem"):
        return first
    if inspect.isfunction(func) and kwargs.get("inplace") is True:
        return first
    return None


def is_reflected(func: Any) -> bool:
    """Tell whether Python calls an operator with its two sides exchanged: `1 / x`."""
    name = getattr(func, "__name__", "")
    return name.startswith("__r") and canonical_operation(name) != name.strip("_")


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors of a value, an argument or a result."""
    if isinstance(value, Tensor):
        return [value]
    if value is None or isinstance(value, (int, float, str)):
        return []
    if type(value) not in (tuple, list):
        return [tensor for _, tensor in _trees.leaves(value)]
    found: list[Tensor] = []
    for one in value:  # nearly always the arguments of an operation: quicker than a tree
        if isinstance(one, Tensor):
            found.append(one)
        elif one is not None and not isinstance(one, (int, float, str)):
            found += tensors_in(one)
    return found
