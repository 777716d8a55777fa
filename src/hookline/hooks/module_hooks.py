"""The two hooks that hookline puts on a module, and the short ways they take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from hookline._torch import graph_task_id, top_saved_tensor_hooks
from hookline.hooks import gradients
from hookline.hooks.frames import CALL_CODE, versions
from hookline.hooks.light import wire_light
from hookline.hooks.refusals import refuse_tracing
from hookline.hooks.visits import Listener, Station, Visit

if TYPE_CHECKING:
    from hookline.hooks.junctions import Junction
    from hookline.hooks.sessions import Session


class ModuleHook:
    """A hook that a copy or a pickle of the model does not carry along."""

    __slots__ = ("junction",)

    def __init__(self, junction: Junction) -> None:
        self.junction = junction

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return forget_hook

    def __reduce__(self) -> tuple[Any, ...]:
        # Loadable where hookline is not installed: a standard function that does nothing here.
        return partial, (sys.audit, "hookline.left_behind")

    def __repr__(self) -> str:
        return f"<hookline {self.junction.sessions()}>"


def forget_hook(module: nn.Module, *_: Any) -> None:
    """Stand in for a hook in a copied model: remove itself when first called."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook is forget_hook]:
            del hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _begin_light(
    junction: Junction, light: tuple[Session, Station, Listener], args: tuple[Any, ...]
) -> bool:
    """Count an execution whose output and gradient one listener wants, and nothing else.

    Where a backward or a checkpoint is under way the longer way is taken, which can tell what is
    done again.
    """
    if graph_task_id() != -1 or not torch.is_grad_enabled():
        return False
    session, station, _ = light
    call = session.active.get(get_ident())
    if call is None or not call.depth or not call.grad_at_start:
        return False
    if top_saved_tensor_hooks(False) is not None:
        return False
    counts = call.counts
    index = counts.get(station, 0)
    counts[station] = index + 1
    station.runs += 1
    first = args[0] if args else None
    version = first._version if type(first) is Tensor and first.requires_grad else -1
    call.short_ways.append((junction, index, version))
    return True


def _is_given_back(
    output: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], version: int
) -> bool:
    """Tell whether an output is an argument as it came in; if in doubt, that it is."""
    for number, one in enumerate(args):
        if one is output:
            return number > 0 or output._version == version
    return bool(kwargs) and any(one is output for one in kwargs.values())


class PreHook(ModuleHook):
    __slots__ = ()

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:  # another thread is putting it there, or taking it away
            return None
        if is_compiling():
            refuse_tracing()
        junction = self.junction
        solo = junction.plan.solo
        if solo is not None and graph_task_id() == -1:
            # Inside a root call of the only session: count, and leave the rest to the post hook.
            session, station, _ = solo
            call = session.active.get(get_ident())
            if call is not None and call.depth:
                counts = call.counts
                index = counts.get(station, 0)
                counts[station] = index + 1
                station.runs += 1
                call.short_ways.append((junction, index, -1))
                return None
        light = junction.plan.light
        if light is not None and light[2].is_light and _begin_light(junction, light, args):
            return None
        bare = junction.plan.bare_root
        if bare is not None and graph_task_id() == -1:
            bare[0].begin(bare[1], get_ident(), -1)
            return None
        return junction.enter(module, args, kwargs)


class PostHook(ModuleHook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *given: Any) -> Any:
        if len(given) == 1:  # another thread is putting it there, or taking it away
            return None
        kwargs, output = given
        # Torch calls it from another function when the forward raised; the output is None then.
        has_raised = output is None and sys._getframe(1).f_code is CALL_CODE
        junction = self.junction
        solo = junction.plan.solo
        if solo is not None:
            session, station, listener = solo
            call = session.active.get(get_ident())
            if call is not None:
                ways = call.short_ways
                if ways and ways[-1][0] is junction:
                    index = ways.pop()[1]
                    if has_raised or listener.note(call, index, output):
                        return None
                    visit = Visit(station, call, index)
                    new = listener.on_output(visit, module, args, kwargs, output)
                    return None if new is output else new
        light = junction.plan.light
        if light is not None:
            session, station, listener = light
            call = session.active.get(get_ident())
            if call is not None and call.short_ways and call.short_ways[-1][0] is junction:
                _, index, version = call.short_ways.pop()
                if has_raised:
                    return None
                if type(output) is Tensor and not _is_given_back(output, args, kwargs, version):
                    listener.on_light(output)
                    new = wire_light(output, listener, station, call)
                else:
                    listener.is_light = False
                    visit = Visit(station, call, index)
                    listener.on_output(visit, module, args, kwargs, output)
                    ears = gradients.ears_for(output, [(listener, visit)])
                    came = versions(args, kwargs)
                    new = gradients.wire_outputs(output, ears, came, station.path)
                return None if new is output else new
        bare = junction.plan.bare_root
        if bare is not None and not junction.frames.get(get_ident()):
            call = bare[0].active.get(get_ident())
            if call is not None and graph_task_id() == -1:
                bare[0].end_root(call)
            return None
        return junction.leave_call(module, args, kwargs, output, has_raised=has_raised)
