"""What each rank alone computes of the gradients of parameters, measured before it is reduced.

A hook on a parameter hears what one backward computed on this rank, before it is added to `.grad`.
Under `fully_shard` that is a hook on the whole parameter, which exists from the first forward on,
so hooks are put on when a backward begins. They stay as long as steps are watched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline._ranks import is_spread
from hookline._torch import is_functorch_active, will_accumulate
from hookline.addresses import ModuleTree
from hookline.hooks.parameters import drop_empty_hooks
from hookline.hooks.reducing import Reductions, find_reductions

if TYPE_CHECKING:
    from hookline.watchers.weights import Weight, Weights

PART = "local_grad"

_MOST_NAMED = 3


@dataclass(slots=True, eq=False)
class _Place:
    """A parameter whose gradient is listened for."""

    weight: Weight
    """What is measured there."""

    places: tuple[tuple[nn.Module, str], ...]
    """Each module that has it, with its name there."""

    reductions: Reductions | None
    """What reduces the gradients of its model."""

    leaf: Tensor | None = None
    """The tensor that has the hook now."""

    handle: Any = None
    """What takes the hook away."""

    def find_leaf(self) -> Tensor | None:
        """Give the tensor that gets this rank's gradient; None where there is none to be had."""
        owner, name = self.places[0]
        parameter = owner._parameters.get(name)
        if parameter is None or is_lazy(parameter):
            return None
        leaf: Tensor | None = parameter
        if self.reductions is not None:
            leaf = self.reductions.choose(parameter, self.places, is_local=True)
        return None if leaf is None or not leaf.requires_grad else leaf

    def drop(self) -> None:
        """Take the hook away."""
        if self.handle is not None:
            self.handle.remove()
            assert self.leaf is not None
            drop_empty_hooks(self.leaf)
        self.leaf = self.handle = None


class LocalGradients:
    """Measure what this rank computes of the gradients of watched parameters."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._places: list[_Place] | None = None
        self._unheard: set[str] = set()

    def attach(self) -> None:
        """Listen at the parameters as they are now: a backward is about to begin."""
        if self._places is None:
            self._places = [_Place(*one) for one in self._list()]
        for one in self._places:
            leaf = one.find_leaf()
            if leaf is not None and (is_spread(leaf) or not leaf.is_leaf):
                self._unheard.add(one.weight.name)
                leaf = None
            if leaf is not one.leaf:
                one.drop()
                if leaf is not None:
                    one.leaf, one.handle = leaf, leaf.register_hook(_Ear(self._weights, one))

    def detach(self) -> None:
        """Take every hook away; does nothing the second time."""
        for one in self._places or ():
            one.drop()

    def forget(self) -> None:
        """Look at the models anew when the next backward begins."""
        self.detach()
        self._places = None

    @property
    def notes(self) -> list[str]:
        """What could not be measured, and why."""
        if not self._unheard:
            return []
        names = [f"`{one}`" for one in sorted(self._unheard)[:_MOST_NAMED]]
        more = len(self._unheard) - len(names)
        return [
            f"what this rank computes of the gradient of {', '.join(names)}"
            f"{f' and {more} more' if more else ''} is not measured: it is a DTensor or no leaf, "
            "whose gradient may be reduced before any hook sees it"
        ]

    def _list(
        self,
    ) -> list[tuple[Weight, tuple[tuple[nn.Module, str], ...], Reductions | None]]:
        found = []
        for prefix, model, wanted in self._weights.named:
            tree = ModuleTree(model)
            reductions = find_reductions(tree)
            for entry in tree.parameters:
                if any(map(wanted, entry.names)):
                    weight = self._weights.make(prefix, entry)
                    found.append((weight, entry.places, reductions))
        return found


class _Ear:
    """Hear the gradients of one parameter."""

    __slots__ = ("_place", "_weights")

    def __init__(self, weights: Weights, place: _Place) -> None:
        self._weights = weights
        self._place = place

    def __call__(self, grad: Tensor) -> None:
        leaf = self._place.leaf
        if leaf is None or is_functorch_active():
            return
        # A gradient that is made with a graph and given out is a part of a loss.
        if not torch.is_grad_enabled() or will_accumulate(leaf):
            with torch.no_grad():
                self._weights.measure_local(self._place.weight, grad.detach())
