"""Values of a graph that are shown several in one call: which, in which order, and when not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import Stack
from torch import Tensor, fx

import hookline as hl
from hookline.hooks.operators import _pass_by
from hookline.hooks.together import BETWEEN, show_together

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
with_effects = torch.ops.higher_order.with_effects
Shown = list[list[str]]


def _make(
    *steps: Callable[[fx.Graph, fx.Node], None] | str, size: int = 4, is_replayed: bool = False
) -> Shown:
    """Write a graph that shows values at these places, and give the places of each call."""
    graph = fx.Graph()
    token, x, key = (graph.placeholder(name) for name in ("token", "x", "key"))
    for step in steps:
        if not isinstance(step, str):
            step(graph, x)
            continue
        value = graph.call_function(torch.ops.aten.sin.default, (x,))
        value.meta["val"] = torch.empty(size, device="meta")
        shown = graph.call_function(with_effects, (token, _pass_by, value, key, step))
        shown.meta["val"] = ("token",)
        token = graph.call_function(operator.getitem, (shown, 0))
    graph.output((token,))
    show_together(graph, is_replayed=is_replayed)
    graph.lint()
    found = []
    for node in graph.nodes:
        if node.target is with_effects:
            places = str(node.args[-1]).split(BETWEEN)
            is_one = node.args[1] is _pass_by
            assert is_one == (len(places) == 1)
            found.append(places)
    return found


def test_values_are_shown_eight_at_once() -> None:
    names = [str(number) for number in range(10)]
    assert _make(*names) == [names[:8], names[8:]]


def test_a_cuda_graph_is_ended_for_many_at_once() -> None:
    names = [str(number) for number in range(20)]
    assert _make(*names, is_replayed=True) == [names]
    assert _make("a", "b", "c", size=1 << 28, is_replayed=True) == [["a", "b"], ["c"]]


def test_large_values_are_not_held_for_others() -> None:
    assert _make("a", "b", "c", size=1 << 25) == [["a", "b"], ["c"]]
    assert _make("a", "b", size=1 << 27) == [["a"], ["b"]]


def _write(graph: fx.Graph, x: fx.Node) -> None:
    graph.call_function(torch.ops.aten.copy_.default, (x, x))


def test_nothing_is_shown_after_memory_is_written_to() -> None:
    assert _make("a", "b", _write, "c", "d") == [["a", "b"], ["c", "d"]]


def test_a_training_shows_them_so(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    packet: Any = torch.ops.hookline.pass_all
    run = packet.run

    def count(values: list[Tensor], keys: list[Tensor], places: str) -> None:
        calls.append(len(values))
        run(values, keys, places)

    monkeypatch.setattr(packet, "run", count)
    model = Stack(2)
    compiled = torch.compile(model, fullgraph=True)
    with hl.watch(model, None, rules=False, units_every=0, parameters=None, updates=False) as w:
        compiled(torch.randn(3, 6)).sum().backward()
    rows = [str(row["site"]) for row in w.history.sites()]
    assert calls
    assert max(calls) <= 8
    assert sum(calls) > len(rows) / 2
    assert {f"blocks.1.act:output{end}" for end in ("", ".grad")} <= set(rows)
