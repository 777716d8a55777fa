"""What it costs to see variables and operations inside forward, and to set that up.

Each variant has a copy of the model to itself, with a capture or an edit that stays open while all
are measured and is emptied after each call: the figures are what a training loop pays.
"""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import peers
import torch
from models import make_gpt
from tables import Table, judge, tabulate
from timing import Variant, measure
from torch import Tensor, nn

import hookline as hl

ONE, TWELVE = "h.3.attn@weights", "h.*.attn@weights"
OPERATION, OPERATIONS = "h.3.attn/softmax", "h.*.attn/softmax"
ALL = ("h.*@*", "h.*.attn@*", "h.*.mlp@*")


def measure_inside(rounds: int, with_peers: bool) -> Table:
    """Capture and edit inside the 12 blocks in a forward pass with grad."""
    base, tokens = make_gpt()
    check(base, tokens)
    plain = "plain"
    with contextlib.ExitStack() as stack:

        def run(model: nn.Module) -> Callable[[], Tensor]:
            return lambda: model(tokens)  # type: ignore[no-any-return]

        def captured(*where: str) -> Callable[[], None]:
            model = copy.deepcopy(base)
            got = stack.enter_context(hl.capture(model, *where))
            stack.callback(model, tokens)  # the capture ends with something in it

            def call() -> None:
                model(tokens)
                got.clear()

            return call

        def edited(where: str) -> Callable[[], Tensor]:
            model = copy.deepcopy(base)
            stack.enter_context(hl.edit(model, {where: hl.scale(1.0)}))
            return run(model)

        hooked = copy.deepcopy(base)
        for module in hooked.modules():
            module.register_forward_hook(lambda *given: None)
        variants = [
            Variant(plain, run(copy.deepcopy(base))),
            Variant("another copy, untouched (noise)", run(copy.deepcopy(base))),
            Variant("no-op torch hook on every module", run(hooked)),
            Variant("1 variable captured", captured(ONE), against=plain, target=1.03),
            Variant("1 variable edited", edited(ONE), against=plain),
            Variant("12 layers' variable captured", captured(TWELVE), against=plain, target=1.06),
            Variant("all variables captured", captured(*ALL), against=plain, target=1.20),
            Variant("1 operation captured", captured(OPERATION), against=plain, target=1.10),
            Variant("1 operation edited", edited(OPERATION), against=plain),
            Variant(
                "12 layers' operation captured", captured(OPERATIONS), against=plain, target=1.45
            ),
        ]
        title = "inside: variables and operations of a forward pass with grad"
        table = tabulate(title, measure(variants, rounds=rounds))
    skipped = ["Peers are measured with --peers."]
    if with_peers:  # apart, and seldom: some take a second for a call, and leave torch slower
        more, skipped = peers.inside_variants(base, tokens)
        measured = measure([Variant(plain, run(base)), *more], rounds=6, calls=2)
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
