"""How many graphs the compiler makes of a function: as many as it may for each set of listeners.

Who listens takes graphs of its own, and they stay when it has gone, to serve whoever asks for the
same. Counted with all others they would use up `torch._dynamo.config.recompile_limit`, and with
`fullgraph=True` the model could not be called with anything new any more.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from types import MethodType, ModuleType
from typing import Any

from torch import nn

from hookline._compiler import list_graphs
from hookline.hooks.module_hooks import PostHook

_DEEPEST = 8

_FOREIGN = ("builtins", "torch")
"""Where the classes are defined whose instances hold no models."""

_NOBODY: Hashable = ()

_NOTE = (
    "hookline: what listens takes graphs of its own, and they stay when it has gone. "
    "torch._dynamo.config.recompile_limit and accumulated_recompile_limit say how many there may "
    "be; torch.compiler.reset() forgets all of them"
)

_listeners: weakref.WeakKeyDictionary[Any, Hashable] = weakref.WeakKeyDictionary()
"""Whom a graph was made for, by its guards."""


def count_graphs_per_limit(code: Any) -> int:
    """Count the graphs of a function that count against one limit, where there are most."""
    counted = Counter(_listeners.get(one.guard_manager, _NOBODY) for one in list_graphs(code))
    return max(counted.values(), default=0)


def part_limits() -> None:
    """Have the compiler count apart what it makes for different listeners, where it is loaded."""
    if "torch._dynamo" in sys.modules:
        _patch()


@functools.cache
def _patch() -> None:
    convert: Any = importlib.import_module("torch._dynamo.convert_frame")
    errors: Any = importlib.import_module("torch._dynamo.exc")
    field = "num_cache_entries_with_same_id_matched_objs"
    measure, compile_frame = convert.compute_cache_size, convert.ConvertFrameAssert.__call__
    if field not in convert.CacheSizeRelevantForFrame.__dataclass_fields__:
        return

    @functools.wraps(measure)
    def measure_apart(frame: Any, *args: Any) -> Any:
        size = measure(frame, *args)
        now = _find_listeners(frame)
        made_for = [_listeners.get(one.guard_manager, _NOBODY) for one in list_graphs(frame.f_code)]
        others = sum(one != now for one in made_for)
        setattr(size, field, max(getattr(size, field) - others, 0))
        return size

    @functools.wraps(compile_frame)
    def compile_apart(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        now = _find_listeners(frame)
        try:
            result = compile_frame(self, frame, *args, **kwargs)
        except errors.FailOnRecompileLimitHit as error:
            # Their guards are asked, as a model may have been out of sight.
            if any("hookline" in str(one.guard_manager) for one in list_graphs(frame.f_code)):
                error.add_note(_NOTE)
            raise
        graph = getattr(result, "guarded_code", None)
        if graph is not None and now != _NOBODY:
            _listeners[graph.guard_manager] = now
        return result

    convert.compute_cache_size = measure_apart
    convert.ConvertFrameAssert.__call__ = compile_apart


def _find_listeners(frame: Any) -> Hashable:
    """Say who listens, and at what, in the models that a function has at hand."""
    with contextlib.suppress(Exception):  # what users made may raise wherever it is looked at
        models = dict.fromkeys(_list_models(frame))
        return tuple(one for model in models for one in _list_listeners(model))
    return _NOBODY


def _list_models(frame: Any) -> Iterator[nn.Module]:
    names = frame.f_code.co_names
    for one in [*frame.f_locals.values(), *(frame.f_globals.get(name) for name in names)]:
        owner = one.__self__ if type(one) is MethodType else one
        for value in (owner, *_list_parts(owner)):
            if issubclass(type(value), nn.Module):
                yield value


def _list_parts(owner: Any) -> Iterable[Any]:
    """Give what a container holds, or an object of a user's class."""
    kind = type(owner)
    if kind in (list, tuple):
        return tuple(owner)
    if kind is not dict:
        is_plain = kind.__module__ in _FOREIGN or issubclass(kind, (nn.Module, type, ModuleType))
        owner = None if is_plain else getattr(owner, "__dict__", None)
    return tuple(owner.values()) if type(owner) is dict else ()


def _list_listeners(model: nn.Module) -> Iterator[Hashable]:
    for path, module in _walk(model, "", set()):
        own = module.__dict__
        for hook in tuple(own.get("_forward_hooks", {}).values()):
            if type(hook) is PostHook:
                traced = hook.junction.traced
                is_short = getattr(traced, "shown", None) is not None  # nearly always, in a watch
                yield path, traced.asked if is_short else _describe(traced, _DEEPEST)
        forward = own.get("forward")
        if hasattr(forward, "hookline_original"):
            yield path, getattr(forward, "__code__", None)


def _walk(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Give a module and those in it, whatever its class makes of `named_modules`."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, inner in tuple((module.__dict__.get("_modules") or {}).items()):
        if inner is not None:
            yield from _walk(inner, f"{path}.{name}", seen)


def _describe(thing: Any, depth: int) -> Hashable:
    """Say what an object consists of, whatever numbers and tensors there are in it."""
    if thing is None or isinstance(thing, str | bool):
        return thing
    kind = type(thing)
    if not depth:
        return kind.__qualname__
    parts: Any = ()
    if isinstance(thing, tuple | list):
        parts = thing
    elif isinstance(thing, dict):
        parts = [part for pair in thing.items() for part in pair]
    elif kind.__module__.startswith("hookline."):
        slots = [name for one in kind.__mro__ for name in getattr(one, "__slots__", ())]
        names = [*slots, *getattr(thing, "__dict__", ())]
        parts = [getattr(thing, name, None) for name in names if name != "__weakref__"]
    return (kind.__qualname__, *(_describe(one, depth - 1) for one in parts))
