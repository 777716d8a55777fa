"""The clock of a watch: optimizers as they step, gradient scalers that make them skip, backwards.

Torch calls global hooks around the step of every optimizer. A step that a GradScaler leaves out is
seen by nobody, and neither is what backward is called on, so while something is watched
`GradScaler.step` and `torch.autograd.backward` tell of it; afterwards both are torch's own again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hookline._torch import gradient_scale, graph_task_id
from hookline.watchers.guarding import Guard


class StepHearer(Protocol):
    """Whoever wants to know of steps."""

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Learn that an optimizer is about to step."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Learn that it has."""

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Learn that a gradient scaler left its step out."""

    def note_scale(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Learn the factor that a gradient scaler has put into the gradients."""

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """Learn that backward is called on these numbers."""

    def after_backward(self) -> None:
        """Learn that it is over."""


class Clock:
    """Tell one hearer of every step while it runs."""

    _running: ClassVar[list[Clock]] = []
    _replacements: ClassVar[list[_Replacement]] = []

    def __init__(self, hearer: StepHearer, guard: Guard) -> None:
        self._hearer = hearer
        self._guard = guard
        self._handles: list[Any] = []
        self.steps_heard = 0

    def start(self) -> None:
        """Begin to listen."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        if not Clock._running:
            Clock._replacements = [
                _Replacement(GradScaler, "step", _tell_of_steps),
                _Replacement(torch.autograd, "backward", _tell_of_backwards),
            ]
        Clock._running.append(self)

    def stop(self) -> None:
        """Stop listening; does nothing the second time."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self in Clock._running:
            Clock._running.remove(self)
            if not Clock._running:
                for one in Clock._replacements:
                    one.undo()
                Clock._replacements = []

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_closure = (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
        self.tell(self._hearer.before_step, optimizer, has_closure=has_closure)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.steps_heard += 1
        self.tell(self._hearer.after_step, optimizer)

    def tell(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Pass something on; what goes wrong there is not the training's matter."""
        try:
            method(*args, **kwargs)
        except Exception as error:
            self._guard.take(error)

    def tell_scale(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Pass on the factor that is in the gradients."""
        self.tell(self._hearer.note_scale, optimizer, scale)

    def tell_skipped(self, optimizer: Optimizer) -> None:
        """Pass on that a step was left out."""
        self.tell(self._hearer.skipped_step, optimizer)

    def tell_backward(self, tensors: Any) -> None:
        """Pass on what backward is called on."""
        self.tell(lambda: self._hearer.before_backward(_find_losses(tensors)))

    def tell_backward_over(self) -> None:
        """Pass on that backward is over."""
        self.tell(self._hearer.after_backward)


class _Replacement:
    """A function of torch's that is exchanged for one that tells of its calls, until undone."""

    def __init__(self, owner: Any, name: str, tell: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._own = own = getattr(owner, name)
        self._is_active = True

        @functools.wraps(own)
        def told(*args: Any, **kwargs: Any) -> Any:
            return tell(own, *args, **kwargs) if self._is_active else own(*args, **kwargs)

        self._put = told
        setattr(owner, name, told)

    def undo(self) -> None:
        """Put torch's own back; where somebody has put theirs over ours, ours just calls on."""
        self._is_active = False
        if getattr(self._owner, self._name) is self._put:
            setattr(self._owner, self._name, self._own)


def _tell_of_steps(
    step: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
) -> Any:
    """Call `GradScaler.step`, and let running clocks learn of steps that it left out."""
    scale = gradient_scale(scaler)
    if scale is not None:
        for clock in tuple(Clock._running):
            clock.tell_scale(optimizer, scale)
    before = [(clock, clock.steps_heard) for clock in Clock._running]
    result = step(scaler, optimizer, *args, **kwargs)
    for clock, heard in before:
        if clock.steps_heard == heard:
            clock.tell_skipped(optimizer)
    return result


def _tell_of_backwards(
    backward: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call `torch.autograd.backward`, and let running clocks learn what it is called on."""
    if graph_task_id() != -1:  # a part of another backward
        return backward(tensors, *args, **kwargs)
    clocks = tuple(Clock._running)
    for clock in clocks:
        clock.tell_backward(tensors)
    result = backward(tensors, *args, **kwargs)
    for clock in clocks:
        clock.tell_backward_over()
    return result


def _find_losses(tensors: Any) -> list[Tensor]:
    """List what backward is called on, as far as it is single numbers."""
    given = [tensors] if isinstance(tensors, Tensor) else tensors
    if not isinstance(given, (list, tuple)):
        return []
    with torch._C.DisableTorchFunction():  # no mode is to see that
        return [one for one in given if isinstance(one, Tensor) and one.numel() == 1]
