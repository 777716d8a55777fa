"""A model as it was at a call, for as long as a replay takes, and then as it is now.

Everything that a forward can write to is exchanged for a copy: buffers, attributes, containers.
Parameters are exchanged for leaves that share their memory, so that no gradient and no hook of
theirs is touched; writing to them is refused. What was there comes back, the very same objects.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline.addresses.variables import forward_place
from hookline.hooks.junctions import Junction
from hookline.hooks.module_hooks import ModuleHook
from hookline.replays.calls import KeptCall
from hookline.replays.containers import INTERNAL, copy_containers
from hookline.replays.looking import storage_of
from hookline.replays.randomness import put_states, take_states

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_SHARDED = ("FSDPModule", "FullyShardedDataParallel")


_threads: set[int] = set()
"""The threads that run a call again now."""


def is_replaying() -> bool:
    """Tell whether this thread runs a call again now."""
    return get_ident() in _threads


class CannotReplay(Exception):
    """Say why a call cannot be run again without changing something, or without other ranks."""


class Stage:
    """One kept call, set up to run again."""

    def __init__(self, call: KeptCall) -> None:
        self.call = call
        self.modules = list(call.module.modules())
        self.leaves: dict[int, Tensor] = {}
        """What stands for each parameter or buffer, by the id of that one."""
        self.parameters: list[nn.Parameter] = []
        self.storages: set[int] = set()
        """The memory of the parameters, which must not be written to."""
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    @contextmanager
    def set_up(self) -> Iterator[None]:
        """Put everything as it was at the call; at the end as it was before, also on errors."""
        self._refuse_sharded()
        before = [(module, dict(vars(module))) for module in self.modules]
        states = take_states(self.call.random.cuda, in_full=True)
        grads = []
        _threads.add(get_ident())
        try:
            for module, own in before:
                self._exchange_tensors(own, module)
            grads = [(one, one.grad) for one in self.parameters]
            for one in self.parameters:
                one.grad = None
            kept = {id(known()): own for known, own in self.call.attributes}
            for module, _ in before:
                self._exchange_attributes(module, kept.get(id(module)))
            for reference, is_training in zip(self.call.modules, self.call.flags, strict=True):
                found = reference()
                if found is not None:
                    found.__dict__["training"] = is_training
            self._copy_arguments()
            put_states(self.call.random)
            with self._surroundings():
                yield
        finally:
            _threads.discard(get_ident())
            for one, grad in grads:
                one.grad = grad
            for module, own in before:
                _put_back(vars(module), own)
            put_states(states)

    def _refuse_sharded(self) -> None:
        for module in self.modules:
            kinds = {kind.__name__ for kind in type(module).__mro__}
            if kinds.intersection(_SHARDED):
                raise CannotReplay("its parameters are spread over ranks, which all had to join in")

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        call = self.call
        with ExitStack() as stack:
            for kind, dtype in call.autocast.items():
                stack.enter_context(
                    torch.autocast(
                        kind,
                        dtype=dtype,
                        enabled=dtype is not None,
                        cache_enabled=call.has_cache,
                    )
                )
            stack.enter_context(torch.set_grad_enabled(call.is_grad))
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            # A weight that was cast before stands for the parameter, not for its stand-in.
            torch.clear_autocast_cache()
            try:
                yield
            finally:
                torch.clear_autocast_cache()

    def _exchange_tensors(self, own: dict[str, Any], module: nn.Module) -> None:
        attributes = vars(module)
        parameters = {}
        for name, one in own["_parameters"].items():
            parameters[name] = one if one is None else self._stand_in(one)
        attributes["_parameters"] = parameters
        attributes["_buffers"] = {
            name: one if one is None else self._clone(one) for name, one in own["_buffers"].items()
        }
        self._quiet(module, attributes)

    def _stand_in(self, parameter: nn.Parameter) -> Tensor:
        known = self.leaves.get(id(parameter))
        if known is not None:
            return known
        made: Tensor = parameter.detach()
        if type(parameter) is nn.Parameter:
            made = nn.Parameter(made, parameter.requires_grad)
        elif parameter.requires_grad:
            made.requires_grad_()
        made.__dict__.update(vars(parameter))
        self.parameters.append(parameter)
        self.leaves[id(parameter)] = made
        self.storages.add(storage_of(parameter))
        return made

    def _clone(self, tensor: Tensor) -> Tensor:
        known = self.leaves.get(id(tensor))
        if known is None:
            # The parameters' own are known by now; other tensors are copied.
            known = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            self.leaves[id(tensor)] = known
        return known

    def _quiet(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        """Leave out hookline's own hooks, but those that edit: they are part of what ran."""
        ours = [
            (key, hook.junction)
            for name in ("_forward_hooks", "_forward_pre_hooks")
            for key, hook in attributes[name].items()
            if isinstance(hook, ModuleHook)
        ]
        silent = {key for key, junction in ours if not _edits(junction)}
        for name in _HOOKS:
            kept = OrderedDict(
                (key, hook) for key, hook in attributes[name].items() if key not in silent
            )
            attributes[name] = kept
        place = forward_place(module)
        original = getattr(attributes.get(place), "hookline_original", None)
        if original is None or any(_edits(one) for _, one in ours):
            return
        if original is getattr(type(module), "forward", None):
            del attributes[place]
        else:
            attributes[place] = original

    def _exchange_attributes(self, module: nn.Module, kept: dict[str, Any] | None) -> None:
        attributes = vars(module)
        if kept is None:  # torch's own class: only recurrent ones hold parameters a second time
            if isinstance(module, nn.RNNBase):
                self._copy_into(attributes, {"_flat_weights": module._flat_weights})
            return
        for name in attributes.keys() - kept.keys() - INTERNAL:
            del attributes[name]
        self._copy_into(attributes, kept)

    def _copy_into(self, attributes: dict[str, Any], kept: dict[str, Any]) -> None:
        for name, value in kept.items():
            # What can be called may be a forward that hookline has taken out of the way.
            if name not in INTERNAL and not callable(value):
                attributes[name] = copy_containers(value, self._copy, {})

    def _copy(self, value: Any) -> Any:
        """Copy tensors; anything else is what it is."""
        return self._clone(value) if isinstance(value, Tensor) else value

    def _copy_arguments(self) -> None:
        call = self.call
        bound = {"args": call.args, "kwargs": call.kwargs}
        copied = _trees.map_tensors(bound, lambda _, one: self._copy_input(one))
        self.args, self.kwargs = copied["args"], copied["kwargs"]

    def _copy_input(self, tensor: Tensor) -> Tensor:
        known = self.leaves.get(id(tensor))
        if known is None:
            known = tensor.detach()
            if tensor.requires_grad and not tensor.is_leaf:
                known = known.requires_grad_().clone()  # no leaf: it may be changed in place
            else:
                known = known.clone().requires_grad_(tensor.requires_grad)
            self.leaves[id(tensor)] = known
        return known


def _edits(junction: Junction) -> bool:
    return any(one.stage == 1 for one in junction.listeners())


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    if attributes.keys() != before.keys():
        attributes.clear()
    attributes.update(before)
