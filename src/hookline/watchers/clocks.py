"""The clock of a watch: optimizers as they step, gradient scalers that make them skip, backwards.

Torch calls global hooks around the step of every optimizer. A step that a GradScaler leaves out is
seen by nobody, and neither is what backward is called on, so while something is watched the methods
of `GradScaler`, `torch.autograd.backward` and `torch.autograd.grad` tell of it; and so does
`torch.jit.script`, which would compile hooks with the model. Afterwards all are torch's own again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hookline._compiler import leave_uncompiled, run_uncompiled
from hookline._torch import gradient_scale, graph_task_id
from hookline.watchers.guarding import Guard

_outside = functools.partial(
    leave_uncompiled, why="what is watched is written down outside of graphs"
)


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

    def note_scaled(self) -> None:
        """Learn that a gradient scaler has put its factor into a loss."""

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """Learn that backward is called on these numbers."""

    def after_backward(self, *, fills: bool) -> None:
        """Learn that it is over; whether the gradients of parameters are filled."""

    def set_aside(self) -> None:
        """Take all hooks off the models for a moment."""

    def put_back(self) -> None:
        """Put them on again."""


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
                _Replacement(GradScaler, "scale", _tell_of_scaling),
                _Replacement(torch.autograd, "backward", _tell_of_backwards),
                _Replacement(torch.autograd, "grad", _tell_of_gradients),
                _Replacement(torch.jit, "script", _script_without_hooks),
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

    @_outside
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_closure = (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
        self.tell(self._hearer.before_step, optimizer, has_closure=has_closure)

    @_outside
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

    def tell_backward_over(self, *, fills: bool) -> None:
        """Pass on that backward is over."""
        self.tell(self._hearer.after_backward, fills=fills)

    def tell_script(self, *, is_over: bool) -> None:
        """Pass on that a model may be compiled, or is."""
        self.tell(self._hearer.put_back if is_over else self._hearer.set_aside)

    def tell_scaled(self) -> None:
        """Pass on that a loss was scaled."""
        self.tell(self._hearer.note_scaled)


class _Replacement:
    """A function of torch's that is exchanged for one that tells of its calls, until undone."""

    def __init__(self, owner: Any, name: str, tell: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._own = own = getattr(owner, name)
        self._is_active = True

        @functools.wraps(own)
        @run_uncompiled
        def told(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._is_active:
                return own(*args, **kwargs)
            return tell(own, *args, **kwargs)

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
        clock.tell_backward_over(fills=True)
    return result


class _Here(threading.local):
    """What this thread is doing."""

    is_in_grad = False
    is_in_script = False


_here = _Here()


def _tell_of_gradients(grad: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `torch.autograd.grad`; asked for gradients of parameters, it is a backward too."""
    outputs, inputs, _, _, has_graph = (*args, None, None, None, None, None)[:5]
    outputs, inputs = kwargs.get("outputs", outputs), kwargs.get("inputs", inputs)
    # It calls itself again where a mode is on. What makes a graph is a part of a loss.
    is_part = _here.is_in_grad or graph_task_id() != -1
    if is_part or has_graph or kwargs.get("create_graph") or not _has_parameter(inputs):
        return grad(*args, **kwargs)
    clocks = tuple(Clock._running)
    for clock in clocks:
        clock.tell_backward(outputs)
    _here.is_in_grad = True
    try:
        result = grad(*args, **kwargs)
    finally:
        _here.is_in_grad = False
    for clock in clocks:
        clock.tell_backward_over(fills=False)
    return result


def _script_without_hooks(script: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `torch.jit.script` while no hook of a watch is on any model."""
    if len(args) < 3:
        # Names are looked up in the frame of whoever calls: two further up than torch thinks.
        kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 2
    if _here.is_in_script:
        return script(*args, **kwargs)
    clocks = tuple(Clock._running)
    _here.is_in_script = True
    for clock in clocks:
        clock.tell_script(is_over=False)
    try:
        return script(*args, **kwargs)
    finally:
        _here.is_in_script = False
        for clock in clocks:
            clock.tell_script(is_over=True)


def _has_parameter(inputs: Any) -> bool:
    """Tell whether the first of what gradients are wanted of is a parameter."""
    if isinstance(inputs, dict):
        inputs = list(inputs.values())
    first = inputs[0] if isinstance(inputs, (list, tuple)) and inputs else inputs
    return isinstance(first, nn.Parameter)


def _tell_of_scaling(
    scale: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any
) -> Any:
    """Call `GradScaler.scale`, and let running clocks learn that a loss has a factor."""
    result = scale(scaler, *args, **kwargs)
    if gradient_scale(scaler) is not None:
        for clock in tuple(Clock._running):
            clock.tell_scaled()
    return result


def _find_losses(tensors: Any) -> list[Tensor]:
    """List what backward is called on, as far as it is single numbers."""
    given = [tensors] if isinstance(tensors, Tensor) else tensors
    if not isinstance(given, (list, tuple)):
        return []
    with torch._C.DisableTorchFunction():  # no mode is to see that
        return [one for one in given if isinstance(one, Tensor) and one.numel() == 1]
