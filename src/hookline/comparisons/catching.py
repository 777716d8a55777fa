"""One call of a module, taken from a step of its model, so that it can be made again by itself.

The step runs on a stage: nothing of the model, its gradients or the random states is changed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline._torch import add_forward_hooks
from hookline._trees import Path
from hookline.addresses import ModuleTree
from hookline.comparisons.calling import StepCall
from hookline.hooks.arguments import bind
from hookline.replays.calls import KeptCall, keep_call
from hookline.replays.places import NO_LINE, SourceLine, find_line
from hookline.replays.randomness import RandomStates, take_states
from hookline.replays.staging import Stage


class NotCaught(Exception):
    """Say why a call of a module could not be had."""


@dataclass(slots=True, eq=False)
class CaughtCall:
    """One call of a module as it was made in a step."""

    module: nn.Module
    """The module."""

    path: str
    """Its path in the model."""

    args: tuple[Any, ...]
    """The positional arguments; tensors are copies."""

    kwargs: dict[str, Any]
    """The named ones."""

    random: RandomStates
    """The random states when it began."""

    autocast: Mapping[str, Any]
    """The dtype of autocast by type of device; None where it is off."""

    is_grad: bool
    """Whether it was made with grad."""

    visit: int = 0
    """Which one of the module's calls it was."""

    line: SourceLine = NO_LINE
    """The line of the user's code that makes it."""

    gradients: dict[Path, Tensor] = field(default_factory=dict)
    """The gradients of its outputs that arrived, by the path of the leaf."""

    @property
    def bound(self) -> dict[str, Any]:
        """Its arguments by name."""
        return bind(self.module, self.args, self.kwargs)

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], of: nn.Module) -> KeptCall:
        """Keep a call of a module under the circumstances of this one."""
        kept = keep_call(of, args, kwargs)
        kept.random = self.random
        kept.is_grad = self.is_grad
        kept.autocast = dict(self.autocast)
        return kept


def find_module(model: nn.Module, path: str) -> nn.Module:
    """Give the module at a path."""
    entry = ModuleTree(model).find(path)
    if entry is None:
        raise NotCaught(f"`{path}` is no module of `{type(model).__name__}`")
    return entry.module


def catch_call(
    model: nn.Module, path: str, call: StepCall, *, visit: int = 0, backward: bool = False
) -> CaughtCall:
    """Run a step of a model and take from it the call number `visit` of the module at a path."""
    target = find_module(model, path)
    kept = keep_call(model, call.args, call.kwargs)
    if call.random is not None:
        kept.random = call.random
    kept.is_grad = True if backward or call.loss is not None else torch.is_grad_enabled()
    stage = Stage(kept)
    net = _Net(target, path, visit, backward=backward)
    with warnings.catch_warnings(), stage.set_up():
        warnings.simplefilter("ignore")
        add_forward_hooks(target, net.enter, net.leave, place=2)
        output = kept.module(*stage.args, **stage.kwargs)
        if backward and call.loss is not None:
            loss = call.loss(output)
            if loss.requires_grad:
                loss.backward()
    if net.caught is None:
        times = f"only {net.count} times" if net.count else "not at all"
        raise NotCaught(f"`{path or type(model).__name__}` was called {times}")
    return net.caught


class _Net:
    """Serve as hooks of a module: take one of its calls."""

    def __init__(self, module: nn.Module, path: str, visit: int, *, backward: bool) -> None:
        self._module = module
        self._path = path
        self._visit = visit
        self._backward = backward
        self._depth: list[bool] = []
        """Whether each execution under way is the one that is wanted."""
        self.count = 0
        self.caught: CaughtCall | None = None

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        is_wanted = self.count == self._visit and self.caught is None
        self.count += 1
        self._depth.append(is_wanted)
        if not is_wanted:
            return
        known: dict[int, Tensor] = {}
        copied = _trees.map_tensors({"args": args, "kwargs": kwargs}, lambda _, x: _copy(x, known))
        kinds = {one.device.type for one in known.values()} | {"cpu"}
        cuda = {one.device.index for one in known.values() if one.device.type == "cuda"}
        self.caught = CaughtCall(
            module=self._module,
            path=self._path,
            args=copied["args"],
            kwargs=copied["kwargs"],
            random=take_states(sorted(cuda), in_full=True),
            autocast={
                kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
                for kind in sorted(kinds - {"meta"})
            },
            is_grad=torch.is_grad_enabled(),
            visit=self._visit,
            line=find_line(sys._getframe(1)),
        )

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        is_wanted = self._depth.pop() if self._depth else False
        if not is_wanted or not self._backward or self.caught is None:
            return
        gradients = self.caught.gradients
        for path, tensor in _trees.leaves(output):
            if tensor.requires_grad:
                tensor.register_hook(_Keep(gradients, path))


class _Keep:
    """Serve as a tensor hook: keep the gradient that arrives."""

    def __init__(self, gradients: dict[Path, Tensor], path: Path) -> None:
        self._gradients = gradients
        self._path = path

    def __call__(self, grad: Tensor) -> None:
        before = self._gradients.get(self._path)
        now = grad.detach().clone()
        self._gradients[self._path] = now if before is None else before + now


def _copy(tensor: Tensor, known: dict[int, Tensor]) -> Tensor:
    """Copy a tensor; one that wants a gradient is no leaf, so that it may be changed in place."""
    found = known.get(id(tensor))
    if found is None:
        plain = tensor.detach()
        if tensor.requires_grad and torch.is_grad_enabled():
            found = plain.requires_grad_().clone()
        else:
            found = plain.clone().requires_grad_(tensor.requires_grad)
        known[id(tensor)] = found
    return found
