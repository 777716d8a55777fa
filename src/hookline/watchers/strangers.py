"""Optimizers that step what no watched model has, while the models' own weights stay as they are.

That is what is left of an optimizer made before layers were exchanged, or of a copy of the model:
it steps parameters that no gradient reaches any more. One that optimizes an input has gradients,
and somebody who steps weights by hand moves them; neither is meant here.
"""

from __future__ import annotations

import gc
import itertools

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.rules import Finding
from hookline.watchers.weights import Weights

RULE = "update-ratio"
"""The rule in whose name this is said."""

_ENOUGH = 20
"""So many steps of strangers are no accident."""

_SAMPLED = 4
_ELEMENTS = 8


class Strangers:
    """Count the steps of optimizers that have nothing of the watched models."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._is_over = False
        """Whether nothing can come of it any more."""
        self._has_backward = False
        self._steps = 0
        self._sample: list[tuple[nn.Parameter, Tensor]] = []

    def note_own_step(self) -> None:
        """Learn that an optimizer of the models' own parameters has stepped: all is well."""
        self._is_over = True
        self._sample = []

    def note_backward(self) -> None:
        """Learn of a backward through a watched model."""
        self._has_backward = True

    def note_step(self, optimizer: Optimizer, *, step: int) -> Finding | None:
        """Learn that an optimizer steps that has nothing of the models; say so if it is enough."""
        if self._is_over or not self._has_backward:
            return None
        given = [one for group in optimizer.param_groups for one in group["params"]]
        if any(one.grad is not None for one in given):
            return None
        self._has_backward = False
        if not self._steps:
            moving = (one for one in self._weights.parameters if one.requires_grad)
            self._sample = [(one, _look(one)) for one in itertools.islice(moving, _SAMPLED)]
        self._steps += 1
        if self._steps < _ENOUGH:
            return None
        sample, self._sample, self._is_over = self._sample, [], True
        has_moved = any(not torch.equal(_look(one), before) for one, before in sample)
        if not sample or has_moved or self._is_in_an_optimizer():
            return None
        return self._explain(optimizer, len(given), step)

    def _is_in_an_optimizer(self) -> bool:
        """Look through all optimizers there are: one may only not have had its turn yet."""
        own = {id(one) for one in self._weights.parameters}
        return any(
            id(one) in own
            for optimizer in gc.get_objects()
            if issubclass(type(optimizer), Optimizer)  # some objects warn when asked themselves
            for group in optimizer.param_groups
            for one in group["params"]
        )

    def _explain(self, optimizer: Optimizer, count: int, step: int) -> Finding:
        kind = type(optimizer).__name__
        models = " or ".join(dict.fromkeys(type(one).__name__ for one in self._weights.models))
        return Finding(
            rule=RULE,
            severity="error",
            site="",
            step=step,
            value=float(self._steps),
            threshold=float(_ENOUGH),
            message=(
                f"No optimizer has any parameter of {models}: the weights are never updated. "
                f"{kind} has stepped {self._steps} times after a backward, and steps "
                "parameters that are not of the model and get no gradient."
            ),
            evidence=(
                f"{kind} has {count} parameter{'' if count == 1 else 's'}, none of the model",
                f"the weights were the same after {self._steps} steps",
            ),
            hint=(
                "Make the optimizer after the model is final, from model.parameters(): after "
                "layers are replaced, after a copy is made, after weights are loaded."
            ),
        )


def _look(parameter: nn.Parameter) -> Tensor:
    """Copy a few numbers of a parameter; a version tells nothing where `.data` is written to."""
    with torch._C.DisableTorchFunction():
        return parameter.detach().reshape(-1)[:_ELEMENTS].clone()
