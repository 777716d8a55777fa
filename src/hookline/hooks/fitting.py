"""Check that an edited value fits where it goes, before it enters the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from hookline import _trees
from hookline._errors import EditError
from hookline._trees import Path
from hookline.addresses import format_leaf

if TYPE_CHECKING:
    from hookline.hooks.visits import Visit


def check_fit(old: Any, new: Any, where: str, path: Path = ()) -> None:
    """Raise an `EditError` that names the site and the difference if `new` cannot replace `old`."""
    at = f"{where}{format_leaf(path)}"
    if isinstance(old, Tensor):
        _check_tensor(old, new, at)
        return
    items = _trees.children(old)
    if items is None:
        return
    new_items = _trees.children(new)
    names = [key for key, _ in items]
    if new_items is None or [key for key, _ in new_items] != names:
        got = type(new).__qualname__
        if new_items is not None:
            got += f" with {[key for key, _ in new_items]}"
        raise EditError(
            f"the edit at {at} returned {got} for a {type(old).__qualname__} with {names}. "
            "Return the same structure, return hl.KEEP, or name one tensor in the address."
        )
    for (key, old_item), (_, new_item) in zip(items, new_items, strict=True):
        check_fit(old_item, new_item, where, (*path, key))


def _check_tensor(old: Tensor, new: Any, at: str) -> None:
    if not isinstance(new, Tensor):
        hint = " Return hl.KEEP to leave the value as it is." if new is None else ""
        raise EditError(
            f"the edit at {at} returned {_show(new)} for a tensor of shape "
            f"{tuple(old.shape)}.{hint}"
        )
    problem = misfit(old, new)
    if problem:
        raise EditError(f"the edit at {at} {problem}")


def misfit(old: Tensor, new: Tensor) -> str:
    """Say why one tensor cannot replace another; empty where it can. May run while it is traced."""
    if new.shape != old.shape:
        return (
            f"returned shape {show_shape(new.shape)} for {show_shape(old.shape)}. "
            "Return a tensor of the same shape, e.g. new.expand_as(value)."
        )
    if new.dtype != old.dtype:
        return f"returned {new.dtype} for {old.dtype}. Return new.to(value.dtype)."
    if new.device != old.device:
        return (
            f"returned a tensor on {new.device} for one on {old.device}. "
            "Return new.to(value.device)."
        )
    if new.layout != old.layout:
        return f"returned layout {new.layout} for {old.layout}."
    return ""


def show_shape(shape: Sequence[int]) -> str:
    """Write a shape as Python does a tuple."""
    sizes = [str(int(size)) for size in shape]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


def _show(value: object) -> str:
    return "None" if value is None else f"a {type(value).__qualname__}"


def is_met_again(visit: Visit, task: int) -> bool:
    """Tell whether a pass with `create_graph=True` edited this visit before; note such a pass."""
    first = visit.made_graph
    if first is not None and first != task:
        return True
    if torch.is_grad_enabled():
        visit.made_graph = task
    return False


def refuse_second_order(where: str, fix: str) -> NoReturn:
    """Refuse to edit a second-order gradient by accident: the edit is in the graph already."""
    raise EditError(
        f"the gradient edit at {where} was reached again after a backward pass with "
        f"create_graph=True, so it would apply twice to second-order gradients. {fix}"
    )
