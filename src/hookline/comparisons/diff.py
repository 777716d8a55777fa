"""`hl.diff`: two models, two runs, or one of each, and the first place where they differ."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import nn

from hookline._compiler import has_compiled_part
from hookline.comparisons.arguments import (
    CheckedLoss,
    CheckedOptimizer,
    check_calibrate,
    check_gradients,
    check_limits,
    check_names,
    check_numbers,
    check_sides,
)
from hookline.comparisons.calling import StepCall, naming_model, read_pair
from hookline.comparisons.compiled import confirm_compiled
from hookline.comparisons.confirming import Compare, confirm_recorded
from hookline.comparisons.confirming import confirm as confirm_difference
from hookline.comparisons.flowing import FlowSink
from hookline.comparisons.locating import Pair
from hookline.comparisons.showing import Difference, make_shown
from hookline.diffs import difference as results
from hookline.diffs.comparing import compare
from hookline.diffs.ranking import compare_ranks
from hookline.diffs.reading import open_trace
from hookline.diffs.traces import Trace
from hookline.recordings import LiveTrace, calibrate_floors, read_call, trace_step
from hookline.recordings.calls import read_arguments
from hookline.replays.randomness import seed_states
from hookline.runs import Run

if TYPE_CHECKING:
    import numpy.typing as npt

Side = nn.Module | Run | str | os.PathLike[str]
Floors: TypeAlias = "npt.NDArray[np.float64] | Mapping[int, float] | None"


def diff(
    a: Side,
    b: Side,
    inputs: Any = None,
    *,
    loss: Any = None,
    optimizer: Any = None,
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
    `loss`, a function of the output, gradients are compared too; with `optimizer`, a function
    that makes one of parameters, also the update; either may be a pair, one for each model. A
    model against a run is called with the inputs and the random states that the run holds.

    `names` maps paths of A to B where the alignment needs help, `allow` gives a tolerance for
    sites of a pattern, `tolerance` one for all. Rounding is measured where a model is there
    (`calibrate=False`: not; or give another model, or run, of A that should count as the same).
    `confirm` runs the blamed modules again on the same input, down to the operation.

    Models are left as they were: weights, gradients, buffers, random states, flags.
    """
    check_sides(a, b)
    check_limits(tolerance, allow)
    check_names(names)
    check_calibrate(calibrate)
    is_model = [isinstance(one, nn.Module) for one in (a, b)]
    check_numbers(step, seed, has_run=not all(is_model))
    options = _Options(names, dict(allow or {}), tolerance, step)
    if not any(is_model):
        given = {"inputs": inputs, "loss": loss, "optimizer": optimizer, "inputs_b": inputs_b}
        _refuse([name for name, value in given.items() if value is not None])
        return make_shown(
            compare_ranks(
                _name(a),
                _name(b),
                lambda x, y: options.compare(x, y, floors=_read_floors(x, calibrate)),
            )
        )
    losses, optimizers = _read_functions(loss, optimizer)
    stored = {at: open_trace(_name(one)) for at, one in enumerate((a, b)) if not is_model[at]}
    for trace in stored.values():
        options = options.at_step_of(trace)
    first, second = _read_calls((a, b), (inputs, inputs_b), step=options.step, seed=seed)
    first = replace(first, loss=losses[0], optimizer=optimizers[0])
    second = replace(second, loss=losses[1], optimizer=optimizers[1])
    trace_a = _trace(a, first, "A") if isinstance(a, nn.Module) else stored[0]
    against = trace_a if isinstance(trace_a, LiveTrace) else None
    trace_b = _trace(b, second, "B", against=against) if isinstance(b, nn.Module) else stored[1]
    if isinstance(a, nn.Module) and against is not None:
        floors = _measure_floors(a, against, first, calibrate)
    else:
        floors = _read_floors(trace_a, calibrate)
    if not any(site.kind == "gradient" for trace in stored.values() for site in trace.sites):
        check_gradients([one for one, is_it in zip(losses, is_model, strict=True) if is_it])
    found = options.compare(trace_a, trace_b, floors=floors)
    is_compiled = any(isinstance(one, nn.Module) and has_compiled_part(one) for one in (a, b))
    if not confirm or (is_compiled and not all(is_model)):
        return make_shown(found)  # a module that is run by itself says nothing of a graph
    if isinstance(a, nn.Module) and isinstance(b, nn.Module):
        pair = Pair((a, b), (first, second))
        if is_compiled:
            found = confirm_compiled(
                found, pair, lambda: _compare_eagerly(pair, options, calibrate)
            )
        else:
            found = confirm_difference(
                found,
                pair,
                lambda more: options.compare(trace_a, trace_b, floors=floors, allow=more),
            )
    elif isinstance(b, nn.Module):
        found = confirm_recorded(found, b, second, is_model_b=True)
    elif isinstance(a, nn.Module):
        found = confirm_recorded(found, a, first, is_model_b=False)
    return make_shown(found)


@dataclass(frozen=True, slots=True)
class _Options:
    """What holds for every comparison of one `diff`."""

    names: Mapping[str, str] | None
    allow: Mapping[str, float]
    tolerance: float | None
    step: int | None

    def at_step_of(self, run: Trace) -> _Options:
        """Choose the step of a run that a model makes again: the first, if none is asked for."""
        if self.step is not None or not len(run.steps):
            return self
        return replace(self, step=int(run.steps[0]))

    def compare(
        self, a: Trace, b: Trace, *, floors: Floors, allow: Mapping[str, float] | None = None
    ) -> results.Difference:
        """Compare two traces; `allow` comes on top of what the user allows."""
        return compare(
            a,
            b,
            names=self.names,
            allow={**self.allow, **(allow or {})},
            tolerance=self.tolerance,
            step=self.step,
            floors=floors,
        )


def _read_functions(
    loss: Any, optimizer: Any
) -> tuple[
    tuple[CheckedLoss | None, CheckedLoss | None],
    tuple[CheckedOptimizer | None, CheckedOptimizer | None],
]:
    """Read the functions for both models, so that what they give is looked at."""
    losses, makers = read_pair(loss, "loss"), read_pair(optimizer, "optimizer")
    if any(make and not one for one, make in zip(losses, makers, strict=True)):
        raise TypeError(
            "an `optimizer` makes an update of gradients, for which there must be a `loss`: "
            "`hl.diff(a, b, (x,), loss=lambda out: out.mean(), optimizer=...)`"
        )
    one, other = (None if it is None else CheckedLoss(it) for it in losses)
    make, make_b = (None if it is None else CheckedOptimizer(it) for it in makers)
    return (one, other), (make, make_b)


def _trace(
    model: nn.Module, call: StepCall, letter: str, *, against: LiveTrace | None = None
) -> LiveTrace:
    """Trace a step; its values are compared as they flow where there is a trace to compare with."""
    sink = None if against is None else FlowSink(against)
    with naming_model(f"model {letter}", type(model).__name__):
        trace = trace_step(
            model,
            call.args,
            dict(call.kwargs),
            loss=call.loss,
            optimizer=call.optimizer,
            rng=call.random,
            sink=sink,
        )
    return trace if sink is None else sink.finish(trace.facts, trace.notes)


def _compare_eagerly(
    pair: Pair, options: _Options, calibrate: Any
) -> tuple[results.Difference, Compare]:
    """Compare two models while compiled ones run without their graphs."""
    (a, b), (first, second) = pair.models, pair.calls
    trace_a = _trace(a, first, "A")
    trace_b = _trace(b, second, "B", against=trace_a)
    floors = _measure_floors(a, trace_a, first, calibrate)
    found = options.compare(trace_a, trace_b, floors=floors)
    return found, lambda more: options.compare(trace_a, trace_b, floors=floors, allow=more)


def _read_calls(
    sides: tuple[Side, Side], inputs: tuple[Any, Any], *, step: int | None, seed: int
) -> tuple[StepCall, StepCall]:
    """Say what each model is called with: what was given, or what the run holds."""
    given = inputs[0]
    run = next((one for one in sides if not isinstance(one, nn.Module)), None)
    random = seed_states(seed)
    stored = None if run is None else read_call(_name(run), step=step)
    if stored is not None:
        random = stored[2]
    if given is not None:
        args, kwargs = read_arguments(given)
    elif stored is not None:
        args, kwargs = stored[0], stored[1]
    elif run is not None:
        raise ValueError(
            f"the run `{_name(run)}` holds no inputs of that step; give them: "
            "`hl.diff(a, b, (x,))`, or record it with `hl.record(model, path, (x,))`"
        )
    else:
        raise TypeError(
            "two models are compared on inputs; give them: `hl.diff(a, b, (x,))`, with "
            "`loss=lambda out: ...` for the gradients"
        )
    first = second = StepCall(args, kwargs, random=random)
    if inputs[1] is not None:
        args, kwargs = read_arguments(inputs[1])
        second = replace(first, args=args, kwargs=kwargs)
    return first, second


def _read_floors(trace: Trace, calibrate: Any) -> Floors:
    """Give the floors of a run: those of another run, or None for what the run itself holds."""
    if calibrate is False:
        return {}
    if calibrate is None or calibrate is True:
        return None
    if isinstance(calibrate, nn.Module):
        raise TypeError("a run is calibrated by another run; a model of A by another model")
    return compare_floors(trace, open_trace(_name(calibrate)))


def _measure_floors(model: nn.Module, trace: LiveTrace, call: StepCall, calibrate: Any) -> Floors:
    """Measure how far rounding alone moves each site of a model."""
    if isinstance(calibrate, nn.Module):
        return compare_floors(trace, _trace(calibrate, call, "of `calibrate`", against=trace))
    if calibrate is not None and calibrate is not True:
        return _read_floors(trace, calibrate)
    with naming_model("model A", type(model).__name__):
        return calibrate_floors(
            model,
            call.args,
            dict(call.kwargs),
            trace=trace,
            loss=call.loss,
            optimizer=call.optimizer,
            rng=call.random,
        )


def compare_floors(a: Trace, other: Trace) -> npt.NDArray[np.float64]:
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


def _refuse(given: list[str]) -> None:
    if given:
        names = ", ".join(f"`{name}`" for name in given)
        raise TypeError(f"two runs are compared as they are; {names} is for models")
