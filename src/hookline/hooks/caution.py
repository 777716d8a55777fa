"""How a gradient is heard of where the model's gradients come first.

A tap puts a node into the graph. The gradients of what comes through it are summed there before
they join the others, which shows in the last bits, and an alias that is changed in place leaves the
original without that change. Whoever is careful gets a tap only where neither can happen.
"""

from __future__ import annotations

import enum
import gc
import sys
from collections.abc import Mapping
from functools import cache
from types import CellType, FrameType

import torch
from torch import Tensor

from hookline._torch import CreationMeta, creation_meta, holders

_MOST_FAILURES = 3


class Way(enum.Enum):
    """What is done to hear of the gradient of a tensor."""

    HOOK = "a hook on the tensor"
    VIEW = "a hook on the view, which a change of its memory ends"
    TAP = "a tap"
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
    tensor: Tensor, received: Mapping[int, int], *, hooks_views: bool, is_inside: bool = False
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
    if hooks_views or is_inside:
        return Way.VIEW
    return Way.TAP if is_alone(tensor) else Way.NONE


class Company:
    """Tell whether a view that a module returned is held by the call alone.

    The first time all that refers to it is looked through, which is slow; from then on the number
    of references has to be the same.
    """

    __slots__ = ("_failures", "_usual")

    def __init__(self) -> None:
        self._usual: dict[object, int] = {}
        self._failures = 0

    def is_absent(self, view: Tensor) -> bool:
        """Tell whether nobody else has the view; called in the function that was handed it."""
        way = sys._getframe(2).f_code  # each way here holds it another number of times
        usual = self._usual.get(way)
        if usual is None and self._failures < _MOST_FAILURES:
            if all(_is_of_call(one, view) for one in gc.get_referrers(view)):
                usual = self._usual[way] = sys.getrefcount(view)
            else:
                self._failures += 1
        return usual is not None and sys.getrefcount(view) == usual


def _is_of_call(holder: object, view: Tensor) -> bool:
    """Tell whether something that refers to a view is part of the call that returned it."""
    if isinstance(holder, tuple):  # what a forward hook is called with, or the end of it
        return len(holder) > 1 and isinstance(holder[-2], dict) and holder[-1] is view
    return isinstance(holder, CellType | FrameType)


def is_alone(view: Tensor) -> bool:
    """Tell whether nobody but this view has its base: nothing else can use the memory."""
    base = view._base
    return base is not None and holders(base) == _holders_of_one()


@cache
def _holders_of_one() -> tuple[int, int]:
    """Count the holders of a base that only its view has, in the same way."""
    with torch.enable_grad():
        view = (torch.ones(2, requires_grad=True) * 2)[1:]
    base = view._base
    assert base is not None
    return holders(base)
