"""The clock of a watch: optimizers as they step, and gradient scalers that make them skip.

Torch calls global hooks around the step of every optimizer. A step that a GradScaler leaves out is
seen by nobody, so while something is watched `GradScaler.step` tells of it; afterwards the method
is torch's own again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hookline._torch import gradient_scale


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


class Clock:
    """Tell one hearer of every step while it runs."""

    _running: ClassVar[list[Clock]] = []
    _own_step: ClassVar[Callable[..., Any] | None] = None
    _put_step: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, hearer: StepHearer) -> None:
        self._hearer = hearer
        self._handles: list[Any] = []
        self.steps_heard = 0

    def start(self) -> None:
        """Begin to listen."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        if not Clock._running:
            Clock._own_step = GradScaler.step
            Clock._put_step = _telling(GradScaler.step)
            GradScaler.step = Clock._put_step  # type: ignore[method-assign]
        Clock._running.append(self)

    def stop(self) -> None:
        """Stop listening; does nothing the second time."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self in Clock._running:
            Clock._running.remove(self)
            if not Clock._running and Clock._own_step is not None:
                if GradScaler.step is Clock._put_step:  # else somebody put theirs over it
                    GradScaler.step = Clock._own_step  # type: ignore[method-assign]
                Clock._own_step = Clock._put_step = None

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_closure = (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
        self._hearer.before_step(optimizer, has_closure=has_closure)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.steps_heard += 1
        self._hearer.after_step(optimizer)

    def tell_scale(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Pass on the factor that is in the gradients."""
        self._hearer.note_scale(optimizer, scale)

    def tell_skipped(self, optimizer: Optimizer) -> None:
        """Pass on that a step was left out."""
        self._hearer.skipped_step(optimizer)


def _telling(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `GradScaler.step` so that running clocks learn of steps that it left out."""

    @functools.wraps(step)
    def tell(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        scale = gradient_scale(scaler)
        if scale is not None:
            for clock in Clock._running:
                clock.tell_scale(optimizer, scale)
        before = [(clock, clock.steps_heard) for clock in Clock._running]
        result = step(scaler, optimizer, *args, **kwargs)
        for clock, heard in before:
            if clock.steps_heard == heard:
                clock.tell_skipped(optimizer)
        return result

    return tell
