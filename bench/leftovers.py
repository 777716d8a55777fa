"""What hookline costs where it does nothing: imported, closed, or keeping a part of a value."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
from models import make_gpt
from tables import Table, judge, tabulate
from timing import Variant, measure
from torch import nn
from torch.nn.modules import module as torch_module

import hookline as hl

MOST_IMPORT_MS = 60

# CPU time at the end of the imports, and how much of it hookline had.
PROBE = """
import time
import torch
before = time.process_time()
{more}
after = time.process_time()
print(after, after - before)
"""


def measure_import(starts: int) -> Table:
    """Start processes in turn that import torch, and torch and hookline."""
    programs = {"torch": "", "torch, hookline": "import hookline"}
    whole: dict[str, list[float]] = {name: [] for name in programs}
    own: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        # Compiled files as any second start has them, also where writing them is switched off.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        for start in range(starts + 1):
            for name, more in programs.items():
                total, part = _start(PROBE.format(more=more), environment)
                if start:
                    whole[name].append(total)
                    own += [part] if more else []
    table = Table("import: CPU time of a fresh process", ["import", "CPU min ms", "target"])
    table.rows = [[name, f"{min(times):.0f}", ""] for name, times in whole.items()]
    extra = min(whole["torch, hookline"]) - min(whole["torch"])
    table.rows.append(["hookline, as the difference", f"{extra:.0f}", ""])
    mark = judge(min(own), MOST_IMPORT_MS)
    table.rows.append(["hookline, inside the process", f"{min(own):.1f}", mark])
    table.notes = [f"{starts} starts each, in turn, after one that is not counted."]
    return table


def _start(program: str, environment: dict[str, str]) -> tuple[float, float]:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    total, part = map(float, done.stdout.split())
    return total * 1000, part * 1000


def measure_memory() -> Table:
    """Count the bytes behind the tensors that a capture of 12 block outputs holds."""
    model, tokens = make_gpt()
    last = (slice(None), -1)

    def held(**options: object) -> tuple[int, int]:
        with hl.capture(model, "h.*", **options) as got:  # type: ignore[arg-type]
            model(tokens)
        values = [got[f"h.{index}"].output for index in range(len(model.h))]
        return (
            sum(value.numel() * value.element_size() for value in values),
            sum(value.untyped_storage().nbytes() for value in values),
        )

    table = Table(
        "memory: 12 block outputs", ["capture", "bytes of the values", "bytes held", "target"]
    )
    for name, options in (("all", {}), ("select=(slice(None), -1)", {"select": last})):
        values, storage = held(**options)
        table.rows.append([name, str(values), str(storage), "the same" if options else ""])
    return table


def measure_idle(rounds: int) -> Table:
    """Call a model that hookline has left, and one it never saw."""
    model, tokens = make_gpt()
    copies = [copy.deepcopy(model) for _ in range(2)]
    used = copies[1]
    before = describe_state(used)
    with hl.capture(used, "**", inputs=True, grads=True), hl.edit(used, {"h.*": hl.scale(1.0)}):
        used(tokens).sum().backward()
    hl.register_backward_hook(used, "**", lambda *_: None).remove()
    used.zero_grad(set_to_none=True)
    is_same = describe_state(used) == before
    variants = [
        Variant("plain", lambda: model(tokens)),
        Variant("another copy, untouched (noise)", lambda: copies[0](tokens), against="plain"),
        Variant("after closed sessions", lambda: used(tokens), against="plain", target=1.0),
    ]
    with torch.no_grad():
        table = tabulate("idle: a model after its sessions", measure(variants, rounds=rounds))
    for row in table.rows[1:]:
        row[-1] = row[-1] and "1.00 (within noise)"
    table.notes = [
        "Structure of all modules (class, attributes, hooks, instance methods) and torch's "
        f"global hooks: {'as before' if is_same else 'CHANGED'}."
    ]
    return table


def describe_state(model: nn.Module) -> list[Any]:
    """List what `nn.Module.__call__` looks at, and every attribute a session could leave."""
    state: list[Any] = [torch_module._has_any_global_hook()]
    for name, one in model.named_modules():
        hooks = {key: len(value) for key, value in vars(one).items() if key.endswith("hooks")}
        state.append((name, type(one), sorted(vars(one)), hooks))
    return state
