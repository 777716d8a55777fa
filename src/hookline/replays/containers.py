"""Copies of the containers that a module keeps its state in, so that a call may change them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from torch import nn

INTERNAL = frozenset([*vars(nn.Module()), "forward", "__getstate__"])
"""What every module has, and what hookline may have put there."""

CONTAINERS = (list, dict, tuple, set, deque, OrderedDict, defaultdict)

_MOST_ITEMS = 10_000
"""Longer containers are not copied."""


def copy_containers(value: Any, copy: Callable[[Any], Any], seen: dict[int, Any]) -> Any:
    """Copy plain containers, those in them too; what they hold is what `copy` makes of it.

    `seen` has the copies by the id of what was copied: what was one container stays one.
    """
    if type(value) not in CONTAINERS:
        return copy(value)
    if id(value) in seen or len(value) > _MOST_ITEMS:
        return seen.get(id(value), value)
    if isinstance(value, tuple):
        return tuple([copy_containers(item, copy, seen) for item in value])
    made: Any
    if isinstance(value, deque):
        made = deque(maxlen=value.maxlen)
    elif isinstance(value, defaultdict):
        made = defaultdict(value.default_factory)
    else:
        made = type(value)()
    seen[id(value)] = made
    if isinstance(value, dict):
        for key, item in value.items():
            made[key] = copy_containers(item, copy, seen)
    elif isinstance(value, set):
        made |= value
    else:
        made.extend([copy_containers(item, copy, seen) for item in value])
    return made
