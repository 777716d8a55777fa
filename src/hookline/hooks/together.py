"""Have several values of a compiled graph shown in one call, for a call takes its time.

No kernel can be made of what stands on both sides of a call. So where a model repeats itself, its
layers, the calls stand at the same places in each: else every layer would get kernels of its own,
and compiling them takes longer than all the rest.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

BETWEEN = "\x1c"
"""What stands between the places of several values that are shown in one call."""
LOOKING = ("pass_by", "hand_over", "hand_back", "note")
"""The operators that are given a value to look at, or a key alone."""
VALUE = 2
"""Where the value stands among the arguments of a call."""
_TOGETHER, _MOST_BYTES = 8, 1 << 28
"""How many values are shown in one call, and how many bytes of them are held for that."""
_LONGEST = 128
"""How many values a layer may have to be found out as one that is repeated."""


def is_looking(node: fx.Node) -> bool:
    """Tell whether a node is a call of an operator that is given a value to look at."""
    if node.op != "call_function" or node.target is not torch.ops.higher_order.with_effects:
        return False
    called: Any = node.args[1]
    return called.namespace == "hookline" and called._opname in LOOKING


def show_together(graph: fx.Graph) -> None:
    """Put one call in the place of some that come one after the other, all over a graph."""
    run: list[fx.Node] = []
    for node in list(graph.nodes):
        if is_looking(node) and node.args[1]._opname == "pass_by":
            run.append(node)
        elif run and _ends_run(node):
            _join_run(graph, run)
            run = []
    _join_run(graph, run)


def _join_run(graph: fx.Graph, run: list[fx.Node]) -> None:
    """Join calls that nothing keeps apart."""
    start = 0
    for layer in part_layers([_describe(node) for node in run]):
        sizes = [_count_bytes(node.args[VALUE]) for node in run[start : start + layer]]
        for count in _divide(sizes):
            _join(graph, run[start : start + count])
            start += count


def part_layers(values: Sequence[Hashable]) -> list[int]:
    """Part a sequence where it begins to repeat itself; give how long each part is.

    What comes before and after the repeated parts are parts as well. Short ones are put together.
    """
    length = len(values)
    for period in range(1, min(length // 2, _LONGEST) + 1):
        begin, end = _find_repeated(values, period)
        if 2 * (end - begin) < length:
            continue
        size = period * max(1, _TOGETHER // period)
        layers, rest = divmod(end - begin, size)
        parts = [begin, *[size] * layers, rest + length - end]
        return [one for one in parts if one]
    return [length] if length else []


def _find_repeated(values: Sequence[Hashable], period: int) -> tuple[int, int]:
    """Find where a sequence repeats itself longest after so many; give the begin and the end."""
    found = begin, end = 0, 0
    for at in range(len(values) - period):
        if values[at] != values[at + period]:
            begin = at + 1
        elif (end := at + 1) - begin > found[1] - found[0]:
            found = begin, end
    begin, end = found
    return (begin, end + period) if end - begin >= period else (0, 0)


def _divide(sizes: Sequence[int]) -> Iterator[int]:
    """Divide values into groups about as long; give how many are in each."""
    groups = max(-(-len(sizes) // _TOGETHER), -(-sum(sizes) // _MOST_BYTES), 1)
    most = -(-len(sizes) // groups)
    count = held = 0
    for size in sizes:
        if count and (count == most or held + size > _MOST_BYTES):
            yield count
            count = held = 0
        count += 1
        held += size
    if count:
        yield count


def _describe(node: fx.Node) -> Hashable:
    """Tell what is shown, as far as it is the same in every layer."""
    value: Any = node.args[VALUE]
    shown = value.meta.get("val")
    kind = (str(shown.shape), shown.dtype) if isinstance(shown, torch.Tensor) else None
    return value.op, str(value.target) if value.op == "call_function" else "", kind, node.args[4]


def _count_bytes(value: Any) -> int:
    """Give the bytes of a value, as far as its shape is known; none of what is held anyway."""
    shown = value.meta.get("val")
    if value.op == "placeholder" or not isinstance(shown, torch.Tensor):
        return 0
    sizes = [size if isinstance(size, int) else 1 for size in shown.shape]
    return math.prod(sizes) * shown.element_size()


def _ends_run(node: fx.Node) -> bool:
    """Tell whether no value may be shown later than this: it has an effect, or writes to memory."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return bool(node.target._schema.is_mutable)


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
