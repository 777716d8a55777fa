"""Give every module and parameter of a model its canonical names.

Wrappers (`torch.compile`, DDP, FSDP, activation checkpointing, weight averaging) do not show: a
wrapper and what it wraps have one name, and the innermost module has it. A shared module has a
name for each way that leads to it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from hookline._errors import UnsupportedModel
from hookline.addresses.pattern import compile_path, read_steps

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

_HIDDEN = "parametrizations"

# Modules that hold each other have names without end; no real model shares one block this often.
_MOST_NAMES_OF_PARENT = 1024


class ModuleEntry(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class Facts:
    """What one walk of a model found, remembered so that a later tree need not walk again.

    They may be out of date when modules were exchanged since, so nothing that must be right may
    rest on them alone.
    """

    is_shared: bool
    """Whether a module has several names."""

    has_inplace: bool
    """Whether a module is set to change its input in place, as `nn.ReLU(inplace=True)`."""

    kinds: frozenset[type]
    """The classes of the modules."""


_facts: weakref.WeakKeyDictionary[nn.Module, Facts] = weakref.WeakKeyDictionary()


class _Walk:
    """Every module of a model by path, and every path of a module."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.names: dict[int, list[str]] = {}
        self.hidden: set[str] = set()
        self.wrappers: list[nn.Module] = []
        self._visit(model, "", set(), False)

    def _visit(self, module: nn.Module, path: str, above: set[int], is_hidden: bool) -> None:
        while (wrapped := find_wrapped(module)) is not None:
            if not any(module is wrapper for wrapper in self.wrappers):
                self.wrappers.append(module)
            module = wrapped
        key = id(module)
        if key in above:
            return
        self._record(module, path, is_hidden)
        children = module._modules
        if not children or len(self.names[key]) > _MOST_NAMES_OF_PARENT:
            return
        above.add(key)
        prefix = f"{path}." if path else ""
        for name, child in children.items():
            if child is None:
                continue
            if not child._modules:
                self._record(child, prefix + name, is_hidden)
                continue
            hides = is_hidden or (name == _HIDDEN and _is_parametrizations(child))
            self._visit(child, prefix + name, above, hides)
        above.discard(key)

    def _record(self, module: nn.Module, path: str, is_hidden: bool) -> None:
        self.modules[path] = module
        key = id(module)
        if key in self.names:
            self.names[key].append(path)
        else:
            self.names[key] = [path]
        if is_hidden:
            self.hidden.add(path)


class ModuleTree:
    """Find the modules and parameters of a model by name, identity or pattern.

    The model is walked when something asks for all of it. Where a walk before has shown that every
    module has one name, a path or a simple pattern is followed step by step instead.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise UnsupportedModel(f"a model is an `nn.Module`, not `{type(model).__name__}`")
        self.model = model
        """The model as it was given, wrappers and all."""
        self.root = unwrap(model)
        self._facts = _facts.get(self.root) if type(self.root).__hash__ is not None else None
        self._can_step = self._facts is not None and not self._facts.is_shared

    @functools.cached_property
    def _walk(self) -> _Walk:
        walk = _Walk(self.model)
        self._can_step = False
        modules = walk.modules.values()
        flags = [m.__dict__["inplace"] for m in modules if "inplace" in m.__dict__]
        self._facts = Facts(
            is_shared=len(walk.names) != len(walk.modules),
            has_inplace=any(isinstance(flag, int) and flag for flag in flags),
            kinds=frozenset(map(type, modules)),
        )
        if type(self.root).__hash__ is not None:
            _facts[self.root] = self._facts
        return walk

    @property
    def facts(self) -> Facts:
        """What the latest walk of this model found."""
        if self._facts is None:
            self._walk  # noqa: B018  walking finds them
            assert self._facts is not None
        return self._facts

    @property
    def wrappers(self) -> list[nn.Module]:
        """List the wrappers met."""
        return self._walk.wrappers

    @functools.cached_property
    def modules(self) -> list[nn.Module]:
        """List the modules in the order of `named_modules`, each once, without their names."""
        walk = self._walk
        return [walk.modules[names[0]] for names in walk.names.values()]

    @functools.cached_property
    def entries(self) -> list[ModuleEntry]:
        """List the modules in the order of `named_modules`, each once."""
        return [self._entry(module) for module in self.modules]

    def locate(self, path: str) -> nn.Module | None:
        """Give the module at a path as the model is now; None where the path leads nowhere."""
        found = _step(self.root, [(name, None) for name in path.split(".")] if path else [])
        return found[0][1] if found else None

    @functools.cached_property
    def parameters(self) -> list[ParameterEntry]:
        """List the parameters in the order of `named_parameters`, tied ones once."""
        names: dict[int, list[str]] = {}
        places: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for path, module in self._walk.modules.items():
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
        if self._can_step:
            found = _step(self.root, [(name, None) for name in path.split(".")] if path else [])
            if found:
                return ModuleEntry((path,), found[0][1], (path,))
        module = self._walk.modules.get(path)
        return None if module is None else self._entry(module)

    def find_parameter(self, path: str) -> ParameterEntry | None:
        """Return the parameter of that exact path, by any of its names."""
        return self._parameter_by_name.get(path)

    def entry_of(self, module: nn.Module) -> ModuleEntry | None:
        """Return the entry of a module of the model, or of what it wraps."""
        module = unwrap(module)
        return self._entry(module) if id(module) in self._walk.names else None

    def select(self, path: str) -> list[ModuleEntry]:
        """Return the modules with a name that matches a pattern, in model order."""
        steps = read_steps(path) if self._can_step else None
        if steps is not None:
            found = _step(self.root, steps, hides=True)
            if found:
                return [ModuleEntry((name,), module, (name,)) for name, module in found]
        is_match = compile_path(path)
        walk = self._walk
        modules = [
            module
            for name, module in walk.modules.items()
            if is_match(name) and name not in walk.hidden
        ]
        if len(walk.names) != len(walk.modules):
            modules = sorted({id(one): one for one in modules}.values(), key=self.position)
        return [self._entry(module) for module in modules]

    def select_parameters(self, is_match: Callable[[str], object]) -> list[ParameterEntry]:
        """Return the parameters with a matching name, in model order."""
        return [entry for entry in self.parameters if any(map(is_match, entry.names))]

    def position(self, module: nn.Module) -> int:
        """Return the place of a module in model order."""
        return self._positions[id(module)]

    @functools.cached_property
    def _positions(self) -> dict[int, int]:
        return {key: position for position, key in enumerate(self._walk.names)}

    @functools.cached_property
    def _parameter_by_name(self) -> dict[str, ParameterEntry]:
        return {name: entry for entry in self.parameters for name in entry.names}

    def _entry(self, module: nn.Module) -> ModuleEntry:
        walk = self._walk
        names = tuple(walk.names[id(module)])
        if not walk.hidden:
            return ModuleEntry(names, module, names)
        visible = tuple(name for name in names if name not in walk.hidden)
        return ModuleEntry(names, module, visible)


class Trails:
    """The modules on the way from the root to some paths, to notice later what was exchanged."""

    def __init__(self, tree: ModuleTree, check: Callable[[nn.Module, str], None]) -> None:
        self._tree = tree
        self._check = check
        self._modules: dict[str, nn.Module] = {}
        self._links: list[tuple[str, nn.Module | None, str, nn.Module, int]] = []
        """For each path: the module above, the name there, the module, and how many it holds."""

    def add(self, path: str) -> None:
        """Follow a path, and check each module on the way, wrappers too."""
        if path in self._modules:
            return
        parent: nn.Module | None = None
        module: nn.Module | None = self._tree.model
        above, _, name = path.rpartition(".")
        if path:
            if above not in self._modules:
                self.add(above)
            parent = self._modules.get(above)
            module = None if parent is None else parent._modules.get(name)
        while module is not None:
            self._check(module, path)
            wrapped = find_wrapped(module) if module._modules else None
            if wrapped is None:
                self._modules[path] = module
                self._links.append((path, parent, name, module, len(module._modules)))
                return
            module = wrapped

    def moved(self) -> list[str]:
        """List the paths where another module is now."""
        found = []
        for path, parent, name, module, _ in self._links:
            if parent is not None:
                there = parent._modules.get(name)
                if there is not module and (there is None or unwrap(there) is not module):
                    found.append(path)
        return found

    def are_current(self) -> bool:
        """Tell whether the same modules are there and none was added; check them again."""
        if self._tree.model is not self._tree.root:
            self._check(self._tree.model, "")
        for path, _, _, module, size in self._links:
            if len(module._modules) != size:
                return False
            if module._compiled_call_impl is not None:
                self._check(module, path)
        return not self.moved()


def _step(
    root: nn.Module,
    steps: Sequence[tuple[str | None, Callable[[str], object] | None]],
    *,
    hides: bool = False,
) -> list[tuple[str, nn.Module]]:
    """Follow the segments of a path or pattern down from the root.

    `hides` leaves out what patterns do not see.
    """
    found = [("", root)]
    for literal, is_match in steps:
        below: list[tuple[str, nn.Module]] = []
        for path, module in found:
            prefix = f"{path}." if path else ""
            if is_match is None:
                child = module._modules.get(literal or "")
                is_hidden = hides and literal == _HIDDEN
                if child is not None and not (is_hidden and _is_parametrizations(child)):
                    below.append((f"{prefix}{literal}", unwrap(child)))
                continue
            for name, child in module._modules.items():
                if child is None or not is_match(name):
                    continue
                if name == _HIDDEN and _is_parametrizations(child):
                    continue
                below.append((prefix + name, unwrap(child)))
        found = below
    return found


def _is_parametrizations(module: nn.Module) -> bool:
    return any(isinstance(child, ParametrizationList) for child in module._modules.values())
