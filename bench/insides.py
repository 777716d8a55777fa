"""What it costs to see variables and operations inside forward, and to set that up.

Every capture is kept open and emptied after each call: the figures are what a training loop pays.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers
import torch
from models import make_gpt
from tables import Table, judge, tabulate
from timing import Variant, measure
from torch import Tensor, nn

import hookline as hl

ONE, TWELVE = "h.3.attn@weights", "h.*.attn@weights"
ALL = ("h.*@*", "h.*.attn@*", "h.*.mlp@*")


def measure_inside(rounds: int, with_peers: bool) -> Table:
    """Capture and edit inside the 12 blocks in a forward pass with grad."""
    model, tokens = make_gpt()
    check(model, tokens)

    def kept(*where: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with hl.capture(model, *where) as got:
                opened.append(got)
                yield
                model(tokens)  # the block ends with something captured
            opened.clear()

        return around

    opened: list[hl.Captured] = []

    def run() -> None:
        model(tokens)
        if opened:
            opened[0].clear()

    def edited(where: str, action: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        return lambda: hl.edit(model, {where: action})

    def forward() -> Tensor:
        return model(tokens)  # type: ignore[no-any-return]

    hook = [module for module in model.modules() if not isinstance(module, nn.ModuleList)]

    @contextlib.contextmanager
    def hooks_everywhere() -> Iterator[None]:
        handles = [one.register_forward_hook(lambda *given: None) for one in hook]
        yield
        for handle in handles:
            handle.remove()

    plain = "plain"
    variants = [
        Variant(plain, forward),
        Variant("no-op torch hook on every module", forward, hooks_everywhere),
        Variant("1 variable captured", run, kept(ONE), against=plain, target=1.03),
        Variant("1 variable edited", forward, edited(ONE, hl.scale(1.0)), against=plain),
        Variant("12 layers' variable captured", run, kept(TWELVE), against=plain, target=1.06),
        Variant("all variables captured", run, kept(*ALL), against=plain, target=1.20),
        Variant("1 operation captured", run, kept("h.3.attn/softmax"), against=plain, target=1.10),
        Variant(
            "1 operation edited",
            forward,
            edited("h.3.attn/softmax", hl.scale(1.0)),
            against=plain,
        ),
        Variant(
            "12 layers' operation captured",
            run,
            kept("h.*.attn/softmax"),
            against=plain,
            target=1.45,
        ),
    ]
    title = "inside: variables and operations of a forward pass with grad"
    table = tabulate(title, measure(variants, rounds=rounds))
    skipped = ["Peers are measured with --peers."]
    if with_peers:  # apart, and seldom: some take a second for a call, and leave torch slower
        more, skipped = peers.inside_variants(model, tokens)
        measured = measure([Variant(plain, forward), *more], rounds=6, calls=2)
        table.rows += tabulate(title, measured).rows[1:]
    table.notes += [*skipped, set_up_note()]
    return table


def check(model: nn.Module, tokens: Tensor) -> None:
    """Raise unless all ways see the same, and nothing changes."""
    expected = model(tokens)
    with hl.capture(model, *ALL, "h.*.attn/softmax") as got:
        assert torch.equal(model(tokens), expected)
    for index in range(12):
        by_name, by_operation = got[f"h.{index}.attn@weights"], got[f"h.{index}.attn/softmax"]
        assert torch.equal(by_name, by_operation)


SET_UP = """
import gc, time, torch, hookline as hl
from models import MLP, Attention

def set_up(module, address):
    start = time.perf_counter()
    handle = hl.edit(module, {address: lambda value, at: value})
    took = time.perf_counter() - start
    handle.remove()
    return took * 1000

set_up(MLP(), "@return")  # what any first use imports
gc.collect()
gc.freeze()  # what torch made at import is not searched again while this is timed
module = Attention()
cold = set_up(module, "@weights")
cached = sorted(set_up(module, "@weights") for _ in range(100))[50]
torch_cold = set_up(torch.nn.MultiheadAttention(8, 2), "@multi_head_attention_forward.q_scaled")
print(cold, cached, torch_cold)
"""


def set_up_note() -> str:
    """Time the set-up of one module in a new process: the first of its class, and again."""
    paths = [Path(__file__).parent, Path(hl.__file__).parent.parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", SET_UP]
    runs = []
    for _ in range(5):
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        runs.append([float(word) for word in ended.stdout.split()])
    cold, cached, torch_cold = (statistics.median(column) for column in zip(*runs, strict=True))
    return (
        f"Set-up of one variable of one module, all of `hl.edit`: {cold:.1f} ms cold "
        f"({judge(cold, 10)}), {cached:.2f} ms when its code is known ({judge(cached, 0.2)}); "
        f"of `multi_head_attention_forward` in torch's own file {torch_cold:.1f} ms cold."
    )
