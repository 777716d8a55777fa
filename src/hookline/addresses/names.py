"""Give every module and parameter of a model its canonical names.

Wrappers (`torch.compile`, DDP, FSDP, activation checkpointing, weight averaging) do not show: a
wrapper and what it wraps have one name, and the innermost module has it. A shared module has a
name for each way that leads to it. This file knows no patterns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from hookline._errors import UnsupportedModel

# By name, because importing these classes would load torch._dynamo and torch.distributed.
WRAPPED_ATTRIBUTES = {
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "AveragedModel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
_ATTRIBUTES = frozenset(WRAPPED_ATTRIBUTES.values())

# Modules that hold each other have names without end; no real model shares one block this often.
_MOST_NAMES_OF_PARENT = 1024


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """Name one module of a tree."""

    names: tuple[str, ...]
    """Its paths, the one met first in front."""

    module: nn.Module
    """The module, without wrappers."""

    pattern_names: tuple[str, ...]
    """The paths that patterns see: none below `parametrizations`, which run at every read."""


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """Name one parameter of a tree."""

    names: tuple[str, ...]
    """Its full paths, the one met first in front."""

    places: tuple[tuple[nn.Module, str], ...]
    """Each module that has it, with the name it has there."""

    parameter: nn.Parameter
    """The parameter, which may be uninitialized in a lazy module."""


def find_wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module that `module` wraps, or None where it is no wrapper of torch's."""
    children = module._modules
    if not children or _ATTRIBUTES.isdisjoint(children.keys()):
        return None
    for kind in type(module).__mro__:
        attribute = WRAPPED_ATTRIBUTES.get(kind.__name__)
        if attribute is not None and kind.__module__.startswith("torch."):
            return children.get(attribute)
    return None


def unwrap(module: nn.Module) -> nn.Module:
    """Return the innermost module behind torch's wrappers."""
    while (wrapped := find_wrapped(module)) is not None:
        module = wrapped
    return module


class ModuleTree:
    """Walk a model once and find its modules and parameters by name, identity or pattern."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise UnsupportedModel(f"a model is an `nn.Module`, not `{type(model).__name__}`")
        self.root = unwrap(model)
        self.wrappers: list[nn.Module] = []
        # Entries are made when asked for: most uses name few modules of a large model.
        self._modules: dict[str, nn.Module] = {}
        self._names: dict[int, list[str]] = {}
        self._hidden: set[str] = set()
        self._walk(model, "", set(), False)

    @functools.cached_property
    def modules(self) -> list[nn.Module]:
        """List the modules in the order of `named_modules`, each once, without their names."""
        return [self._modules[names[0]] for names in self._names.values()]

    def is_current(self, path: str) -> bool:
        """Tell whether the model still has the same module at a path."""
        module = self.root
        has_wrappers = bool(self.wrappers)
        for name in path.split(".") if path else ():
            child = module._modules.get(name)
            if child is None:
                return False
            module = unwrap(child) if has_wrappers else child
        return module is self._modules.get(path)

    @functools.cached_property
    def entries(self) -> list[ModuleEntry]:
        """List the modules in the order of `named_modules`, each once."""
        return [self._entry(self._modules[names[0]]) for names in self._names.values()]

    @functools.cached_property
    def parameters(self) -> list[ParameterEntry]:
        """List the parameters in the order of `named_parameters`, tied ones once."""
        names: dict[int, list[str]] = {}
        places: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for path, module in self._modules.items():
            prefix = f"{path}." if path else ""
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                key = id(parameter)
                parameters.setdefault(key, parameter)
                names.setdefault(key, []).append(prefix + name)
                places.setdefault(key, {})[id(module), name] = (module, name)
        return [
            ParameterEntry(tuple(names[key]), tuple(places[key].values()), parameter)
            for key, parameter in parameters.items()
        ]

    def find(self, path: str) -> ModuleEntry | None:
        """Return the module of that exact path, by any of its names."""
        module = self._modules.get(path)
        return None if module is None else self._entry(module)

    def find_parameter(self, path: str) -> ParameterEntry | None:
        """Return the parameter of that exact path, by any of its names."""
        return self._parameter_by_name.get(path)

    def entry_of(self, module: nn.Module) -> ModuleEntry | None:
        """Return the entry of a module of the model, or of what it wraps."""
        module = unwrap(module)
        return self._entry(module) if id(module) in self._names else None

    def select(self, is_match: Callable[[str], object]) -> list[ModuleEntry]:
        """Return the modules with a matching name, in model order."""
        hidden = self._hidden
        found = [
            module
            for name, module in self._modules.items()
            if is_match(name) and name not in hidden
        ]
        if len(self._names) != len(self._modules):
            found = sorted({id(module): module for module in found}.values(), key=self.position)
        return [self._entry(module) for module in found]

    def select_parameters(self, is_match: Callable[[str], object]) -> list[ParameterEntry]:
        """Return the parameters with a matching name, in model order."""
        return [entry for entry in self.parameters if any(map(is_match, entry.names))]

    def position(self, module: nn.Module) -> int:
        """Return the place of a module in model order."""
        return self._positions[id(module)]

    @functools.cached_property
    def _positions(self) -> dict[int, int]:
        return {key: position for position, key in enumerate(self._names)}

    @functools.cached_property
    def _parameter_by_name(self) -> dict[str, ParameterEntry]:
        return {name: entry for entry in self.parameters for name in entry.names}

    def _entry(self, module: nn.Module) -> ModuleEntry:
        names = tuple(self._names[id(module)])
        if not self._hidden:
            return ModuleEntry(names, module, names)
        visible = tuple(name for name in names if name not in self._hidden)
        return ModuleEntry(names, module, visible)

    def _walk(self, module: nn.Module, path: str, above: set[int], is_hidden: bool) -> None:
        while (wrapped := find_wrapped(module)) is not None:
            if not any(module is wrapper for wrapper in self.wrappers):
                self.wrappers.append(module)
            module = wrapped
        key = id(module)
        if key in above:
            return
        self._record(module, path, is_hidden)
        children = module._modules
        if not children or len(self._names[key]) > _MOST_NAMES_OF_PARENT:
            return
        above.add(key)
        prefix = f"{path}." if path else ""
        modules, names = self._modules, self._names
        for name, child in children.items():
            if child is None:
                continue
            if not child._modules:
                if is_hidden or id(child) in names:
                    self._record(child, prefix + name, is_hidden)
                else:
                    modules[prefix + name] = child
                    names[id(child)] = [prefix + name]
                continue
            hides = is_hidden or (name == "parametrizations" and _is_parametrizations(child))
            self._walk(child, prefix + name, above, hides)
        above.discard(key)

    def _record(self, module: nn.Module, path: str, is_hidden: bool) -> None:
        self._modules[path] = module
        key = id(module)
        if key in self._names:
            self._names[key].append(path)
        else:
            self._names[key] = [path]
        if is_hidden:
            self._hidden.add(path)


def _is_parametrizations(module: nn.Module) -> bool:
    return any(isinstance(child, ParametrizationList) for child in module._modules.values())
