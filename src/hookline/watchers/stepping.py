"""The steps of a watch: when one ends and the next begins, and what is measured in each.

A step begins when a model, or a part of it, is called with grad after an optimizer has stepped, or
where an optimizer steps that has stepped already. So optimizers that step one after the other share
a step, and so do micro-batches that one step follows. Which of them are watched, the pace says; in
the others nothing is attached.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookline._torch import graph_task_id
from hookline.stats import Extras
from hookline.watchers.attaching import Attachment
from hookline.watchers.pacing import Pace
from hookline.watchers.recording import Harvest, Recorder
from hookline.watchers.weights import Weights


class Steps:
    """Follow the optimizers, and hand over what was measured in each step."""

    def __init__(
        self,
        recorder: Recorder,
        weights: Weights,
        pace: Pace,
        *,
        first: int,
        extras_every: Mapping[Extras, int | None],
        moments_every: int | None,
        optimizers: Sequence[Optimizer] | None,
        deliver: Callable[[Harvest], None],
        abandon: Callable[[], None],
    ) -> None:
        self.number = first
        """The number of the step under way."""
        self.is_running = False
        self.is_paused = False
        self._recorder = recorder
        self._weights = weights
        self._pace = pace
        self._attachment: Attachment | None = None
        self._extras_every = extras_every
        self._moments_every = moments_every
        self._counted = None if optimizers is None else [weakref.ref(one) for one in optimizers]
        self._deliver = deliver
        self._abandon = abandon
        self._stepped: list[weakref.ref[Optimizer]] = []
        """The optimizers that have stepped in the step under way."""
        self._with_closure: weakref.ref[Optimizer] | None = None
        self._is_due = False
        self._is_next_due: bool | None = None
        self._watched = 0
        self._since_extras = 0
        """Watched steps since the last that had the extras whose stride is left to the pace."""
        self._began = 0.0
        self._process = os.getpid()

    @property
    def is_complete(self) -> bool:
        """Whether an optimizer has stepped in the step under way."""
        return bool(self._stepped)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that began, and no fork of it."""
        return self._process == os.getpid()

    def start(self, attachment: Attachment) -> None:
        """Begin the first step."""
        self._attachment = attachment
        self.is_running = True
        self._began = time.perf_counter()
        self._begin(self._pace.is_due(self.number))

    def stop(self) -> None:
        """End the last step, also one that is not complete, and measure nothing more."""
        if self._stepped or self._recorder.has_events or self._recorder.has_scalars:
            self._end(is_partial=not self._stepped)
        self._recorder.is_on = self.is_running = False

    # What the clock tells.

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Measure the weights and gradients of an optimizer that is about to step."""
        if not self._is_ours(optimizer):
            return
        self._begin_if_again(optimizer)
        self._with_closure = weakref.ref(optimizer) if has_closure else None
        if self._recorder.is_on:
            with self._recorder.timed(), torch.no_grad():
                self._weights.before(optimizer, has_closure=has_closure)

    def after_step(self, optimizer: Optimizer) -> None:
        """Measure what the step changed, and look ahead."""
        if not self._is_ours(optimizer):
            return
        if self._recorder.is_on:
            had_closure = self._with_closure is not None and self._with_closure() is optimizer
            moments = self._is_turn(self._moments_every)
            with self._recorder.timed(), torch.no_grad():
                self._weights.after(optimizer, has_closure=had_closure, moments=moments)
        self._note_step(optimizer)

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Count a step that a gradient scaler left out; its gradients are worth seeing."""
        if not self._is_ours(optimizer):
            return
        self._begin_if_again(optimizer)
        if self._recorder.is_on:
            with self._recorder.timed(), torch.no_grad():
                self._weights.skipped(optimizer)
        self._note_step(optimizer)

    def note_scale(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Learn the factor that a gradient scaler has put into the gradients of this step."""
        if not self._is_ours(optimizer):
            return
        self._begin_if_again(optimizer)
        if self._recorder.is_on:
            self._recorder.scale_gradients(scale)

    def on_call(self) -> None:
        """Learn that a call of a model, or of a part of it, begins."""
        if not self.is_running or not self.is_here:
            return
        if self._recorder.has_given_up:
            self.is_running = False
            self._abandon()
        elif self._stepped:
            self.advance()

    def _begin_if_again(self, optimizer: Optimizer) -> None:
        if any(one() is optimizer for one in self._stepped):
            self.advance()

    def _note_step(self, optimizer: Optimizer) -> None:
        if self._counted is not None and not any(one() is optimizer for one in self._counted):
            return
        self._stepped.append(weakref.ref(optimizer))
        # Whatever is called next begins the step: the model, or a part of it by itself.
        self._recorder.tell_begin = self.on_call
        if graph_task_id() != -1:  # it steps inside the backward, which is not over
            return
        if self._is_next_due is None:
            self._is_next_due = self._pace.is_due(self.number + 1)
            self._attach(self._is_next_due)

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return self.is_running and self.is_here and self._weights.owns_any(optimizer)

    # Steps.

    def advance(self) -> None:
        """End the step under way and begin the next."""
        if not self.is_running:
            return
        self._end()
        self.number += 1
        due = self._is_next_due
        self._begin(self._pace.is_due(self.number) if due is None else due)

    def pause(self) -> None:
        """Measure nothing until `resume`."""
        self.is_paused = True
        self._recorder.is_on = False
        self._attach(False)

    def resume(self) -> None:
        """Go on with the step under way."""
        self.is_paused = False
        self._recorder.is_on = self._is_due and not self._recorder.has_given_up
        self._attach(self._is_due if self._is_next_due is None else self._is_next_due)

    def _begin(self, is_due: bool) -> None:
        assert self._attachment is not None
        self._stepped.clear()
        self._recorder.tell_begin = None
        self._is_due = is_due
        self._is_next_due = None
        self._weights.begin_step(self.number)
        extras = Extras(0)
        for extra, stride in self._extras_every.items():
            if self._is_turn(stride):
                extras |= extra
        self._recorder.start_step(extras, is_on=is_due and not self.is_paused)
        self._attachment.begin_step(self.number)
        self._attach(is_due)

    def _attach(self, is_due: bool) -> None:
        if not self.is_running or self._attachment is None:
            return
        if is_due and not self.is_paused:
            self._attachment.attach()
        else:
            self._attachment.detach()

    def _is_turn(self, stride: int | None) -> bool:
        if stride is None:
            return self._since_extras == 0
        return stride > 0 and self._watched % stride == 0

    def _end(self, *, is_partial: bool = False) -> None:
        recorder = self._recorder
        now = time.perf_counter()
        was_watched = recorder.has_events
        if is_partial:
            recorder.add_scalar("partial", 1.0)
        else:
            self._pace.add(
                now - self._began,
                recorder.own_seconds,
                was_watched=was_watched,
                had_extras=was_watched and bool(recorder.extras),
            )
        if was_watched or recorder.has_scalars:
            self._deliver(recorder.end_step(self.number))
        self._watched += was_watched
        if was_watched:
            self._since_extras = (self._since_extras + 1) % self._pace.extra_stride
        self._began = now
