"""Backward nodes tied to the forward operations that made them, and the first that goes wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookline.replays.looking import describe, look_at
from hookline.replays.slopes import explain_slope

_NAMESPACE = "torch::autograd::"
_ACCUMULATE = f"{_NAMESPACE}AccumulateGrad"


class BadNode:
    """A backward node that was given finite gradients and gave others."""

    def __init__(self, node: Any, maker: Any, names: list[str | int]) -> None:
        self.name: str = node.name().removeprefix(_NAMESPACE)
        self.maker = maker
        self.names = names
        """The arguments of the operation that can have a gradient, as they are called."""
        self.slot = 0
        """Which of the node's gradients is not finite."""
        self.is_single = False
        """Whether the operation has this node alone."""
        self.kind = "nan"
        self.why = ""
        self.inputs: list[dict[str, Any]] = []
        self.output: dict[str, Any] = {}


class NodeTies:
    """Know which operation made which node, and watch what gradients each gets and gives."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}
        """Every node met: held, because another wrapper of the same node has another id."""
        self.found: BadNode | None = None
        self.has_reentrant = False
        """Whether a checkpoint runs a backward inside of the backward."""

    def meet(self, given: Sequence[Tensor], maker: Any) -> None:
        """Learn of nodes that no operation was seen to make: those of autograd functions."""
        with torch._C.DisableTorchFunction():
            for tensor in given:
                if tensor.grad_fn is not None:
                    self._add(tensor.grad_fn, maker, [], is_seen=False)

    def tie(self, outputs: Sequence[Tensor], maker: Any, bound: Mapping[str | int, Any]) -> None:
        """Learn of the nodes that an operation has just made."""
        with torch._C.DisableTorchFunction():
            names = [name for name, one in bound.items() if isinstance(one, Tensor)]
            for tensor in outputs:
                if tensor.grad_fn is not None:
                    self._add(tensor.grad_fn, maker, names, is_seen=True)

    def _add(self, top: Any, maker: Any, names: list[str | int], *, is_seen: bool) -> None:
        fresh = []
        waiting = [top]
        while waiting:
            node = waiting.pop()
            if node is None or id(node) in self._known:
                continue
            self._known[id(node)] = node
            if node.name() == _ACCUMULATE:
                continue
            fresh.append(node)
            waiting += [following for following, _ in node.next_functions]
        for node in fresh:
            if node.name() == "CheckpointFunctionBackward":
                self.has_reentrant = True
            is_single = is_seen and len(fresh) == 1 and len(node.next_functions) == len(names)
            node.register_hook(partial(self._after, node, maker, names, is_single))

    def _after(
        self,
        node: Any,
        maker: Any,
        names: list[str | int],
        is_single: bool,
        given: Sequence[Tensor | None],
        received: Sequence[Tensor | None],
    ) -> None:
        """Serve as a hook of a node: `given` are the gradients it gives, `received` what it got."""
        if self.found is not None:
            return
        looks = [None if one is None else look_at(one) for one in given]
        slot = next((i for i, one in enumerate(looks) if one and not one.is_fine), None)
        if slot is None or any(one is not None and not look_at(one).is_fine for one in received):
            return
        bad, look = given[slot], looks[slot]
        assert bad is not None
        assert look is not None
        found = BadNode(node, maker, names)
        found.slot, found.is_single, found.kind = slot, is_single, look.kind
        found.output = describe(bad, "gradient given")
        saved = _saved(node)
        found.inputs = [describe(one, "gradient") for one in received if one is not None]
        found.inputs += [describe(one, name) for name, one in saved.items()]
        gradient = next((one for one in received if one is not None), None)
        found.why = explain_slope(found.name, saved, gradient, bad, operation=maker.called)
        self.found = found


def _saved(node: Any) -> dict[str, Tensor]:
    """Read what a node has saved of its forward; what cannot be read is left out."""
    found = {}
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        try:
            value = getattr(node, name)
        except Exception:  # freed, or changed in place since
            continue
        if isinstance(value, (Tensor, float, int)) and not isinstance(value, bool):
            tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
            if tensor.dtype.is_floating_point:
                found[name.removeprefix("_saved_")] = tensor
    return found
