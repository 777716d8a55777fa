"""Have inductor make the kernels that it would make without hookline's operators in the graph.

Which operations become one kernel depends on what stands near them, and on who else reads a value;
and in a kernel that does more, sums may be added up in another order. So the operators, and the
copies that are made for them, are taken out while kernels are put together.
"""

from __future__ import annotations

import functools
from typing import Any

_COPY = "hookline_copy"
_NAMES = "hookline_names"


def mark_copy(made: Any) -> None:
    """Remember that a buffer is a copy which only the operators read."""
    setattr(made, _COPY, True)


@functools.cache
def fuse_the_others() -> None:
    """Have inductor's scheduler see the operators only after it has put kernels together."""
    from torch._inductor.scheduler import Scheduler

    fuse = Scheduler.fuse_nodes

    @functools.wraps(fuse)
    def fuse_nodes(self: Any, nodes: list[Any]) -> list[Any]:
        own, others = _take_out(nodes)
        if not own:
            return fuse(self, nodes)
        for order, node in enumerate(others):  # what is nearer to what decides between equals
            node.min_order = node.max_order = order
        return _put_back(fuse(self, others), own)

    setattr(Scheduler, "fuse_nodes", fuse_nodes)  # noqa: B010


@functools.cache
def sort_the_others() -> None:
    """Have inductor's scheduler order kernels as it would without the operators.

    Where numbers are drawn at random in several ways, the order decides which are whose. It is made
    by the names of results, which have other numbers where there are more of them, and again by
    how much memory is held.
    """
    from torch._inductor import memory
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    sort, reorder = Scheduler.topological_sort_schedule, memory.reorder_for_peak_memory

    @functools.wraps(sort)
    def topological_sort_schedule(self: Any, nodes: list[Any]) -> list[Any]:
        names = _name_the_others(V.graph)
        if not names:
            return sort(self, nodes)
        own, others = _take_out(nodes)
        return _put_back(_sort(others, names), own)

    @functools.wraps(reorder)
    def reorder_for_peak_memory(nodes: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        own, others = _take_out(nodes)
        if not own:
            return reorder(nodes, *args, **kwargs)
        return _put_back(reorder(others, *args, **kwargs), own)

    setattr(Scheduler, "topological_sort_schedule", topological_sort_schedule)  # noqa: B010
    setattr(memory, "reorder_for_peak_memory", reorder_for_peak_memory)  # noqa: B010


def _name_the_others(graph: Any) -> dict[str, str]:
    """Give the names that results had if the operators were not there; none where they are not."""
    known: dict[str, str] | None = getattr(graph, _NAMES, None)
    if known is None:
        own = {
            result.get_name()
            for made in graph.operations
            if _is_ours(made) or _is_ours(_maker_of(made))
            for result in made.get_outputs()
        }
        names = [one.get_name() for one in graph.buffers]
        others = [name for name in names if name not in own]
        known = {name: f"buf{number}" for number, name in enumerate(others)} if own else {}
        setattr(graph, _NAMES, known)
    return known


def _sort(nodes: list[Any], names: dict[str, str]) -> list[Any]:
    """Order nodes as the scheduler does: what a node needs before it, by name."""
    makers = {name: node for node in nodes for name in node.get_buffer_names()}
    seen: set[Any] = set()
    found: list[Any] = []

    def visit(node: Any) -> None:
        if node in seen:
            return
        seen.add(node)
        needed = {dep.name for dep in node.unmet_dependencies if dep.name in makers}
        for name in sorted(needed, key=lambda name: names.get(name, name)):
            visit(makers[name])
        found.append(node)

    for node in nodes:
        visit(node)
    return found


@functools.cache
def tune_the_others() -> None:
    """Have inductor try its ways to run a kernel on those of the model alone, not on the copies."""
    from torch._inductor import config
    from torch._inductor.codegen.simd import SIMDScheduling

    write = SIMDScheduling.codegen_node

    @functools.wraps(write)
    def codegen_node(self: Any, node: Any) -> Any:
        if not getattr(node.node, _COPY, False):  # what was put together of several has None there
            return write(self, node)
        with config.patch({"triton.autotune_pointwise": False}):
            return write(self, node)

    setattr(SIMDScheduling, "codegen_node", codegen_node)  # noqa: B010


def _take_out(nodes: list[Any]) -> tuple[list[Any], list[Any]]:
    """Give the operators' nodes and all others; no own ones where others need what they make."""
    from torch._inductor import ir

    own: list[Any] = []
    others: list[Any] = []
    names: set[str] = set()
    for node in nodes:
        needed = {dep.name for dep in node.unmet_dependencies}
        is_part = isinstance(node.node, ir.MultiOutput) and bool(needed) and needed <= names
        if is_part or _is_ours(node.node):
            own.append(node)
            names |= set(node.get_buffer_names())
        elif needed & names:
            return [], nodes
        else:
            others.append(node)
    return own, others


def _maker_of(made: Any) -> Any:
    """Give what made something that is one of several results; None for all else."""
    from torch._inductor import ir

    return made.inputs[0] if isinstance(made, ir.MultiOutput) else None


def _is_ours(made: Any) -> bool:
    called = getattr(made, "op_overload", None)
    return getattr(made, _COPY, False) or getattr(called, "namespace", "") == "hookline"


def _put_back(fused: list[Any], own: list[Any]) -> list[Any]:
    """Put each of the operators' nodes after the last one that makes what it needs."""
    made = {name: at for at, node in enumerate(fused) for name in node.get_buffer_names()}
    following: dict[int, list[Any]] = {}
    for node in own:
        at = max((made.get(dep.name, -1) for dep in node.unmet_dependencies), default=-1)
        following.setdefault(at, []).append(node)
        made |= dict.fromkeys(node.get_buffer_names(), at)
    placed = list(following.get(-1, ()))
    for at, node in enumerate(fused):
        placed += [node, *following.get(at, ())]
    return placed
