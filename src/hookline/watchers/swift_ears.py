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
from hookline.stats import TOGETHER
from hookline.watchers.waiting import LARGE, MOST_HELD, Lane

if TYPE_CHECKING:
    from hookline.watchers.listening import WatchListener

_Way = tuple[Lane | None, frozenset[int], int, GradientHook]
"""The lane that values wait in, the sites that do not, the value's own, and where gradients go."""

_NO_WAY: _Way = None, frozenset(), -1, lambda grad: None


def make_swift_ear(listener: WatchListener) -> LightEar:
    """Make what hears the outputs of one module whenever the session is open."""
    session, queue = listener.session, listener.recorder.queue
    # One object each, since threads share an ear, and may have a lane each.
    way = _NO_WAY
    known: tuple[object | None, dict[Lane | None, GradientHook]] = None, {}

    def hear(output: Tensor) -> GradientHook | None:
        opened = queue.open
        if opened is not None and listener.is_due:
            device = output.get_device()
            if (
                device == opened.device
                and raw_cuda_stream(device) == opened.stream
                and not is_functorch_active()
                and not is_tracing()
                and (size := output.numel()) <= LARGE
            ):
                lane, hasty, site, hook = way
                if opened is not lane or queue.hasty is not hasty:
                    lane, _, site, hook = turn_to(opened, size)
                if lane is not None:
                    waiting = lane.waiting
                    # Not before the next one comes: a module around often returns the very same.
                    if len(waiting) >= TOGETHER or lane.held > MOST_HELD:
                        queue.settle_values(lane)
                    lane.held += size
                    try:
                        waiting.append((site, output, output._version))
                    except RuntimeError:  # made in inference mode, it has no version
                        return hear_otherwise(output)
                    return hook
        return hear_otherwise(output)

    def turn_to(opened: Lane, size: int) -> _Way:
        """Give how values and gradients get into a lane; with no lane where values must not."""
        nonlocal way
        hasty, site = queue.hasty, listener.value_site
        if site < 0 or site in hasty or session.epoch is None:
            return _NO_WAY
        way = opened, hasty, site, find_hook(opened, size)
        return way

    def find_hook(opened: Lane | None, size: int = 0) -> GradientHook:
        """Give what gradients are put into, if they may wait; else what has them measured."""
        nonlocal known
        epoch, hooks = known
        if epoch is not session.epoch:  # what came before it is not heard any more
            known = epoch, hooks = session.epoch, {}
        hook = hooks.get(opened)
        is_hasty = listener.gradient_site in queue.hasty
        if hook is None and opened is not None and not is_hasty:
            hook = queue.make_box(opened, listener.gradient_site, size)
        if hook is None or is_hasty:
            hook = hooks.get(None) or listener.make_gradient_hook()
            hooks[None] = hook
        hooks[opened] = hook
        return hook

    def hear_otherwise(output: Tensor) -> GradientHook | None:
        epoch = session.epoch
        listener.on_light(output, has_grad=True)  # this may begin a step, or end the session
        if session.epoch is not epoch or epoch is None or is_functorch_active():
            return None
        opened, device = queue.open, output.get_device()
        if opened is None or not listener.is_due or (size := output.numel()) > LARGE:
            return find_hook(None)
        if opened.device != device or opened.stream != raw_cuda_stream(device):
            return find_hook(None)
        return find_hook(opened, size)

    return hear
