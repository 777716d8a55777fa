"""How a watch hears an output and its gradient in the fewest steps, module by module.

What can only change from one step to the next is not looked at for every value: the queue says
whether it is open, and its lane, if that is the same as before, takes the value as it is. All that
is out of the ordinary goes the longer way, through the listener.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hookline._torch import is_functorch_active, is_tracing, raw_cuda_stream
from hookline.hooks.visits import GradientHook, LightEar
from hookline.watchers.waiting import TOGETHER, Lane

if TYPE_CHECKING:
    from hookline.watchers.listening import WatchListener


def make_swift_ear(listener: WatchListener) -> LightEar:
    """Make what hears the outputs of one module until the session closes."""
    session, queue = listener.session, listener.recorder.queue
    epoch = session.epoch
    lane: Lane | None = None
    hasty: frozenset[int] | None = None
    site = -1
    hooks: dict[Lane, GradientHook] = {}

    def hear_gradient(grad: Tensor | None) -> None:
        if grad is not None and session.epoch is epoch:
            listener.on_light_gradient(grad)

    hook: GradientHook = hear_gradient

    def hear(output: Tensor) -> GradientHook | None:
        opened = queue.open
        if opened is not None and listener.is_due:
            device = output.get_device()
            if (
                device == opened.device
                and raw_cuda_stream(device) == opened.stream
                and not is_functorch_active()
                and not is_tracing()
                and ((opened is lane and queue.hasty is hasty) or turn_to(opened))
            ):
                waiting = opened.waiting
                # Not before the next one comes: a module around often returns the very same.
                if len(waiting) >= TOGETHER:
                    queue.settle_values(opened)
                try:
                    waiting.append((site, output, output._version))
                except RuntimeError:  # made in inference mode, it has no version
                    return hear_otherwise(output)
                return hook
        return hear_otherwise(output)

    def turn_to(opened: Lane) -> bool:
        """Put values and gradients into a lane from now on; false where values must not wait."""
        nonlocal lane, hasty, site, hook
        if session.epoch is not epoch:
            return False
        known = hooks.get(opened)
        if known is None:
            known = queue.make_box(opened, listener.gradient_site) or hear_gradient
        elif listener.gradient_site in queue.hasty:
            known = hear_gradient
        hooks[opened] = known
        if listener.value_site < 0 or listener.value_site in queue.hasty:
            return False
        lane, hasty, site, hook = opened, queue.hasty, listener.value_site, known
        return True

    def hear_otherwise(output: Tensor) -> GradientHook | None:
        listener.on_light(output, has_grad=True)  # this may begin a step, or end the session
        if session.epoch is not epoch or is_functorch_active():
            return None
        opened, device = queue.open, output.get_device()
        if opened is None or opened.device != device or opened.stream != raw_cuda_stream(device):
            return hear_gradient
        turn_to(opened)
        return hooks.get(opened, hear_gradient)

    return hear
