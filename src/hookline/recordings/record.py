"""`hl.record`: steps of a training, or one of a model, kept so that they can be compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hookline._errors import NoSuchSite, UnsupportedModel
from hookline.addresses import Selector
from hookline.hooks.uncompiled import outside_of_graphs
from hookline.recordings.attaching import TraceAttachment
from hookline.recordings.calls import INPUTS, read_arguments, write_call
from hookline.recordings.floors import calibrate_floors
from hookline.recordings.storing import (
    VALUES,
    FileSink,
    Wanted,
    check_tensors,
    choose_tensors,
    write_trace,
)
from hookline.recordings.tracing import Loss, trace_step
from hookline.recordings.unusual import refuse_meta
from hookline.recordings.weighing import TraceWeights
from hookline.replays.randomness import seed_states
from hookline.runs import Run, RunWriter, describe_environment, open_run
from hookline.runs.belonging import prepare_folder
from hookline.watchers import Watch
from hookline.watchers.attaching import Models, name_models
from hookline.watchers.options import Options

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@outside_of_graphs
def record(
    model: Models,
    path: str | os.PathLike[str],
    inputs: Any = None,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    tensors: Wanted = False,
    gradients: bool = True,
    parameters: bool = True,
    calibrate: bool = True,
    steps: int | None = None,
    every: int = 1,
    sites: Selector = "**",
    seed: int = 0,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    with_inference: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = False,
    strict: bool = False,
) -> Recording:
    """Keep what a model computes, step by step, so that `hl.diff` can compare it with another run.

        with hl.record(model, "runs/a"):
            train()
        hl.record(model, "runs/b", (x,), loss=lambda out: out.mean())

    Kept are the statistics and a sketch of every value at the border of every module, of their
    gradients, of buffers, parameters, parameter gradients and updates; and the first call's
    arguments with the random states, so that it can be made again. `tensors` keeps whole tensors:
    all, or those of the modules and parameters that patterns name.

    Without `inputs` the steps of a training are recorded until the recording is closed, or the
    first `steps` of them, one in `every`, at the modules that `sites` names; the training goes on
    bit for bit as without.

    With `inputs` (a tuple of arguments, a dict of named ones, or a tensor) one step is run here: a
    call, with `loss` the backward pass, with `optimizer`, a function that makes one of parameters,
    its step. Random numbers follow from `seed`, the model is left as it was, and `calibrate`
    measures how far rounding alone moves each value.

    A folder that holds a run is refused, unless it is `overwrite` or `resume`; one that holds
    other files always is.
    """
    folder = Path(path).expanduser()
    _check_steps(steps)
    if inputs is None:
        if loss is not None or optimizer is not None:
            given = "loss" if loss is not None else "optimizer"
            raise TypeError(
                f"`{given}` is for a step that is run here, which needs inputs: "
                f"`hl.record(model, path, (x,), {given}=...)`"
            )
        for one in name_models(model).values():
            refuse_meta(one)
        _refuse_unmatched(tensors, model)
        prepare_folder(folder, overwrite=overwrite and not resume)
        watch = open_recording(
            model,
            folder,
            tensors=tensors,
            steps=steps,
            sites=sites,
            gradients=gradients,
            parameters="**" if parameters else None,
            every=every,
            optimizers=[optimizers] if isinstance(optimizers, Optimizer) else optimizers,
            with_inference=with_inference,
            resume=resume,
            progress=progress,
            strict=strict,
        )
        return Recording(folder, watch=watch)
    if not isinstance(model, nn.Module):
        raise TypeError("one step is run of one model; give an `nn.Module`")
    refuse_meta(model)
    _refuse_unmatched(tensors, model)
    prepare_folder(folder, overwrite=overwrite and not resume)
    notes = _record_once(
        model,
        folder,
        inputs,
        loss=loss,
        optimizer=optimizer,
        tensors=tensors,
        gradients=gradients,
        parameters=parameters,
        calibrate=calibrate,
        seed=seed,
    )
    return Recording(folder, notes=notes)


class Recording:
    """A recording of a training, or of a step that was run. Made by `hl.record`."""

    def __init__(
        self, folder: Path, *, watch: RecordingWatch | None = None, notes: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        """The run folder."""
        self._watch = watch
        self._notes = list(notes)

    @property
    def is_open(self) -> bool:
        """Whether it still records."""
        return self._watch is not None and self._watch.is_open

    @property
    def notes(self) -> list[str]:
        """What could not be recorded, and why."""
        return self._notes if self._watch is None else self._watch.notes

    @property
    def failure(self) -> BaseException | None:
        """The error of hookline's own that ended it before its time."""
        return None if self._watch is None else self._watch.failure

    @property
    def run(self) -> Run:
        """What is recorded so far, to be read."""
        if self._watch is not None:
            self._watch.flush()
        return open_run(self.folder)

    @outside_of_graphs
    def step(self) -> None:
        """End the step under way: for loops without an optimizer of torch's."""
        if self._watch is not None:
            self._watch.step()

    def log(self, **values: float | Tensor) -> None:
        """Note numbers of the step under way, such as the loss."""
        if self._watch is not None:
            self._watch.log(**values)

    def flush(self) -> None:
        """Wait until every step that has ended is on disk."""
        if self._watch is not None:
            self._watch.flush()

    @outside_of_graphs
    def close(self) -> None:
        """End the recording: the model is as before, the run is complete on disk."""
        if self._watch is not None:
            self._watch.close()

    @outside_of_graphs
    def __enter__(self) -> Recording:
        return self

    @outside_of_graphs
    def __exit__(self, *exception: Any) -> None:
        if self._watch is not None:
            self._watch.__exit__(*exception)

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<hl.record {self.folder}, {state}>"


class RecordingWatch(Watch):
    """A watch that measures what a trace has."""

    _listens_by = TraceAttachment
    _weighs_by = TraceWeights

    def choose(self, *, tensors: Wanted, steps: int | None) -> None:
        """Say what is kept whole, and how many steps are recorded; before the first of them."""
        attachment = self._attachment
        assert isinstance(attachment, TraceAttachment)
        assert isinstance(self._weights, TraceWeights)
        attachment.delivery = self._delivery
        attachment.steps_left = steps
        attachment.end = self.close
        if tensors is not False:
            attachment.keep_tensors(tensors)
            self._weights.keep = attachment.sink.keep
        written = tensors if isinstance(tensors, bool | str) else list(tensors)
        self._delivery.describe(
            "recording",
            {
                "gradients": self._options.gradients,
                "parameters": self._options.parameters is not None,
                "updates": self._options.parameters is not None,
                "tensors": written,
                "calibrated": False,
                "parts": False,
            },
        )


def open_recording(
    models: Models,
    folder: Path | None,
    *,
    tensors: Wanted = False,
    steps: int | None = None,
    sites: Selector | None = "**",
    parameters: str | None = "**",
    **given: Any,
) -> RecordingWatch:
    """Begin to record a training; of models that hooks cannot reach, the parameters alone."""
    _check_steps(steps)
    choices: dict[str, Any] = {"gradients": True, "every": 1, "optimizers": None, **given}
    names = name_models(models)

    def make(sites: Selector | None) -> RecordingWatch:
        options = Options(
            sites=sites,
            parameters=parameters,
            **{"with_inference": False, "resume": False, "progress": False, **choices},
            **_FIXED,
        )
        return RecordingWatch(names, folder, options)

    try:
        watch = make(sites)
    except UnsupportedModel as error:
        watch = make(None)
        watch.add_note(f"only parameters, their gradients and updates are recorded: {error}")
    watch.choose(tensors=tensors, steps=steps)
    return watch


_FIXED: dict[str, Any] = {
    "updates": True,
    "sketch_every": 1,
    "counts_every": 0,
    "moments_every": 0,
    "units_every": 0,
    "budget": None,
    "first_step": None,
    "keep": 1,
    "to": (),
    "rules": False,
    "replay": False,
}
"""What a recording does not leave open of a watch."""


def _refuse_unmatched(tensors: Wanted, models: Models) -> None:
    """Raise where whole tensors are asked for that no model has."""
    for unmatched in check_tensors(tensors, name_models(models)):
        raise NoSuchSite(unmatched)


def _check_steps(steps: int | None) -> None:
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"steps={steps!r}: give how many steps are recorded, from 1")


def _record_once(
    model: nn.Module,
    folder: Path,
    inputs: Any,
    *,
    loss: Loss | None,
    optimizer: MakeOptimizer | None,
    tensors: Wanted,
    gradients: bool,
    parameters: bool,
    calibrate: bool,
    seed: int,
) -> list[str]:
    """Run one step of a model into a run folder; give what could not be recorded, and why."""
    args, kwargs = read_arguments(inputs)
    states = seed_states(seed)
    with RunWriter(folder) as writer:  # before anything runs: it may be refused
        is_kept = choose_tensors(tensors)
        file = None if is_kept is None or calibrate else writer.open_dump(VALUES)
        # Tensors are in memory together only where the floors are told from them.
        sink = None if file is None or is_kept is None else FileSink(file, is_kept)
        trace = trace_step(
            model,
            args,
            kwargs,
            loss=loss,
            optimizer=optimizer,
            rng=states,
            keep_tensors=calibrate,
            gradients=gradients,
            parameters=parameters,
            sink=sink,
        )
        if sink is not None:
            loss_value, trace = trace.loss, sink.finish(trace.facts, trace.notes)
            trace.loss = loss_value
        if calibrate:
            floors = calibrate_floors(
                model, args, kwargs, loss=loss, optimizer=optimizer, rng=states, trace=trace
            )
            trace.set_floors(floors)
        writer.describe("environment", describe_environment())
        writer.describe(
            "recording",
            {
                "gradients": gradients and loss is not None,
                "parameters": parameters,
                "updates": optimizer is not None,
                "tensors": tensors if isinstance(tensors, bool | str) else list(tensors),
                "calibrated": calibrate,
                "parts": True,
            },
        )
        writer.describe("notes", {"notes": trace.notes})
        kept, facts = write_call(args, kwargs, states)
        writer.dump(INPUTS, kept, {"step": 0, **facts})
        scalars = {} if trace.loss is None else {"loss": trace.loss}
        write_trace(writer, trace, tensors=tensors, file=file, scalars=scalars)
    return trace.notes
