"""Have several values of a compiled graph shown in one call, for a call takes its time."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

BETWEEN = "\x04"
"""What stands between the places of several values that are shown in one call."""
LOOKING = ("pass_by", "hand_over", "hand_back", "note")
"""The operators that are given a value to look at, or a key alone."""
VALUE = 2
"""Where the value stands among the arguments of a call."""
_ROOM = 8, 1 << 28
"""How many values are shown in one call, and how many bytes of them are held for that."""
_ROOM_REPLAYED = 256, 1 << 31
"""The same where CUDA graphs are replayed: each call ends one, and what they hold stays held."""
_PURE = ("aten", "prims", "hookline")
"""Whose operations write over nothing by themselves, but for those named below."""


def is_looking(node: fx.Node) -> bool:
    """Tell whether a node is a call of an operator that is given a value to look at."""
    if node.op != "call_function" or node.target is not torch.ops.higher_order.with_effects:
        return False
    called: Any = node.args[1]
    return called.namespace == "hookline" and called._opname in LOOKING


def show_together(graph: fx.Graph, *, is_replayed: bool = False) -> None:
    """Put one call in the place of some that come one after the other, all over a graph."""
    most, most_bytes = _ROOM_REPLAYED if is_replayed else _ROOM
    group: list[fx.Node] = []
    held = 0
    for node in list(graph.nodes):
        if is_looking(node) and node.args[1]._opname == "pass_by":
            size = _count_bytes(node.args[VALUE])
            if group and (len(group) == most or held + size > most_bytes):
                _join(graph, group)
                group, held = [], 0
            group.append(node)
            held += size
        elif group and _ends_group(node):
            _join(graph, group)
            group, held = [], 0
    _join(graph, group)


def _count_bytes(value: Any) -> int:
    """Give the bytes of a value, as far as its shape is known; none of what is held anyway."""
    shown = value.meta.get("val")
    if value.op == "placeholder" or not isinstance(shown, torch.Tensor):
        return 0
    sizes = [size if isinstance(size, int) else 1 for size in shown.shape]
    return math.prod(sizes) * shown.element_size()


def _ends_group(node: fx.Node) -> bool:
    """Tell whether no value may be shown later than this: it has an effect, or writes to memory.

    Or may come to do so: inductor has some operations write over what they are given, where nobody
    reads that any more.
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    called = node.target
    if not isinstance(called, torch._ops.OpOverload):
        return True
    name = called._opname
    may_write = "index_put" in name or "scatter" in name or called.namespace not in _PURE
    return bool(called._schema.is_mutable) or may_write


def _join(graph: fx.Graph, group: list[fx.Node]) -> None:
    """Put one call in the place of the last of some that follow each other."""
    if len(group) < 2:
        return
    first, last = group[0], group[-1]
    values, keys, places = zip(*(node.args[VALUE:] for node in group), strict=True)
    with graph.inserting_before(last):
        together = graph.call_function(
            torch.ops.higher_order.with_effects,
            (
                first.args[0],
                torch.ops.hookline.pass_all.default,
                list(values),
                list(keys),
                BETWEEN.join(places),
            ),
        )
    together.meta = dict(last.meta)
    last.replace_all_uses_with(together)
    for node in reversed(group):
        for token in list(node.users):
            graph.erase_node(token)
        graph.erase_node(node)
