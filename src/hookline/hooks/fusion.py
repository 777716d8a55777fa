"""Have inductor make the kernels that it would make without hookline's operators in the graph.

Which operations become one kernel depends on what stands near them, and on who else reads a value;
and in a kernel that does more, sums may be added up in another order. So the operators, and the
copies that are made for them, are taken out while kernels are put together.
"""

from __future__ import annotations

import functools
from typing import Any

_COPY = "hookline_copy"


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
