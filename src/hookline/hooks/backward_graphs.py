"""Keep the operators in the backward that torch's compiled autograd makes one graph of.

It copies the graphs of compiled backwards into one of its own, which the compiler traces again.
What puts effects in order is not traced twice: it would be left out there. So the copy has plain
calls of the operators, and the second trace puts them in order.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
from typing import Any

import torch
from torch import fx

_TOKEN, _CALLED, _FIRST = range(3)
"""Where, among the arguments of what puts a call in order, its order, itself and its own are."""


@functools.cache
def keep_in_compiled_autograd() -> None:
    """Have compiled autograd take graphs of backwards without their order of effects."""
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    extract = getattr(module, "extract_bw_module", None)
    if extract is None:
        return

    @functools.wraps(extract)
    def extract_plainly(function: Any) -> Any:
        return call_plainly(extract(function))

    module.extract_bw_module = extract_plainly


def call_plainly(module: Any) -> Any:
    """Give a graph in which the operators are called as any others; the same if it has none."""
    if not isinstance(module, fx.GraphModule) or not any(map(_is_ordered, module.graph.nodes)):
        return module
    graph = copy.deepcopy(module.graph)
    for node in list(graph.nodes):
        if _is_ordered(node):
            _unwrap(graph, node)
    return fx.GraphModule(module, graph)


def _is_ordered(node: fx.Node) -> bool:
    """Tell whether a node calls one of the operators, and puts it in order."""
    if node.op != "call_function" or node.target is not torch.ops.higher_order.with_effects:
        return False
    called: Any = node.args[_CALLED]
    return bool(called.namespace == "hookline")


def _unwrap(graph: fx.Graph, node: fx.Node) -> None:
    """Put a plain call in the place of one with a token."""
    with graph.inserting_before(node):
        called: Any = node.args[_CALLED]
        plain = graph.call_function(called, node.args[_FIRST:], node.kwargs)
    for part in list(node.users):
        assert part.target is operator.getitem
        given: Any = node.args[_TOKEN] if part.args[1] == 0 else plain
        part.replace_all_uses_with(given)
        graph.erase_node(part)
    graph.erase_node(node)
