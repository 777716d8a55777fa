"""What is kept of a call so that it can be run again: references, and the state around it.

It is kept at each call of a watched model, so it copies no tensor and costs some tens of
microseconds. A tensor that was changed since is noticed by its version, not put back.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline._trees import Path
from hookline.addresses import unwrap
from hookline.hooks.arguments import bind
from hookline.replays.places import find_line
from hookline.replays.randomness import RandomStates, take_states

_PLAIN = (type(None), bool, int, float, str)
_MOST_CALLS = 64
"""How many calls what is known of a model serves, in which modules may have been exchanged."""
_SAMPLED = 4
"""How many parameters are looked at to notice that an optimizer has stepped."""


class _Known:
    """The modules of a model and the devices they are on, without holding them."""

    def __init__(self, model: nn.Module) -> None:
        self.calls = 0
        modules = list(model.modules())
        self.modules = [weakref.ref(one) for one in modules]
        self.own = [weakref.ref(one) for one in modules if not is_of_torch(one)]
        """Those whose class is not torch's own: they may keep state in attributes."""
        tensors = [*model.parameters(), *model.buffers()]
        devices = {one.device for one in tensors}
        self.device_types = sorted({"cpu", *(one.type for one in devices)} - {"meta"})
        self.cuda = sorted({one.index for one in devices if one.type == "cuda"})
        step = max(len(tensors) // _SAMPLED, 1)
        self.sample = [weakref.ref(one) for one in tensors[::step] if isinstance(one, nn.Parameter)]


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def is_of_torch(module: nn.Module) -> bool:
    """Tell whether the class of a module is torch's own."""
    return type(module).__module__.startswith("torch.nn.")


class KeptCall:
    """One call of a model, as far as it takes to run it again."""

    __slots__ = (
        "args",
        "attributes",
        "autocast",
        "began",
        "flags",
        "gradients",
        "has_cache",
        "is_grad",
        "kwargs",
        "line",
        "module",
        "modules",
        "prefix",
        "random",
        "sampled",
        "versions",
    )

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], prefix: str
    ) -> None:
        known = _known.get(module)
        if known is None or known.calls >= _MOST_CALLS:
            known = _known[module] = _Known(module)
        known.calls += 1
        self.began = time.monotonic()
        """When it began."""
        self.module = module
        self.prefix = prefix
        """What stands before the paths of its modules: `generator.`."""
        self.line = find_line(sys._getframe(2))
        """The line of the user's code that calls it."""
        self.args = tuple([_keep(one) for one in args])
        self.kwargs = {name: _keep(one) for name, one in kwargs.items()}
        self.versions = [_version(one) for one in self._tensors()]
        """The version each tensor of the arguments had."""
        self.gradients: dict[Path, Tensor] = {}
        """The gradients of its outputs, by the path of the leaf."""
        self.random: RandomStates = take_states(known.cuda)
        self.autocast = {
            kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in known.device_types
        }
        """The dtype of autocast by type of device; None where it is off."""
        self.has_cache = torch.is_autocast_cache_enabled()
        self.is_grad = torch.is_grad_enabled()
        self.modules = known.modules
        self.flags = [(found := one()) is not None and found.training for one in known.modules]
        """Whether each module was in training."""
        self.attributes = [
            (one, found.__dict__.copy()) for one in known.own if (found := one()) is not None
        ]
        """The attributes of modules whose class is the user's."""
        self.sampled = [
            (one, weight._version) for one in known.sample if (weight := one()) is not None
        ]
        """The versions of some parameters."""

    def _tensors(self) -> list[Tensor]:
        found = []
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor):
                found.append(value)
            elif not isinstance(value, _PLAIN):
                found += [tensor for _, tensor in _trees.leaves(value)]
        return found

    def note_gradients(self, grads: Mapping[Path, Tensor]) -> None:
        """Note the gradients of its output's leaves as they come; references alone."""
        self.gradients.update(grads)

    def changes(self) -> list[str]:
        """Say what was changed since the call, so that a replay may show something else."""
        found = []
        bound = bind(self.module, self.args, self.kwargs)
        versions = {
            id(one): version for one, version in zip(self._tensors(), self.versions, strict=True)
        }
        for path, tensor in _trees.leaves(bound):
            if versions.get(id(tensor)) != _version(tensor):
                name = ".".join(map(str, path))
                found.append(f"the argument `{name}` was changed in place since the call")
        if any((now := one()) is not None and now._version != old for one, old in self.sampled):
            found.append("parameters were changed since the call")
        return found


def _keep(value: Any) -> Any:
    """Keep a value; containers are copied, since who called may change them."""
    if isinstance(value, (Tensor, *_PLAIN)):
        return value
    return _trees.map_tensors(value, lambda _, tensor: tensor)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def keep_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, prefix: str = ""
) -> KeptCall:
    """Keep a call that is about to begin, so that `find_origin` can run it again."""
    return KeptCall(unwrap(module), args, kwargs, prefix)
