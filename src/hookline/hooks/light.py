"""The short way of a gradient to a listener that wants neither the visit nor a frame.

It is for those who listen at every module of every step: a tensor hook that calls them, and for a
view one that first looks whether its memory was changed.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hookline._torch import (
    CreationMeta,
    add_tensor_hook,
    creation_meta,
    graph_task_id,
    is_functorch_active,
    top_saved_tensor_hooks,
)
from hookline.hooks import checkpoints
from hookline.hooks.caution import maker_of
from hookline.hooks.frames import versions
from hookline.hooks.gradients import NodeRelay, ears_for, wire_one, wire_outputs, witness_of
from hookline.hooks.refusals import refuse_tracing
from hookline.hooks.visits import Listener, Station, Visit

if TYPE_CHECKING:
    from hookline.hooks.sessions import Session


class LightRelay:
    """Bring the gradient of a fresh tensor to a listener that does not ask for the visit."""

    __slots__ = ("epoch", "listener")

    def __init__(self, listener: Listener, epoch: object) -> None:
        self.listener = listener
        self.epoch = epoch

    def __call__(self, grad: Tensor | None) -> None:
        """Serve as a tensor hook."""
        if grad is not None and self.listener.session.epoch is self.epoch:
            self.listener.on_light_gradient(grad)


class LightViewRelay(LightRelay):
    """Do so for a view, unless its memory was changed since: then it is not hooked any more."""

    __slots__ = ("version", "witness")

    def __init__(self, listener: Listener, epoch: object, view: Tensor) -> None:
        super().__init__(listener, epoch)
        self.version = view._version
        self.witness = witness_of(view)
        listener.on_hooked_view((), self.witness, self.version)

    def __call__(self, grad: Tensor | None) -> None:
        if self.witness._version == self.version:
            super().__call__(grad)
        else:
            self.listener.hooks_views = False


def hear_lightly(
    light: tuple[Session, Station, Listener],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> Any:
    """Tell a listener of a module's output, and have it told of the gradient; give the output.

    A recompute has values that were heard of before. Its gradients come only where the first pass
    of a reentrant checkpoint ran without grad; any other recompute has saved-tensor hooks of its
    own, and its graph is never used.
    """
    if is_compiling():
        refuse_tracing()
    session, station, listener = light
    if not session.is_open:
        return output
    has_grad = torch.is_grad_enabled()
    is_again = graph_task_id() != -1 and checkpoints.is_recompute()
    if is_again and top_saved_tensor_hooks(False) is not None:
        return output
    if type(output) is not Tensor:
        listener.is_light = False  # from the next execution on, the longer way
        visit = Visit(station, session.latest_call(), None)
        if not is_again:
            listener.on_output(visit, module, args, kwargs, output)
        ears = ears_for(output, [(listener, visit)]) if has_grad else []
        return wire_outputs(output, ears, versions(args, kwargs), station.path)
    if not is_again:
        call = session.active.get(get_ident())
        is_inside = call is not None and call.depth > 0 and call.grad_at_start
        listener.on_light(output, has_grad=has_grad or is_inside)
    if not has_grad or not output.requires_grad:
        return output
    if output.is_leaf or is_functorch_active():
        return wire_one(output, listener, Visit(station, session.latest_call(), None), {})
    if not output._is_view() or creation_meta(output) == CreationMeta.MULTI_OUTPUT_NODE:
        add_tensor_hook(output, LightRelay(listener, session.epoch))
    elif (maker := maker_of(output, module)) is not None:
        maker.register_prehook(NodeRelay(LightRelay(listener, session.epoch)))
    elif listener.hooks_views:
        add_tensor_hook(output, LightViewRelay(listener, session.epoch, output))
    else:
        is_given_back = any(one is output for one in (*args, *kwargs.values()))
        received = {id(output): output._version} if is_given_back else {}
        return wire_one(output, listener, Visit(station, session.latest_call(), None), received)
    return output
