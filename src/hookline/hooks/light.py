"""The short way of a gradient to a listener that wants neither the visit nor a frame.

It is for those who listen at every module of every step: a tensor hook that calls them, and for a
view one that first looks whether its memory was changed.
"""

from __future__ import annotations

from torch import Tensor

from hookline._torch import CreationMeta, add_tensor_hook, creation_meta, is_functorch_active
from hookline.hooks.gradients import wire_one, witness_of
from hookline.hooks.visits import Call, Listener, Station, Visit


class LightRelay:
    """Bring the gradient of a fresh tensor to a listener that does not ask for the visit."""

    __slots__ = ("epoch", "listener")

    def __init__(self, listener: Listener, epoch: object) -> None:
        self.listener = listener
        self.epoch = epoch

    def __call__(self, grad: Tensor) -> None:
        """Serve as a tensor hook."""
        if self.listener.session.epoch is self.epoch:
            self.listener.on_light_gradient(grad)


class LightViewRelay(LightRelay):
    """Do so for a view, unless its memory was changed since: then views are tapped from now on."""

    __slots__ = ("version", "witness")

    def __init__(self, listener: Listener, epoch: object, view: Tensor) -> None:
        super().__init__(listener, epoch)
        self.version = view._version
        self.witness = witness_of(view)
        listener.on_hooked_view((), self.witness, self.version)

    def __call__(self, grad: Tensor) -> None:
        if self.witness._version == self.version:
            super().__call__(grad)
        else:
            self.listener.hooks_views = False


def wire_light(output: Tensor, listener: Listener, station: Station, call: Call) -> Tensor:
    """Have the gradient of a tensor that a module made delivered; give the output that flows on."""
    if not output.requires_grad:
        return output
    if output.is_leaf or is_functorch_active():
        return wire_one(output, listener, Visit(station, call, None), {})
    if not output._is_view() or creation_meta(output) == CreationMeta.MULTI_OUTPUT_NODE:
        add_tensor_hook(output, LightRelay(listener, call.epoch))
    elif listener.hooks_views:
        add_tensor_hook(output, LightViewRelay(listener, call.epoch, output))
    else:
        return wire_one(output, listener, Visit(station, call, None), {})
    return output
