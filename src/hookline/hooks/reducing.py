"""Where gradients are reduced over ranks: whose hook sees what, and when `.grad` is all ranks'.

DDP reduces what autograd has put into `.grad`, after every hook, and is done when backward ends.
`fully_shard` has two tensors for a parameter: the whole one, which forward works with and autograd
accumulates this rank's gradient into, and this rank's part, which gets the reduced gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from hookline._ranks import (
    active_ddp,
    count_ranks,
    fsdp_parameters,
    is_ddp,
    is_of_ddp,
    is_spread,
    sharded_of,
    whole_of,
    will_reduce,
)
from hookline._torch import at_end_of_backward, is_in_nested_backward
from hookline.addresses import ModuleTree, unwrap

NOT_REDUCED = "not reduced"
NESTED = "nested backward"
SPREAD = "spread"
"""Why there is no gradient of the kind that was asked for."""


class Reductions:
    """What reduces the gradients of a model's parameters; made where there is a process group."""

    def __init__(self, tree: ModuleTree) -> None:
        self._managers: dict[tuple[int, str], Any] = {
            (id(module), name): one for module, name, one in fsdp_parameters(tree.model)
        }
        self._has_others = count_ranks() > 1
        found = [one for one in tree.wrappers if is_ddp(one)]
        self._known = [weakref.ref(one) for one in found]
        # One around the root is active when a call begins; a call past it is not reduced.
        self._inner = [weakref.ref(one) for one in found if unwrap(one) is not tree.root]

    def choose(
        self, parameter: Tensor, places: Iterable[tuple[nn.Module, str]], *, is_local: bool
    ) -> Tensor | None:
        """Give the tensor at which a parameter's gradient is heard: reduced, or this rank's own.

        None before the first forward. A rank's own cannot be told where that is a DTensor.
        """
        for owner, name in places:
            manager = self._managers.get((id(owner), name))
            if manager is not None:
                return whole_of(manager) if is_local else sharded_of(manager)
        return parameter

    def find_reducer(self, parameter: Tensor, *, is_in_call: bool) -> weakref.ref[Any] | None:
        """Find the DDP that reduces the gradient of a parameter, as a call begins or before any."""
        active = active_ddp() if is_in_call else None
        if active is not None and is_of_ddp(active, parameter):
            return weakref.ref(active)
        for one in self._inner if is_in_call else self._known:
            ddp = one()
            if ddp is not None and is_of_ddp(ddp, parameter):
                return one
        return None

    def wait(
        self, parameter: Tensor, reducer: weakref.ref[Any] | None, deliver: Callable[[], None]
    ) -> str:
        """Deliver a gradient that was accumulated, once it is reduced; or give why it never is.

        `fully_shard` tells of a gradient after it was reduced; one rank has nothing to wait for.
        """
        if not self._has_others or is_spread(parameter):
            deliver()
            return ""
        ddp = None if reducer is None else reducer()
        if ddp is not None and not will_reduce(ddp):
            return NOT_REDUCED
        if ddp is not None and is_in_nested_backward():
            return NESTED
        # DDP asks to be called at the end when its last gradient is there, which may be after this.
        at_end_of_backward(lambda: at_end_of_backward(deliver))
        return ""


def find_reductions(tree: ModuleTree) -> Reductions | None:
    """Look for what reduces gradients; None in a process that is alone."""
    return Reductions(tree) if count_ranks() else None
