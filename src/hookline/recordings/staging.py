"""A model that runs a step and is afterwards, bit for bit, what it was before."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from hookline import _trees
from hookline._torch import preserve_version
from hookline.replays.randomness import RandomStates, put_states
from hookline.surveys.preserving import preserved


@contextmanager
def staged(
    model: nn.Module, *, seed: int | None, rng: RandomStates | None, steps: bool
) -> Iterator[None]:
    """Let a model run a step, also one of an optimizer if `steps`, and put everything back.

    Parameters, their gradients, buffers, attributes and random states are as before at the end,
    also on errors.
    """
    parameters = list(model.parameters())
    grads = [(one, one.grad) for one in parameters]
    steps = steps or any(getattr(one, "_post_accumulate_grad_hooks", None) for one in parameters)
    kept: list[Tensor] = list(parameters) if steps else []
    is_grad = torch.is_grad_enabled()
    modules = [one for one in model.modules() if not isinstance(one, ScriptModule)]
    if len(modules) < len(list(model.modules())):  # its buffers are reached through it alone
        kept += model.buffers()
    copies = [(one, one.detach().clone()) for one in kept]
    with preserved(modules), torch.set_grad_enabled(is_grad):
        try:
            for one in parameters:
                one.grad = None
            set_random(seed, rng)
            with preserve_version(tuple(kept)):
                try:
                    yield
                finally:
                    with torch.no_grad():
                        for tensor, copy in copies:
                            tensor.copy_(copy)
        finally:
            for one, grad in grads:
                one.grad = grad


def set_random(seed: int | None, rng: RandomStates | None) -> None:
    """Put all random generators into a known state: the one given, or that of a seed."""
    if rng is not None:
        put_states(rng)
    elif seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)


def copy_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy the arguments of a call, so that a model may change them; one tensor stays one."""
    copies: dict[int, Tensor] = {}

    def copy(path: Any, tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            copies[id(tensor)] = made
        return copies[id(tensor)]

    copied = _trees.map_tensors({"args": tuple(args), "kwargs": dict(kwargs)}, copy)
    return copied["args"], copied["kwargs"]
