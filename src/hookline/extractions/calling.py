"""What to do where a model does not take what samples hold, whatever the sample."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hookline import _trees
from hookline._errors import StoreError

_BYTES = ("unsigned char", "Byte", "uint8")
"""How torch calls the type of bytes when it does not multiply them."""


def refuse_arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> None:
    """Raise an error that says more, where a call was wrong for every sample."""
    plain = getattr(model, "_orig_mod", model)
    if isinstance(error, TypeError) and not _can_take(plain, args, kwargs):
        raise StoreError(
            f"`{type(plain).__name__}.forward` does not take what a sample holds ({error}); "
            f"{_find_remedy(args, kwargs)}make what it takes by a function of a sample, prepare="
        ) from error
    is_of_bytes = any(
        one.dtype == torch.uint8 for _, one in _trees.leaves((list(args), dict(kwargs)))
    )
    if isinstance(error, RuntimeError) and is_of_bytes and any(x in str(error) for x in _BYTES):
        raise StoreError(
            f"the model does not take bytes ({error}); the samples are tensors of bytes, as images "
            "are read: make floats of them by a function of a sample, prepare="
        ) from error


def _can_take(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # nobody knows
        return True
    return True


def _find_remedy(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Say how one part of a sample is picked, where it has several."""
    if len(args) > 1:
        return f"a sample is {len(args)} values: pick one of them, such as column=0, or "
    if len(kwargs) > 1:
        return f"a sample has the fields {', '.join(kwargs)}: pick one of them with column=, or "
    return ""
