"""How many graphs the compiler makes of a function: as many as it may for each set of listeners.

Who listens takes graphs of its own, and they stay when it has gone, to serve whoever asks for the
same. Counted with all others they would use up `torch._dynamo.config.recompile_limit`, and with
`fullgraph=True` the model could not be called with anything new any more.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator
from types import MethodType
from typing import Any

from torch import nn

from hookline._compiler import list_graphs
from hookline.hooks.module_hooks import PostHook

_DEEPEST = 8

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
    code = frame.f_code
    values = [*frame.f_locals.values(), *(frame.f_globals.get(name) for name in code.co_names)]
    owners = (one.__self__ if isinstance(one, MethodType) else one for one in values)
    models = dict.fromkeys(one for one in owners if isinstance(one, nn.Module))
    return tuple(one for model in models for one in _list_listeners(model))


def _list_listeners(model: nn.Module) -> Iterator[Hashable]:
    for path, module in model.named_modules():
        for hook in module._forward_hooks.values():
            if type(hook) is PostHook:
                yield path, _describe(hook.junction.traced, _DEEPEST)
        forward = module.__dict__.get("forward")
        if hasattr(forward, "hookline_original"):
            yield path, getattr(forward, "__code__", None)


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
