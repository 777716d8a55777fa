"""The steps of a watch: when one ends and the next begins, and what is measured in each.

A step begins when a model, or a part of it, is called with grad after an optimizer has stepped, or
where an optimizer steps that has stepped already. So optimizers that step one after the other share
a step, and so do micro-batches that one step follows. Which of them are watched, the pace says; in
the others nothing is attached.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline._torch import graph_task_id
from hookline.stats import Extras
from hookline.watchers.attaching import Attachment
from hookline.watchers.backwards import Backwards
from hookline.watchers.delivering import Delivery
from hookline.watchers.pacing import Pace
from hookline.watchers.reacting import Reaction
from hookline.watchers.recording import Recorder
from hookline.watchers.seeking import OF_BACKWARD, OF_STEPS, Seeker
from hookline.watchers.strangers import Strangers
from hookline.watchers.turns import Turns
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
        turns: Turns,
        optimizers: Sequence[Optimizer] | None,
        seeker: Seeker,
        reaction: Reaction,
        delivery: Delivery,
        abandon: Callable[[], None],
        strangers: Strangers | None,
    ) -> None:
        self.number = first
        """The number of the step under way."""
        self.is_running = False
        self.is_paused = False
        self._recorder = recorder
        self._weights = weights
        self._pace = pace
        self._attachment: Attachment | None = None
        self._turns = turns
        self._counted = None if optimizers is None else [weakref.ref(one) for one in optimizers]
        self._seeker = seeker
        self._reaction = reaction
        self._delivery = delivery
        self._abandon = abandon
        self._strangers = strangers
        self._backwards = Backwards()
        self._stepped: list[weakref.ref[Optimizer]] = []
        """The optimizers that have stepped in the step under way."""
        self.is_complete = False
        """Whether an optimizer has stepped in the step under way, or what stands for it."""
        self._has_call = False
        self._is_scaled = False
        """Whether the gradients of the step under way have the factor of a GradScaler."""
        self._new_losses = (0, 0)
        """How many losses the backward under way has, and what was measured before it."""
        self._was_bad = False
        """Whether something was not finite before."""
        self._unread: list[Tensor] = []
        """Losses on a device, in a step in which nothing else is looked at."""
        self._bad_loss: float | None = None
        """A loss on the CPU that is not finite, until it was looked into."""
        self._has_bad_loss = False
        """Whether the step under way has a loss that is not finite."""
        self._with_closure: weakref.ref[Optimizer] | None = None
        self._is_in_closure = False
        """Whether an optimizer is under way that calls the model itself."""
        self._is_due = False
        self._is_next_due: bool | None = None
        self._began = 0.0
        self._process = os.getpid()

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
        if self.is_complete or self._recorder.has_events or self._recorder.has_scalars:
            if not self.is_complete and self.is_running:
                self._look_for_bad()
            self._end(is_partial=not self.is_complete)
        self.is_running = False
        self._recorder.switch(False)
        self._seeker.drop()

    # What the clock tells.

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Measure the weights and gradients of an optimizer that is about to step."""
        if not self._is_ours(optimizer):
            self._meet_stranger(optimizer)
            return
        self._raise_waiting()
        self._begin_if_again(optimizer)
        self._with_closure = weakref.ref(optimizer) if has_closure else None
        if self._recorder.is_on:
            with self._recorder.timed(), torch.no_grad():
                self._weights.before(optimizer, has_closure=has_closure)
        self._is_in_closure = has_closure
        if not has_closure:
            self._check_values()

    def after_step(self, optimizer: Optimizer) -> None:
        """Measure what the step changed, and look ahead."""
        self._is_in_closure = False
        if not self._is_ours(optimizer):
            return
        had_closure = self._with_closure is not None and self._with_closure() is optimizer
        if self._recorder.is_on:
            moments = self._turns.is_due(self._turns.moments)
            with self._recorder.timed(), torch.no_grad():
                self._weights.after(optimizer, has_closure=had_closure, moments=moments)
        self._note_step(optimizer)
        if had_closure:
            self._check_values()

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Count a step that a gradient scaler left out; its gradients are worth seeing."""
        if not self._is_ours(optimizer):
            return
        self._raise_waiting()
        self._begin_if_again(optimizer)
        if self._recorder.is_on:
            with self._recorder.timed(), torch.no_grad():
                self._weights.skipped(optimizer)
        self._note_step(optimizer)
        self._check_values()

    def note_scale(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Learn the factor that a gradient scaler has put into the gradients of this step."""
        if not self._is_ours(optimizer):
            return
        self._begin_if_again(optimizer)
        self._is_scaled = True
        if self._recorder.is_on:
            self._recorder.scale_gradients(scale)

    def set_aside(self) -> None:
        """Take all hooks off the models for a moment."""
        if self._attachment is not None and self.is_running and self.is_here:
            self._attachment.set_aside()

    def put_back(self) -> None:
        """Put them on again."""
        if self._attachment is not None and self.is_running and self.is_here:
            self._attachment.put_back()

    def note_scaled(self) -> None:
        """Learn that a gradient scaler has put its factor into a loss of this step."""
        self._is_scaled = True

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """Take what backward is called on as the loss, where a watched model ran before it."""
        recorder = self._recorder
        if self.is_paused or not self._is_our_backward:
            return
        assert self._attachment is not None
        if self.is_complete and not self._attachment.hears_calls:
            self.advance()  # no call could tell that the next step has begun
        if recorder.is_on and self._weights.local is not None:
            with recorder.timed():
                self._weights.local.attach()
        with torch._C.DisableTorchFunction():  # no mode is to see that
            # A closure may be called again and again; the first time is the step's.
            if recorder.is_on and not (self._is_in_closure and recorder.has_losses):
                with recorder.timed():
                    for one in losses:
                        recorder.add_loss(one)
                self._new_losses = len(losses), recorder.progress
            numbers = [one.detach().item() for one in losses if one.device.type == "cpu"]
            if self._is_looking and not recorder.is_on:
                # Nothing else tells of a step that is not watched; it is read when it is there.
                self._unread += [one.detach() for one in losses if one.device.type != "cpu"]
        if self._take_bad_loss(numbers):
            # The weights are still those of the forward, whoever changes them later.
            self._has_bad_loss = self._look_for_bad()

    def _take_bad_loss(self, numbers: Sequence[float]) -> bool:
        bad = [one for one in numbers if not math.isfinite(one)]
        if not bad or not self._is_looking or (self._is_scaled and math.isinf(bad[0])):
            return False
        self._bad_loss = bad[0]
        return True

    def after_backward(self, *, fills: bool = True) -> None:
        """Learn that a backward pass is over: where no optimizer ever steps, so is the step."""
        recorder = self._recorder
        if not self._is_our_backward:
            return
        recorder.queue.settle()
        count, before = self._new_losses
        self._new_losses = 0, 0
        if count and recorder.has_gradients and recorder.progress == before:
            recorder.drop_losses(count)  # it went past every watched value: not our loss
            return
        self._backwards.note_backward(fills=fills)
        if recorder.is_on:
            self._weights.note_backward(is_last=self._backwards.is_by_hand)
        if self._strangers is not None:
            self._strangers.note_backward()
        if self._is_in_closure:
            self._check_values()  # the weights change as soon as the closure returns
        elif self._backwards.is_by_hand:
            self._check_values()
            self._complete()
        elif self._has_bad_loss and self._backwards.may_be_by_hand:
            self._check_values()  # no optimizer has stepped so far, and maybe none will

    @property
    def _is_our_backward(self) -> bool:
        """Whether a watched model ran in this step; where nobody can know, whether there is one."""
        if not self.is_running or not self.is_here or self._recorder.is_deaf:
            return False
        assert self._attachment is not None
        is_heard = self._has_call or self._recorder.has_events
        return is_heard or not self._attachment.hears_calls

    # What the models tell.

    def on_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], prefix: str
    ) -> None:
        """Learn that a call of a model begins, or of a part of it by itself."""
        self._begin_call()
        if self.is_running and self.is_here:
            with self._recorder.timed():
                self._seeker.keep(module, args, kwargs, prefix)

    def on_unseen_call(self, module: nn.Module) -> None:
        """Learn that one begins inside a compiled graph, where its arguments stay."""
        self._begin_call()
        self._seeker.has_unseen = True

    def _begin_call(self) -> None:
        if self._backwards.turns_by_hand(self._weights.parameters):
            self.is_complete = True
        self.begin_if_due()
        if self.is_running and self.is_here:
            self._has_call = True

    def on_return(self, module: nn.Module, output: Any) -> None:
        """Learn what it gave."""
        if self.is_running and self.is_here:
            self._seeker.note_output(module, output)

    def begin_if_due(self) -> None:
        """Begin the next step where this one is complete: a model, or a part of it, is called."""
        if not self.is_running or not self.is_here:
            return
        if self._recorder.has_given_up:
            self.is_running = False
            self._delivery.speak()
            self._abandon()
            self._recorder.guard.raise_failure()
        elif self.is_complete:
            self.advance()
            if self._backwards.is_by_hand:
                self._raise_waiting()
        elif self._backwards.has_idle_calls:
            self._backwards.note_step(is_told=False)
            self.advance(is_partial=True)

    def _begin_if_again(self, optimizer: Optimizer) -> None:
        if any(one() is optimizer for one in self._stepped):
            self.advance()

    def _meet_stranger(self, optimizer: Optimizer) -> None:
        if self._strangers is None or not self.is_running or not self.is_here:
            return
        with self._recorder.timed():
            found = self._strangers.note_step(optimizer, step=self.number)
        if found is not None:
            self._delivery.take_finding(found)
            self._backwards.take_by_hand()  # what it steps after is a step all the same

    def _note_step(self, optimizer: Optimizer) -> None:
        self._backwards.note_step(is_told=True)
        if self._strangers is not None:
            self._strangers.note_own_step()
        if self._counted is not None and not any(one() is optimizer for one in self._counted):
            return
        self._stepped.append(weakref.ref(optimizer))
        self._complete()

    def _complete(self) -> None:
        """Let whatever is called next begin the step: the model, or a part of it by itself."""
        self.is_complete = True
        self._recorder.await_begin(self.begin_if_due)
        if graph_task_id() != -1:  # it steps inside the backward, which is not over
            return
        if self._is_next_due is None:
            self._is_next_due = self._pace.is_due(self.number + 1)
            self._attach(self._is_next_due)

    # Values that are not finite.

    @property
    def _is_looking(self) -> bool:
        return self._seeker.is_seeking or (self._reaction.raises and not self._was_bad)

    def _look_for_bad(self) -> bool:
        """Look for what is not finite in the step so far, and for the operation that made it."""
        recorder = self._recorder
        if not self._is_looking:
            return False
        with recorder.timed():
            if self._unread:
                with torch._C.DisableTorchFunction():
                    self._take_bad_loss([one.item() for one in self._unread])
                self._unread.clear()
            kinds: set[str] = set()
            if recorder.is_on:
                kinds = recorder.find_bad(is_scaled=self._is_scaled) - OF_STEPS
            if self._bad_loss is not None:
                kinds.add("loss")
                if not recorder.is_on:
                    recorder.add_scalar("loss", self._bad_loss)
                self._bad_loss = None
            if self._is_scaled:  # a scaler is there to let gradients overflow now and then
                kinds -= OF_BACKWARD
            if not kinds:
                return False
            self._was_bad = True
            if self._seeker.is_seeking:
                origin = self._seeker.seek(kinds)
                if origin is not None:
                    recorder.note("origin", origin.to_dict())
        return True

    def _check_values(self) -> None:
        """Where something is not finite and findings are to be raised, judge at once and raise."""
        is_bad = self._look_for_bad() or self._has_bad_loss
        if is_bad and self._reaction.raises:
            self.advance(is_partial=not self.is_complete)
            self._delivery.flush()
            self._raise_waiting()

    def _raise_waiting(self) -> None:
        """Raise what other threads found, if that was asked for."""
        self._recorder.guard.raise_failure()
        self._reaction.raise_waiting()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        return self.is_running and self.is_here and self._weights.owns_any(optimizer)

    # Steps.

    def advance(self, *, is_partial: bool = False) -> None:
        """End the step under way and begin the next."""
        if not self.is_running:
            return
        self._end(is_partial=is_partial)
        self.number += 1
        due = self._is_next_due
        self._begin(self._pace.is_due(self.number) if due is None else due)

    def end_by_hand(self) -> None:
        """End the step under way because the user says so."""
        self._backwards.note_step(is_told=True)
        self._check_values()
        self.advance()
        self._raise_waiting()

    def pause(self) -> None:
        """Measure nothing until `resume`."""
        self.is_paused = True
        self._recorder.switch(False)
        self._attach(False)

    def resume(self) -> None:
        """Go on with the step under way."""
        self.is_paused = False
        self._recorder.switch(self._is_due)
        self._attach(self._is_due if self._is_next_due is None else self._is_next_due)

    def _begin(self, is_due: bool) -> None:
        assert self._attachment is not None
        recorder = self._recorder
        self._stepped.clear()
        self._seeker.drop()
        recorder.tell_begin = None
        self.is_complete = self._has_call = self._is_scaled = self._is_in_closure = False
        self._unread.clear()
        self._bad_loss = None
        self._has_bad_loss = False
        self._is_due = is_due
        self._is_next_due = None
        self._weights.begin_step(self.number)
        is_on = is_due and not self.is_paused
        extras = self._turns.extras
        recorder.start_step(extras, is_on=is_on, units=self._turns.has_units)
        recorder.units.with_outliers = bool(extras & Extras.COUNTS)
        self._attachment.begin_step(self.number)
        self._attach(is_due)

    def _attach(self, is_due: bool) -> None:
        if not self.is_running or self._attachment is None:
            return
        if is_due and not self.is_paused:
            self._attachment.attach()
        else:
            self._attachment.detach()
            if self._weights.local is not None:
                self._weights.local.detach()

    def _end(self, *, is_partial: bool = False) -> None:
        recorder = self._recorder
        if recorder.is_on and self._attachment is not None:
            self._weights.end_step()
            self._attachment.end_step(self.number)
        now = time.perf_counter()
        was_watched = recorder.has_events
        if is_partial:
            recorder.add_scalar("partial", 1.0)
        else:
            self._pace.add(
                now - self._began,
                recorder.own_seconds + recorder.units.own_seconds,
                was_watched=was_watched,
                had_extras=was_watched and bool(recorder.extras),
            )
        if was_watched or recorder.has_scalars:
            harvest = recorder.end_step(self.number)
            if self._reaction.wants_calls:
                harvest.calls = self._seeker.calls
            self._delivery.take(harvest)
        if was_watched:
            self._turns.pass_on(self._pace.extra_stride)
        self._began = now
