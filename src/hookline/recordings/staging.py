"""A model that runs a step and is afterwards, bit for bit, what it was before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from hookline import _trees
from hookline._torch import preserve_version
from hookline.replays.calls import is_of_torch
from hookline.replays.containers import INTERNAL, copy_containers
from hookline.replays.looking import storage_of
from hookline.replays.randomness import RandomStates, keep_generator, put_states, seed_everything
from hookline.surveys.preserving import preserved


@contextmanager
def staged(
    model: nn.Module, *, seed: int | None, rng: RandomStates | None, steps: bool
) -> Iterator[None]:
    """Let a model run a step, also one of an optimizer if `steps`, and put everything back.

    Parameters, their gradients, buffers, attributes, the containers and the generators among those
    and random states are as before at the end, also on errors.
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
    with preserved(modules), _Holdings(model, modules), torch.set_grad_enabled(is_grad):
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


class _Holdings:
    """What modules hold in attributes of their own, exchanged for copies while a step runs.

    The very same objects come back with the attributes. Memory of parameters and buffers is shared
    on purpose and is not copied: those are put back themselves.
    """

    def __init__(self, model: nn.Module, modules: list[nn.Module]) -> None:
        self._modules = [one for one in modules if not is_of_torch(one)]
        own = [*model.parameters(), *model.buffers()]
        self._own = {id(one) for one in own}
        self._storages = {storage_of(one) for one in own} - {0}
        self._copies: dict[int, Any] = {}
        self._restores: dict[int, Callable[[], None]] = {}

    def __enter__(self) -> None:
        for module in self._modules:
            attributes = vars(module)
            for name, value in list(attributes.items()):
                if name not in INTERNAL and not callable(value):
                    attributes[name] = copy_containers(value, self._copy, self._copies)

    def __exit__(self, *exception: object) -> None:
        for restore in self._restores.values():
            restore()

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if id(value) not in self._restores:
            restore = keep_generator(value)
            if restore is not None:
                self._restores[id(value)] = restore
        return value

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or id(tensor) in self._own:
            return tensor
        known: Tensor | None = self._copies.get(id(tensor))
        if known is None:
            known = tensor
            if storage_of(tensor) not in self._storages:
                known = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            self._copies[id(tensor)] = known
        return known


def set_random(seed: int | None, rng: RandomStates | None) -> None:
    """Put all random generators into a known state: the one given, or that of a seed."""
    if rng is not None:
        put_states(rng)
    elif seed is not None:
        seed_everything(seed)


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
