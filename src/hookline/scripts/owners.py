"""Whose a module is: the bigger modules it is part of, its optimizers, and what it is called.

Everything is found by one look at all objects of the process, which is taken when a model is met
for the first time and never while it trains.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torch import nn
from torch.jit import ScriptModule
from torch.optim import Optimizer

WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module"}
"""Modules that only hold another, by class name, and where they hold it."""

_MOST_FRAMES = 50


def unwrap(module: nn.Module) -> nn.Module:
    """Give what is inside of wrappers such as DistributedDataParallel and torch.compile."""
    seen = 0
    while seen < 10 and not is_scripted(module):
        inner = module._modules.get("_orig_mod")
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch.nn.parallel"):
                inner = module._modules.get(WRAPPERS[kind.__name__])
        if inner is None:
            return module
        module, seen = inner, seen + 1
    return module


def is_scripted(module: nn.Module) -> bool:
    """Tell whether a module is TorchScript, which runs without Python and has other containers."""
    return isinstance(module, ScriptModule)


class Census:
    """The modules and optimizers that there are at one moment."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        # By type and once for each, as there are hundreds of thousands of objects; and never by
        # `isinstance`, which a lazy object would answer by loading itself.
        wanted: dict[type, bool] = {}
        for one in gc.get_objects():
            kind = type(one)
            is_wanted = wanted.get(kind)
            if is_wanted is None:
                is_wanted = issubclass(kind, nn.Module | Optimizer)
                is_wanted = wanted[kind] = is_wanted and not issubclass(kind, ScriptModule)
            if not is_wanted:
                continue
            if issubclass(kind, Optimizer):
                self.optimizers.append(one)
            elif "_modules" in vars(one):  # else its `__init__` is not that far
                self.modules.append(one)
        self._parents: dict[int, list[nn.Module]] = {}
        for owner in self.modules:
            for child in owner._modules.values():
                if child is not None:
                    self._parents.setdefault(id(child), []).append(owner)

    def trained(self) -> set[int]:
        """Give the ids of the parameters that optimizers have."""
        return {
            id(parameter)
            for optimizer in self.optimizers
            for group in getattr(optimizer, "param_groups", ())
            for parameter in group.get("params", ())
        }

    def topmost(self, module: nn.Module) -> nn.Module:
        """Find the biggest module that a module is part of; wrappers do not count."""
        found = unwrap(module)
        seen: set[int] = set()
        waiting = [found]
        tops: list[nn.Module] = []
        while waiting:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            above = [owner for owner in self._parents.get(id(one), []) if unwrap(owner) is not one]
            wrapped = [owner for owner in self._parents.get(id(one), []) if unwrap(owner) is one]
            # What holds a wrapper holds what is in it.
            for wrapper in wrapped:
                above += self._parents.get(id(wrapper), [])
            if above:
                waiting += above
            else:
                tops.append(one)
        if not tops:  # modules that hold each other
            return found
        return max(map(unwrap, tops), key=lambda top: (_count(top), top is found))

    def trained_tops(self) -> list[nn.Module]:
        """List the topmost modules that have parameters which optimizers have."""
        trained = self.trained()
        tops: dict[int, nn.Module] = {}
        for module in self.modules:
            if any(id(one) in trained for one in module._parameters.values()):
                top = self.topmost(module)
                tops.setdefault(id(top), top)
        return list(tops.values())


def _count(module: nn.Module) -> int:
    return sum(1 for _ in module.parameters())


def has_trainable(module: nn.Module) -> bool:
    """Tell whether anything of a module can be trained."""
    return any(one.requires_grad for one in module.parameters())


def path_within(owner: nn.Module, module: nn.Module) -> str | None:
    """Give the path of a module in the one that owns it; None where it is not in there."""
    for path, one in owner.named_modules():
        if one is module or unwrap(one) is module:
            return str(path)
    return None


def find_name(module: nn.Module, frame: FrameType | None = None) -> str:
    """Find what a script calls a module: a variable, an attribute, or else its class."""
    for names in _namespaces(frame or sys._getframe(1)):
        for name, value in names:
            if value is module or (is_module(value) and unwrap(value) is module):
                return name
    return type(module).__name__


def is_module(value: Any) -> bool:
    """Tell whether a value is a module, without asking a lazy object to load itself."""
    return issubclass(type(value), nn.Module) and "_modules" in vars(value)


def _namespaces(frame: FrameType | None) -> Iterator[Iterable[tuple[str, Any]]]:
    """Give the variables of the frames from the script's own outwards, then its globals."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "hookline.")):
            frames.append(frame)
        frame = frame.f_back
    main = sys.modules.get("__main__")
    if main is not None:
        yield _plain(vars(main))
    for one in frames:
        if one.f_code.co_flags & inspect.CO_OPTIMIZED:
            names = _read_locals(one)
            yield _plain(names)
            owner = names.get("self")
            if owner is not None and not issubclass(type(owner), nn.Module):
                yield _plain(getattr(owner, "__dict__", {}))
    for one in frames:
        yield _plain(one.f_globals)


def _read_locals(frame: FrameType) -> dict[str, Any]:
    """Copy the variables of a function that runs."""
    names = dict(frame.f_locals)
    if sys.version_info < (3, 13):
        # The frame keeps the dict it gave, and with it every tensor that was a variable just now.
        frame.f_locals.clear()
    return names


def _plain(names: Any) -> list[tuple[str, Any]]:
    """Copy the names that can be part of an address, in the order in which they were made."""
    try:
        return [
            (name, value)
            for name, value in dict(names).items()
            if isinstance(name, str) and name.isidentifier() and not name.startswith("_")
        ]
    except Exception:  # somebody's own mapping
        return []
