"""Graft onto a recording: a model's module on the input that a run has kept of its counterpart.

What the module gives is compared with what the run has kept as its output. Where the run holds no
tensors of it there is nothing to say.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hookline._trees import Path
from hookline.comparisons.calling import StepCall
from hookline.comparisons.catching import NotCaught, catch_call
from hookline.comparisons.grafting import compare_leaves, transplant
from hookline.comparisons.rerunning import rerun
from hookline.diffs.traces import Trace


def graft_recorded(
    trace: Trace,
    model: nn.Module,
    paths: tuple[str, str],
    call: StepCall,
    *,
    step: int,
    visit: int = 0,
) -> dict[str, float]:
    """Give how far each output of a model's module is from that of a run, on the run's input.

    `paths` are those in the run and in the model; raises `NotCaught` where it cannot be told.
    """
    inputs = _read_values(trace, paths[0], "input", step=step, visit=visit)
    outputs = _read_values(trace, paths[0], "output", step=step, visit=visit)
    if not inputs or not outputs:
        raise NotCaught("the run holds no tensors of it; record with `tensors=True`")
    caught = catch_call(model, paths[1], call, visit=visit)
    arguments, _ = transplant(inputs, caught)
    done = rerun(caught.module, caught, arguments)
    return compare_leaves(outputs, done.outputs, [])


def _read_values(
    trace: Trace, path: str, port: str, *, step: int, visit: int
) -> dict[Path, Tensor]:
    found: dict[Path, Tensor] = {}
    for site in trace.sites:
        is_it = site.kind == "value" and site.module == path and site.port == port
        if is_it and site.visit == visit:
            tensor: Any = trace.tensor(site.id, step)
            if tensor is None:
                return {}
            found[site.leaf] = tensor
    return found
