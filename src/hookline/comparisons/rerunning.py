"""A module called by itself, on arguments and with gradients that were caught elsewhere.

Runs on a stage, so that nothing of the module is changed; what comes of it is copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline._trees import Path
from hookline.addresses import ModuleTree
from hookline.comparisons.catching import CaughtCall
from hookline.comparisons.operations import Call, OperationNotes
from hookline.hooks.arguments import bind
from hookline.replays.staging import Stage


@dataclass(slots=True, eq=False)
class Rerun:
    """What came of a module that was called by itself."""

    outputs: dict[Path, Tensor] = field(default_factory=dict)
    """Its outputs by the path of the leaf."""

    gradients: dict[Path, Tensor] = field(default_factory=dict)
    """The gradients of its inputs by the path of the argument."""

    parameters: dict[str, Tensor | None] = field(default_factory=dict)
    """The gradients of its parameters by name; None where none arrived."""

    calls: list[Call] = field(default_factory=list)
    """The operations of its own forward, where they were noted."""


def rerun(
    module: nn.Module,
    caught: CaughtCall,
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    *,
    gradients: Mapping[Path, Tensor] | None = None,
    is_noted: bool = False,
) -> Rerun:
    """Call a module on arguments under the circumstances of a caught call.

    With the gradients of its outputs it runs backward too; `is_noted` notes its operations.
    """
    args, kwargs = arguments
    kept = caught.keep(args, kwargs, module)
    stage = Stage(kept)
    done = Rerun()
    with warnings.catch_warnings(), stage.set_up():
        warnings.simplefilter("ignore")
        if gradients:
            _hear(bind(kept.module, stage.args, stage.kwargs), done.gradients)
        notes = OperationNotes(stage, gradients=bool(gradients)) if is_noted else None
        with nullcontext() if notes is None else notes:
            output = kept.module(*stage.args, **stage.kwargs)
        for path, tensor in _trees.leaves(output):
            done.outputs[path] = tensor.detach().clone()
        if notes is not None:
            done.calls = notes.calls
            notes.hear_gradients()
        if gradients:
            _run_backward(output, gradients)
            done.parameters = _take_gradients(kept.module)
    return done


def _hear(bound: dict[str, Any], found: dict[Path, Tensor]) -> None:
    for path, tensor in _trees.leaves(bound):
        if tensor.requires_grad:
            tensor.register_hook(_Add(found, path))


class _Add:
    """Serve as a tensor hook: add the gradient to those that arrived."""

    def __init__(self, found: dict[Path, Tensor], path: Path) -> None:
        self._found = found
        self._path = path

    def __call__(self, grad: Tensor) -> None:
        before = self._found.get(self._path)
        now = grad.detach().clone()
        self._found[self._path] = now if before is None else before + now


def _run_backward(output: Any, gradients: Mapping[Path, Tensor]) -> None:
    """Run backward with gradients by path, or in order where the outputs are named otherwise."""
    there = [(path, one) for path, one in _trees.leaves(output) if one.requires_grad]
    if any(path not in gradients for path, _ in there):
        waiting = list(gradients.values())
        pairs = []
        for _, one in there:
            fitting = next((grad for grad in waiting if grad.numel() == one.numel()), None)
            if fitting is not None:
                waiting = [grad for grad in waiting if grad is not fitting]
                pairs.append((one, fitting))
    else:
        pairs = [(one, gradients[path]) for path, one in there]
    if pairs:
        torch.autograd.backward(
            [one for one, _ in pairs],
            [grad.reshape(one.shape).to(one.dtype) for one, grad in pairs],
        )


def _take_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for entry in ModuleTree(module).entries:
        prefix = f"{entry.names[0]}." if entry.names[0] else ""
        for name, one in vars(entry.module)["_parameters"].items():
            if one is not None:
                found[prefix + name] = None if one.grad is None else one.grad.detach().clone()
    return found
