"""`hl.diff`: two models, two runs, or one of each, and the first place where they differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hookline.comparisons.calling import StepCall, naming_model, read_losses
from hookline.comparisons.confirming import Pair, confirm_recorded
from hookline.comparisons.confirming import confirm as confirm_difference
from hookline.comparisons.flowing import FlowSink
from hookline.comparisons.seeding import seed_states
from hookline.diffs.comparing import compare
from hookline.diffs.difference import Difference
from hookline.diffs.reading import open_trace
from hookline.diffs.traces import Trace
from hookline.recordings import LiveTrace, calibrate_floors, read_call, trace_step
from hookline.recordings.calls import read_arguments
from hookline.runs import Run

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Side = nn.Module | Run | str | os.PathLike[str]


def diff(
    a: Side,
    b: Side,
    inputs: Any = None,
    *,
    loss: Any = None,
    optimizer: MakeOptimizer | None = None,
    names: Mapping[str, str] | None = None,
    allow: Mapping[str, float] | None = None,
    tolerance: float | None = None,
    calibrate: Any = None,
    step: int | None = None,
    inputs_b: Any = None,
    confirm: bool = True,
    seed: int = 0,
) -> Difference:
    """Find the first place where two models or runs differ, and say why.

    `a` and `b` are models, or runs that `hl.record` made. Two models need `inputs`: a tuple of
    arguments, a dict of named ones, or one tensor; `inputs_b` where B takes them otherwise. With
    `loss`, a function of the output (or a pair of them), gradients are compared too; with
    `optimizer`, a function that makes one of parameters, also the update. A model against a run is
    called with the inputs and the random states that the run holds.

    `names` maps paths of A to B where the alignment needs help, `allow` gives a tolerance for
    sites of a pattern, `tolerance` one for all. Rounding is measured where a model is there
    (`calibrate=False`: not; or give another model, or run, of A that should count as the same).
    `confirm` runs the blamed modules again on the same input, down to the operation.

    Models are left as they were: weights, gradients, buffers, random states, flags.
    """
    options = _Options(names, allow, tolerance, step)
    losses = read_losses(loss)
    is_model = tuple(isinstance(one, nn.Module) for one in (a, b))
    if not any(is_model):
        given = {"inputs": inputs, "loss": loss, "optimizer": optimizer, "inputs_b": inputs_b}
        _refuse({name for name, value in given.items() if value is not None})
        return options.compare(open_trace(_name(a)), open_trace(_name(b)), calibrate)
    stored = {at: open_trace(_name(one)) for at, one in enumerate((a, b)) if not is_model[at]}
    for trace in stored.values():
        options.choose_step(trace)
    calls = _read_calls((a, b), (inputs, inputs_b), losses, step=options.step, seed=seed)
    traces: list[Trace] = []
    for at, one in enumerate((a, b)):
        if isinstance(one, nn.Module):
            before = traces[0] if traces and isinstance(traces[0], LiveTrace) else None
            traces.append(_trace(one, calls[at], optimizer, "AB"[at], against=before))
        else:
            traces.append(stored[at])
    floors = _read_floors(a, traces[0], calls[0], optimizer, calibrate)
    found = options.compare(traces[0], traces[1], calibrate, floors=floors)
    found = replace(found, notes=tuple(dict.fromkeys([*found.notes, *_list_notes(traces)])))
    if not confirm:
        return found
    if isinstance(a, nn.Module) and isinstance(b, nn.Module):
        return confirm_difference(found, Pair((a, b), calls))
    model, call = (b, calls[1]) if isinstance(b, nn.Module) else (a, calls[0])
    assert isinstance(model, nn.Module)
    return confirm_recorded(found, model, call, is_model_b=model is b)


class _Options:
    """What holds for every comparison of one `diff`."""

    def __init__(
        self,
        names: Mapping[str, str] | None,
        allow: Mapping[str, float] | None,
        tolerance: float | None,
        step: int | None,
    ) -> None:
        self._names = names
        self._allow = allow
        self._tolerance = tolerance
        self.step = step

    def choose_step(self, run: Trace) -> None:
        """Choose the step of a run that a model makes again: the first, if none is asked for."""
        if self.step is None and len(run.steps):
            self.step = int(run.steps[0])

    def compare(
        self,
        a: Trace,
        b: Trace,
        calibrate: Any,
        *,
        floors: npt.NDArray[np.float64] | None = None,
    ) -> Difference:
        known: npt.NDArray[np.float64] | Mapping[int, float] | None = floors
        if calibrate is False:
            known = {}  # also those that a run holds do not count
        elif floors is None and calibrate is not None and calibrate is not True:
            known = measure_floors(a, open_trace(_name(calibrate)))
        return compare(
            a,
            b,
            names=self._names,
            allow=self._allow,
            tolerance=self._tolerance,
            step=self.step,
            floors=known,
        )


def _trace(
    model: nn.Module,
    call: StepCall,
    optimizer: MakeOptimizer | None,
    letter: str,
    *,
    against: LiveTrace | None = None,
) -> LiveTrace:
    """Trace a step; its values are compared as they flow where there is a trace to compare with."""
    sink = None if against is None else FlowSink(against)
    with naming_model(f"model {letter}", type(model).__name__):
        trace = trace_step(
            model,
            call.args,
            dict(call.kwargs),
            loss=call.loss,
            optimizer=optimizer,
            rng=call.random,
            sink=sink,
        )
    return trace if sink is None else sink.finish(trace.facts, trace.notes)


def _list_notes(traces: Iterable[Trace]) -> list[str]:
    """List what could not be traced of models."""
    return [
        f"{letter}: {note}"
        for letter, trace in zip("AB", traces, strict=True)
        if isinstance(trace, LiveTrace)
        for note in trace.notes
    ]


def _read_calls(
    sides: tuple[Side, Side],
    inputs: tuple[Any, Any],
    losses: tuple[Any, Any],
    *,
    step: int | None,
    seed: int,
) -> tuple[StepCall, StepCall]:
    """Say what each model is called with: what was given, or what the run holds."""
    given = inputs[0]
    run = next((one for one in sides if not isinstance(one, nn.Module)), None)
    random = seed_states(seed)
    if given is None and run is not None:
        stored = read_call(_name(run), step=step)
        if stored is None:
            raise ValueError(
                f"the run `{_title(run)}` holds no inputs; give them: `hl.diff(a, b, (x,))`, or "
                "record it with `hl.record(model, path, (x,))`"
            )
        args, kwargs, random = stored
    elif given is None:
        raise TypeError(
            "two models are compared on inputs; give them: `hl.diff(a, b, (x,))`, with "
            "`loss=lambda out: ...` for the gradients"
        )
    else:
        args, kwargs = read_arguments(given)
    first = StepCall(args, kwargs, losses[0], random)
    second = replace(first, loss=losses[1])
    if inputs[1] is not None:
        args, kwargs = read_arguments(inputs[1])
        second = replace(second, args=args, kwargs=kwargs)
    return first, second


def _read_floors(
    a: Side,
    trace: Trace,
    call: StepCall,
    optimizer: MakeOptimizer | None,
    calibrate: Any,
) -> npt.NDArray[np.float64] | None:
    """Measure how far rounding moves each site of A; None: what the trace holds, or nothing."""
    if calibrate is False or not isinstance(a, nn.Module):
        return None
    if isinstance(calibrate, nn.Module):
        return measure_floors(trace, _trace(calibrate, call, optimizer, "calibrate"))
    if calibrate is not None and calibrate is not True:
        return None
    assert isinstance(trace, LiveTrace)
    with naming_model("model A", type(a).__name__):
        return calibrate_floors(
            a,
            call.args,
            dict(call.kwargs),
            trace=trace,
            loss=call.loss,
            optimizer=optimizer,
            rng=call.random,
        )


def measure_floors(a: Trace, other: Trace) -> npt.NDArray[np.float64]:
    """Take as floors how far another trace is that should count as the same."""
    found = compare(a, other, tolerance=float("inf"))
    floors = np.full(len(a.sites), np.nan)
    for pair in found.pairs:
        if pair.match is not None and pair.r is not None:
            floors[list(pair.match.a)] = pair.r
    return floors


def _name(one: Any) -> Run | Path:
    if isinstance(one, Run):
        return one
    if isinstance(one, (str, os.PathLike)):
        return Path(one)
    raise TypeError(
        f"hl.diff compares models and runs: an `nn.Module`, a folder or a `Run`; not {one!r}"
    )


def _title(one: Any) -> str:
    return str(one.path) if isinstance(one, Run) else str(one)


def _refuse(given: set[str]) -> None:
    if given:
        names = ", ".join(f"`{name}`" for name in sorted(given))
        raise TypeError(f"two runs are compared as they are; {names} is for models")
