"""How a gradient is heard of where the model's gradients come first.

A tap puts a node into the graph. The gradients of what comes through it are summed there before
they join the others, which shows in the last bits, and an alias that is changed in place leaves the
original without that change. Whoever is careful gets no tap, and where nothing else would do
goes without the gradient.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from torch import Tensor, nn
from torch.autograd.graph import Node

from hookline._torch import CreationMeta, creation_meta


class Way(enum.Enum):
    """What is done to hear of the gradient of a tensor."""

    HOOK = "a hook on the tensor"
    VIEW = "a hook on the view, which a change of its memory ends"
    NODE = "a hook on the node that made what the view shows"
    NONE = "nothing: its gradient is not heard of"


def needs_tap(tensor: Tensor, received: Mapping[int, int]) -> bool:
    """Tell whether a hook on the tensor itself would hear of more than this place's gradient."""
    if tensor.is_leaf:
        return True
    if tensor._is_view() and creation_meta(tensor) != CreationMeta.MULTI_OUTPUT_NODE:
        return True
    # One of several views made at once (chunk, split, unbind) cannot be changed in place: torch
    # raises. On an alias it would not.
    # An input handed back: its own hook would see the caller's other uses of it too. One that the
    # module changed in place is a new value under the old object.
    return received.get(id(tensor)) == tensor._version


def choose_way(
    tensor: Tensor,
    received: Mapping[int, int],
    *,
    module: nn.Module | None,
    hooks_views: bool,
    is_inside: bool = False,
) -> Way:
    """Choose how a careful listener hears of a gradient.

    An input handed back has the hook on itself: it is one tensor, and what reaches it reaches it
    from all who use it. A leaf has nothing: a hook would stay on it when the graph is gone.
    """
    if tensor.is_leaf:
        return Way.NONE
    is_view = tensor._is_view() and creation_meta(tensor) != CreationMeta.MULTI_OUTPUT_NODE
    if received.get(id(tensor)) == tensor._version:
        if is_inside:
            return Way.NONE
        return Way.VIEW if is_view else Way.HOOK
    if not is_view:
        return Way.HOOK
    if not is_inside and maker_of(tensor, module) is not None:
        return Way.NODE
    return Way.VIEW if hooks_views or is_inside else Way.NONE


def maker_of(view: Tensor, module: nn.Module | None) -> Node | None:
    """Give the node that made what a view shows all of, if that is nowhere else; else None.

    So it is with a linear layer whose input has more than two dimensions: it returns a view of
    what it made. A hook on the node hears the gradient whatever is done to the view later.
    """
    base = view._base
    if base is None or module is None or type(module).forward is not nn.Linear.forward:
        return None
    return base.grad_fn if base.numel() == view.numel() else None
