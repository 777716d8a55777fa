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
        if queue.open is lane and lane is not None and queue.hasty is hasty and listener.is_due:
            device = output.get_device()
            if (
                device == lane.device
                and raw_cuda_stream(device) == lane.stream
                and not is_functorch_active()
                and not is_tracing()
            ):
                waiting = lane.waiting
                # Not before the next one comes: a module around often returns the very same.
                if len(waiting) >= TOGETHER:
                    queue.settle_values(lane)
                try:
                    waiting.append((site, output, output._version))
                except RuntimeError:  # made in inference mode, it has no version
                    return hear_otherwise(output)
                return hook
        return hear_otherwise(output)

    def hear_otherwise(output: Tensor) -> GradientHook | None:
        nonlocal lane, hasty, site, hook
        listener.on_light(output, has_grad=True)  # this may begin a step, or end the session
        if session.epoch is not epoch or is_functorch_active():
            return None
        opened, device = queue.open, output.get_device()
        if opened is None or opened.device != device or opened.stream != raw_cuda_stream(device):
            return hear_gradient
        known = hooks.get(opened)
        if known is None:
            known = queue.make_box(opened, listener.gradient_site) or hear_gradient
        elif listener.gradient_site in queue.hasty:
            known = hear_gradient
        hooks[opened] = known
        if listener.value_site not in queue.hasty:
            lane, hasty, site, hook = opened, queue.hasty, listener.value_site, known
        return known

    return hear
