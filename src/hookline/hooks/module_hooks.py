"""The two hooks that hookline puts on a module, and the short ways they take."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling, is_exporting

from hookline._compiler import run_uncompiled
from hookline._torch import graph_task_id
from hookline._tracing import find_region
from hookline.hooks.frames import CALL_CODE
from hookline.hooks.light import hear_lightly, hook_output, wire_lightly
from hookline.hooks.operators import show_output
from hookline.hooks.visits import LightEar, Visit

if TYPE_CHECKING:
    from hookline.hooks.junctions import Junction

LEFT_BEHIND = "hookline.left_behind"
"""What tells the stand-in for a hook in a pickled model from anybody else's hook."""

_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Where torch keeps the hooks of a module's calls."""


class ModuleHook:
    """A hook that a copy or a pickle of the model does not carry along."""

    __slots__ = ("junction",)

    def __init__(self, junction: Junction) -> None:
        self.junction = junction

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        copied = memo.get(id(self.junction.module))
        if isinstance(copied, nn.Module) and id(self.junction) not in memo:
            memo[id(self.junction)] = _Copy(copied)
        return forget_hook

    def __reduce__(self) -> tuple[Any, ...]:
        # Loadable where hookline is not installed: a standard method that does nothing, whatever it
        # is given, and that torch.compile can follow.
        return getattr, (nullcontext(LEFT_BEHIND), "__exit__")

    def __repr__(self) -> str:
        return f"<hookline {self.junction.sessions()}>"


class _Copy:
    """Clean a copied module when the memo goes that its copying was done with.

    A hook cannot keep itself out of the copy: what stands for it is put there afterwards.
    """

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __del__(self) -> None:
        if self.module.__dict__.keys() >= set(_TABLES):  # else the copying has failed
            _remove_forgotten(self.module)


def forget_hook(module: nn.Module, *_: Any) -> None:
    """Stand in for a hook in a copied model, where a memo was kept: go when called uncompiled."""
    # Dynamo cannot follow a hook that goes: what it traced would change.
    if is_dynamo_compiling() or is_exporting():
        return
    _remove_forgotten(module)


def _remove_forgotten(module: nn.Module) -> None:
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook is forget_hook]:
            del hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def drop_hooks(state: dict[str, Any]) -> dict[str, Any]:
    """Give the state of a module as it is without hookline's hooks."""
    keys = {
        key
        for name in ("_forward_hooks", "_forward_pre_hooks")
        for key, hook in state.get(name, {}).items()
        if isinstance(hook, ModuleHook)
    }
    tables = {
        name: OrderedDict((key, one) for key, one in state[name].items() if key not in keys)
        for name in _TABLES
        if name in state
    }
    return {**state, **tables}


def is_own(hook: Any) -> bool:
    """Tell whether a hook is hookline's, or what stands for one in a copy of the model."""
    return isinstance(hook, ModuleHook) or hook is forget_hook or is_of_pickle(hook)


def is_of_pickle(hook: Any) -> bool:
    """Tell whether a hook is what stands for hookline's in a model that was pickled with it."""
    left = getattr(hook, "__self__", None)
    return isinstance(left, nullcontext) and left.enter_result == LEFT_BEHIND


class PreHook(ModuleHook):
    __slots__ = ()

    @run_uncompiled
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:  # another thread is putting it there, or taking it away
            return None
        if is_dynamo_compiling() or is_exporting():
            return self.junction.traced.enter(args, kwargs)
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
                call.short_ways.append((junction, index))
                return None
        light = junction.plan.light
        if light is not None and light[2].is_light:
            return None  # the post hook will do
        bare = junction.plan.bare_root
        if bare is not None and graph_task_id() == -1:
            bare[0].begin(bare[1], get_ident(), -1)
            return None
        return junction.enter(module, args, kwargs)


class PostHook(ModuleHook):
    __slots__ = ("asked", "hear", "shown")

    def __init__(self, junction: Junction) -> None:
        super().__init__(junction)
        self.hear: LightEar | None = None
        """Who hears outputs that are tensors, where nothing else has to be known of a call."""
        self.shown: Tensor | None = None
        """What such outputs are shown by in a compiled graph; see `Traced`."""
        self.asked = ""

    @run_uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], *given: Any) -> Any:
        is_traced = is_dynamo_compiling() or is_exporting()
        # What is done here, and all that is read, is followed and guarded for each module.
        shown = self.shown if is_traced else None
        if shown is not None and isinstance(given[-1], Tensor) and not find_region():
            return show_output(given[-1], shown, self.asked)
        if len(given) == 1:  # another thread is putting it there, or taking it away
            return None
        kwargs, output = given
        if is_traced:
            return self.junction.traced.leave(args, kwargs, output)
        hear = self.hear
        if (
            hear is not None
            and type(output) is Tensor
            and graph_task_id() == -1
            and is_grad_enabled()
        ):
            hook = hear(output)
            if hook is None or not hook_output(module, output, hook):
                light = self.junction.plan.light
                if light is None:  # whoever heard it has let go of the model
                    return None
                new = wire_lightly(light, module, args, kwargs, output)
                return None if new is output else new
            return None
        # Torch calls it from another function when the forward raised; the output is None then.
        has_raised = output is None and sys._getframe(1).f_code is CALL_CODE
        junction = self.junction
        if has_raised and junction.wiring is not None:
            junction.wiring.forget_frames()
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
        if light is not None and light[2].is_light and not junction.frames.get(get_ident()):
            if has_raised:
                return None
            new = hear_lightly(light, module, args, kwargs, output)
            junction.need_pre_hook(not light[2].is_light)
            return None if new is output else new
        bare = junction.plan.bare_root
        if bare is not None and not junction.frames.get(get_ident()):
            call = bare[0].active.get(get_ident())
            if call is not None and graph_task_id() == -1:
                bare[0].end_root(call)
            return None
        new = junction.leave_call(module, args, kwargs, output, has_raised=has_raised)
        if light is not None:
            junction.need_pre_hook(not light[2].is_light)
        return new
