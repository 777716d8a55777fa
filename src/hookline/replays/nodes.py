"""Backward nodes tied to the forward operations that made them, and the first that goes wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

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
        self.inside = ""
        """The line inside of its backward, where that is written in Python."""


class NodeTies:
    """Know which operation made which node, and watch what gradients each gets and gives."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}
        """Every node met: held, because another wrapper of the same node has another id."""
        self.found: BadNode | None = None
        self.has_reentrant = False
        """Whether a checkpoint runs a backward inside of the backward."""
        self._functions: dict[int, tuple[Any, Any]] = {}
        """Nodes of autograd functions, and the operations that stand for these."""
        self._inside: tuple[str, str] | None = None
        """What went wrong inside of the node that runs now, and on which line."""

    def note_function(self, node: Any, operation: Any) -> None:
        """Learn that an autograd function is applied, whose node this will be."""
        self._functions.setdefault(id(node), (node, operation))

    def note_inside(self, why: str, place: str) -> None:
        """Learn that an operation went wrong that the node calls which runs now."""
        self._inside = self._inside or (why, place)

    def meet(self, given: Sequence[Tensor], maker: Any, *, only_functions: bool = False) -> None:
        """Learn of nodes that no operation was seen to make: those of autograd functions.

        `maker` is what was given their outputs, or the module that returns them.
        """
        with torch._C.DisableTorchFunction():
            for tensor in given:
                node = tensor.grad_fn
                if node is not None and (not only_functions or _is_function(node)):
                    self._add(node, maker, [], is_seen=False)

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
            own = maker if is_seen else self._find_maker(node, maker)
            node.register_hook(partial(self._after, node, own, names, is_single))

    def _find_maker(self, node: Any, maker: Any) -> Any:
        """Give the operation that made a node; whoever got its output is not to blame."""
        if id(node) in self._functions:
            return self._functions[id(node)][1]
        if not _is_function(node):
            return maker
        name = type(node).__name__.removesuffix("Backward")
        return replace(maker, name=name, called=name, index=-1)

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
        inside, self._inside = self._inside, None
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
        if inside is not None and _is_function(node):
            why, found.inside = inside
            found.why = f"{why}, in the backward of {maker.called}"
        self.found = found


def _is_function(node: Any) -> bool:
    """Tell whether a node is that of an autograd function written in Python."""
    return isinstance(node, BackwardCFunction)


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
