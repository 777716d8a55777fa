"""`hl.watch`: statistics of sites over the steps of a training."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookline._errors import RunWriteError, SessionError
from hookline._tables import Table
from hookline._torch import graph_task_id
from hookline.addresses import Selector
from hookline.addresses.pattern import compile_path
from hookline.runs import RecentSteps, RunWriter, Series, StepRecord, describe_environment
from hookline.stats import Extras
from hookline.watchers.attaching import Attachment, Models, name_models
from hookline.watchers.clocks import Clock
from hookline.watchers.describing import describe_model, describe_sources
from hookline.watchers.pacing import Cost, Pace
from hookline.watchers.progress import ProgressLine
from hookline.watchers.recording import Harvest, Recorder
from hookline.watchers.sinks import Sink, scalars_of
from hookline.watchers.weights import Weights
from hookline.watchers.working import Worker, say

_open_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def watch(
    model: Models,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    sites: Selector | None = "**",
    every: int | Mapping[str, int] = 1,
    gradients: bool = True,
    parameters: str | None = "**",
    updates: bool = True,
    sketch_every: int = 10,
    counts_every: int = 10,
    moments_every: int = 10,
    budget: float | None = None,
    optimizers: Sequence[Optimizer] | None = None,
    with_inference: bool = False,
    first_step: int = 0,
    keep: int = 100,
    to: Sequence[Sink] = (),
    progress: bool = False,
) -> Watch:
    """Measure every value of a model while it trains, into a run folder or in memory.

        with hl.watch(model, "runs/a") as w:
            train()
        hl.open_run("runs/a").series("layers.3.mlp", "rms")

    Measured are the values that `sites` names and, with `gradients`, the gradients that reach
    them; and, for the parameters that the pattern `parameters` names (None: for none), the value,
    the gradient that the optimizer is given, the update it makes and, every `moments_every` steps,
    its moments. A step is one step of an optimizer: micro-batches before it are merged. The counts
    of zeros, tiny and huge elements with the exponent histogram, and the sketch, are taken in one
    watched step of `counts_every` and `sketch_every` (0: never).

    `every` is a stride, or strides by pattern: `{"**": 10, "head": 1}`. `budget=0.03` watches as
    many steps as keep the measured cost under three percent. Calls without grad are left out
    unless `with_inference`. `optimizers` names those whose steps count, where not all do. Several
    models come as a list or a dict. Without `run_dir` the latest `keep` steps stay in memory.
    `to` are functions that get the scalars of each step.
    """
    return Watch(
        model,
        run_dir,
        sites=sites,
        every=every,
        gradients=gradients,
        parameters=parameters,
        updates=updates,
        extras_every={Extras.SKETCH: sketch_every, Extras.COUNTS: counts_every},
        moments_every=moments_every,
        budget=budget,
        optimizers=optimizers,
        with_inference=with_inference,
        first_step=first_step,
        keep=keep,
        to=to,
        progress=progress,
    )


class Watch:
    """A watch that is open: what was measured, and the way to end it. Made by `hl.watch`."""

    def __init__(
        self,
        models: Models,
        run_dir: str | os.PathLike[str] | None,
        *,
        sites: Selector | None,
        every: int | Mapping[str, int],
        gradients: bool,
        parameters: str | None,
        updates: bool,
        extras_every: Mapping[Extras, int],
        moments_every: int,
        budget: float | None,
        optimizers: Sequence[Optimizer] | None,
        with_inference: bool,
        first_step: int,
        keep: int,
        to: Sequence[Sink],
        progress: bool,
    ) -> None:
        strides = {"**": every} if isinstance(every, int) else dict(every)
        _check(strides, budget, keep)
        named = name_models(models)
        self.folder = None if run_dir is None else Path(run_dir)
        """The run folder; None where steps are kept in memory only."""
        self.step_number = first_step
        """The number of the step under way."""
        self.is_open = True
        """Whether it still measures."""
        self._recorder = Recorder()
        self._extras_every = extras_every
        self._moments_every = moments_every
        self._pace = Pace(min(strides.values()), budget)
        self._sinks = list(to)
        self._counted = None if optimizers is None else [weakref.ref(one) for one in optimizers]
        self._attachment = Attachment(
            named,
            sites,
            self._recorder,
            gradients=gradients,
            with_inference=with_inference,
            every=strides if len(set(strides.values())) > 1 else {},
            tell_call=self._on_call,
        )
        is_wanted = compile_path(parameters) if parameters else lambda name: False
        self._weights = Weights(
            self._recorder,
            [(prefix, model, is_wanted) for prefix, model in named.items()],
            updates=updates,
        )
        self._recent = RecentSteps(keep)
        self._progress = ProgressLine() if progress else None
        self._stepped: list[Optimizer] = []
        """The optimizers that have stepped in the step under way."""
        self._has_closure = False
        self._next_is_due: bool | None = None
        self._watched = 0
        self._is_paused = False
        self._began = time.perf_counter()
        self._process = os.getpid()
        self._writer = self._make_writer(named)
        self._worker = Worker("hookline-watch", self._on_failure)
        self._clock = Clock(self)
        self._clock.start()
        self._attachment.start()
        self._begin(self._pace.is_due(self.step_number))
        _open_watches.add(self)

    def _make_writer(self, named: Mapping[str, Any]) -> RunWriter | None:
        if self.folder is None:
            return None
        rank, world = _rank()
        try:
            writer = RunWriter(self.folder, rank=rank, world=world)
            writer.describe("environment", describe_environment())
            writer.describe(
                "model", {prefix.rstrip("."): describe_model(m) for prefix, m in named.items()}
            )
            sources: dict[str, Any] = {}
            for model in named.values():
                sources.update(describe_sources(model))
            writer.describe("sources", sources)
        except RunWriteError as error:
            say(f"nothing is watched: {error}")
            self._recorder.is_on = False
            return None
        return writer

    # What the clock tells.

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Measure the weights and gradients of an optimizer that is about to step."""
        if not self._is_mine(optimizer):
            return
        if any(optimizer is one for one in self._stepped):
            self._tick()
        self._has_closure = has_closure
        if self._recorder.is_on:
            with self._recorder.timed(), torch.no_grad():
                self._weights.before(optimizer, has_closure=has_closure)

    def after_step(self, optimizer: Optimizer) -> None:
        """Measure what the step changed, and look ahead."""
        if not self._is_mine(optimizer):
            return
        if self._recorder.is_on:
            with self._recorder.timed(), torch.no_grad():
                self._weights.after(
                    optimizer,
                    has_closure=self._has_closure,
                    moments=self._is_turn(self._moments_every),
                )
        self._note_step(optimizer)

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Count a step that a gradient scaler left out; its gradients are worth seeing."""
        if not self._is_mine(optimizer):
            return
        if any(optimizer is one for one in self._stepped):
            self._tick()
        if self._recorder.is_on:
            with self._recorder.timed(), torch.no_grad():
                self._weights.skipped(optimizer)
        self._note_step(optimizer)

    def _note_step(self, optimizer: Optimizer) -> None:
        counted = self._counted
        if counted is not None and not any(one() is optimizer for one in counted):
            return
        self._stepped.append(optimizer)
        if graph_task_id() != -1:  # it steps inside the backward, which is not over
            return
        if self._next_is_due is None:
            self._next_is_due = self._pace.is_due(self.step_number + 1)
            self._attach(self._next_is_due)

    def _is_mine(self, optimizer: Optimizer) -> bool:
        return self.is_open and self._is_here() and self._weights.owns_any(optimizer)

    def _is_here(self) -> bool:
        return self._process == os.getpid()

    def _on_call(self) -> None:
        if self._stepped and self.is_open and self._is_here():
            self._tick()

    # Steps.

    def _tick(self) -> None:
        """End the step under way and begin the next."""
        self._end()
        self.step_number += 1
        due = self._next_is_due
        self._begin(self._pace.is_due(self.step_number) if due is None else due)

    def _begin(self, is_due: bool) -> None:
        self._stepped.clear()
        self._next_is_due = None
        self._weights.begin_step()
        is_due = is_due and not self._is_paused and self._worker.failure is None
        extras = Extras(0)
        for extra, stride in self._extras_every.items():
            if self._is_turn(stride):
                extras |= extra
        self._recorder.start_step(extras, is_on=is_due)
        self._attachment.choose(self.step_number)
        self._attach(is_due)

    def _attach(self, is_due: bool) -> None:
        if is_due:
            self._attachment.attach()
        else:
            self._attachment.detach()

    def _is_turn(self, stride: int) -> bool:
        return stride > 0 and self._watched % stride == 0

    def _end(self, *, is_partial: bool = False) -> None:
        recorder = self._recorder
        now = time.perf_counter()
        if is_partial:
            recorder.add_scalar("partial", 1.0)
        was_watched = recorder.is_on and recorder.has_events
        if was_watched or recorder.has_scalars:
            harvest = recorder.end_step(self.step_number)
            self._worker.put(lambda: self._deliver(harvest))
        if not is_partial:
            self._pace.add(now - self._began, recorder.own_seconds, was_watched=was_watched)
        self._watched += was_watched
        self._began = now

    def _deliver(self, harvest: Harvest) -> None:
        """Bring a step to where it is kept; runs in the worker."""
        record = harvest.arrive()
        self._recent.add_sites(harvest.sites)
        self._recent.write(record)
        if self._writer is not None:
            self._writer.add_sites(harvest.sites)
            self._writer.write(record)
        self._send(record)
        if self._progress is not None:
            self._progress.show(record, len(self._recorder.facts))

    def _send(self, record: StepRecord) -> None:
        for sink in tuple(self._sinks):
            try:
                sink(scalars_of(record, self._recorder.facts))
            except Exception as error:
                self._sinks.remove(sink)
                say(f"{sink!r} gets no more steps: {type(error).__name__}: {error}")

    def _on_failure(self, error: BaseException) -> None:
        self._recorder.is_on = False
        say(f"the watch has stopped, the training goes on: {error}")

    # What a user calls.

    def step(self) -> None:
        """End the step under way: for loops without an optimizer of torch's."""
        self._check_open()
        self._tick()

    def log(self, **values: float | Tensor) -> None:
        """Note numbers of the step under way, such as the loss; a tensor is not waited for."""
        self._check_open()
        for name, value in values.items():
            self._recorder.add_scalar(name, value)

    def pause(self) -> _Pause:
        """Measure nothing until `resume`, or until the end of a `with w.pause():`."""
        self._is_paused = True
        self._recorder.is_on = False
        self._attachment.detach()
        return _Pause(self)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._check_open()
        self._is_paused = False
        if self._worker.failure is None:
            self._recorder.is_on = True
            self._attachment.attach()

    def flush(self) -> None:
        """Wait until every step that has ended is on disk."""
        if self._stepped and self.is_open and self._is_here():
            self._tick()
        self._worker.flush()

    def table(self, step: int = -1, **options: Any) -> Table:
        """Give the statistics of a step, one row a site; the latest that has ended."""
        self._catch_up()
        return self._recent.table(step=step, **options)

    def series(self, site: str, stat: str, **options: Any) -> Series:
        """Give a statistic of a site over the steps that are still in memory."""
        self._catch_up()
        return self._recent.series(site, stat, **options)

    def _catch_up(self) -> None:
        self.flush()
        if not len(self._recent.steps) and self.is_open and self._recorder.has_events:
            self._tick()  # nothing ever stepped: what there is so far is the step
            self._worker.flush()

    def add_finding(self, finding: Mapping[str, Any]) -> None:
        """Note in the run what was concluded from it."""
        writer = self._writer
        if writer is not None:
            self._worker.put(lambda: writer.add_finding(finding))

    def dump(self, name: str, tensors: Mapping[str, Tensor], **facts: Any) -> None:
        """Keep whole tensors in the run; they are copied at once and written later."""
        writer = self._writer
        if writer is None:
            raise SessionError("there is no run folder to dump to: hl.watch(model, run_dir)")
        copies = {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}
        facts = {"step": self.step_number, **facts}
        self._worker.put(lambda: _dump(writer, name, copies, facts))

    @property
    def cost(self) -> Cost:
        """What watching costs, measured in this run."""
        return self._pace.cost()

    @property
    def notes(self) -> list[str]:
        """What could not be measured, and why."""
        return [f"`{where}`: {why}" for where, why in self._recorder.unmeasured.items()]

    def close(self, status: str = "finished") -> None:
        """End the watch: the models are as before, the run is complete on disk."""
        if not self.is_open:
            return
        self.is_open = False
        _open_watches.discard(self)
        if not self._is_here():
            return
        self._clock.stop()
        self._attachment.stop()
        if self._recorder.has_events:
            self._end(is_partial=not self._stepped)
        self._recorder.is_on = False
        writer, cost = self._writer, self.cost
        if writer is not None:
            facts = {"status": status, "notes": self.notes, "cost": _cost_facts(cost)}
            self._worker.put(lambda: _finish(writer, facts, status))
        self._worker.stop()
        for sink in self._sinks:
            end = getattr(sink, "close", None)
            if callable(end):
                end()
        if self._progress is not None:
            self._progress.end(str(cost))

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.close("interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")

    def _check_open(self) -> None:
        if not self.is_open:
            raise SessionError("this watch is closed; make a new one with hl.watch(...)")

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        where = "in memory" if self.folder is None else str(self.folder)
        sites = len(self._recorder.facts)
        return f"<hl.watch {where}, {state}, step {self.step_number}, {sites} sites>"


class _Pause:
    """What `pause` gives, for a `with`."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        if self._watch.is_open:
            self._watch.resume()


def _check(strides: Mapping[str, int], budget: float | None, keep: int) -> None:
    for pattern, stride in strides.items():
        if not isinstance(stride, int) or stride < 1:
            raise ValueError(f"every={stride!r} for `{pattern}`: give a whole number from 1")
    if budget is not None and not 0 < budget < 10:
        raise ValueError(f"budget={budget!r}: give a share, 0.03 for three percent")
    if keep < 1:
        raise ValueError(f"keep={keep!r}: give how many steps stay in memory, from 1")


def _rank() -> tuple[int, int]:
    """Tell which rank of how many this process is."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _dump(
    writer: RunWriter, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    writer.dump(name, tensors, facts)


def _cost_facts(cost: Cost) -> dict[str, Any]:
    return {
        "steps": cost.steps,
        "watched": cost.watched,
        "own_seconds": cost.own_seconds,
        "watched_seconds": cost.watched_seconds,
        "plain_seconds": cost.plain_seconds,
        "ratio": cost.ratio,
        "overhead": cost.overhead,
    }


def _finish(writer: RunWriter, facts: Mapping[str, Any], status: str) -> None:
    writer.describe("watch", facts)
    writer.close(status)


@atexit.register
def _close_all() -> None:
    """Complete the runs of watches that nobody closed."""
    for one in list(_open_watches):
        one.close()


def _leave_to_parent() -> None:
    """In a forked process: measure nothing, the parent does."""
    for one in list(_open_watches):
        one._recorder.is_on = False
    _open_watches.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
