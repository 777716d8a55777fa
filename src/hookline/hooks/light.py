"""The short way of an output and its gradient to a listener that wants neither visit nor frame.

It is for those who listen at every module of every step. What most outputs take is one function
that has everything at hand; what is seldom goes the longer way, `hear_lightly`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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
from hookline.hooks.visits import GradientHook, Listener, Station, Visit

if TYPE_CHECKING:
    from hookline.hooks.sessions import Session

Light = tuple["Session", Station, Listener]
"""The only one who listens at a module: see `Plan.light`."""


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


_LINEAR = nn.Linear.forward
_latest: list[Callable[[], Tensor | None]] = [lambda: None]
"""The view that a linear layer returned last, a hook being on what it shows."""


def hook_output(module: nn.Module, output: Tensor, hook: GradientHook) -> bool:
    """Put a hook on a module's output, in the fewest steps; false where it takes more."""
    node: Any = output.grad_fn  # read before a hook is put there: on a stale view that crashes
    base = output._base
    if base is not None:
        if type(module).forward is _LINEAR and base.numel() == output.numel():
            # On what its own node made, it hears all, whatever is done to the view.
            _latest[0] = ref(output)
            output, node = base, base.grad_fn
        elif _latest[0]() is output and base._backward_hooks is not None:
            output = base  # the very view, handed on by the module around
        else:
            return False
    if node is None:
        return False
    hooks: Any = output._backward_hooks
    if hooks is None:
        output._backward_hooks = hooks = OrderedDict()
        node._register_hook_dict(output)
        hooks[-1] = hook  # a number that no handle of torch's has
    else:
        key = RemovableHandle.next_id
        RemovableHandle.next_id = key + 1
        hooks[key] = hook
    return True


def hear_lightly(
    light: Light,
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
    return wire_lightly(light, module, args, kwargs, output) if has_grad else output


def wire_lightly(
    light: Light,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
) -> Tensor:
    """Have a listener told of the gradient of an output; give the output that flows on."""
    session, station, listener = light
    if not session.is_open or not output.requires_grad:
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
