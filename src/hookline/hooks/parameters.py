"""Parameters as sites: their value when a call begins, their gradient when it was accumulated.

Where ranks reduce gradients, that of all of them when it is there, and apart from it what this rank
alone computed in one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline._errors import NoSuchSite
from hookline._ranks import is_spread
from hookline.addresses import Site
from hookline.hooks import observing
from hookline.hooks.fitting import check_fit
from hookline.hooks.reducing import SPREAD
from hookline.hooks.visits import KEEP, At, Call, Listener, Station, Visit, describe

if TYPE_CHECKING:
    from hookline.hooks.sessions import Session


def _give_back(tensor: Tensor) -> Tensor:
    return tensor


class _Edited:
    """A parameter while it is edited: the real one, and what each edit made of it in turn."""

    __slots__ = ("original", "steps")

    def __init__(self, original: Tensor) -> None:
        self.original = original
        self.steps: list[tuple[weakref.ref[ParameterListener], Tensor]] = []


# Listeners are held weakly: a model that is dropped with its edits attached must go, too.
_edited: weakref.WeakKeyDictionary[nn.Module, dict[str, _Edited]] = weakref.WeakKeyDictionary()


class ParameterListener:
    """Follow one parameter: where it lives, and what to do with its value or gradient.

    An edit of the value replaces the parameter by an edited tensor while the session is open; the
    parameter itself is never written to, and gradients reach it through the edit.
    """

    def __init__(
        self,
        session: Session,
        site: Site,
        function: Callable[[Any, At], Any],
        *,
        stage: int,
        keep_graph: bool = False,
    ) -> None:
        assert site.parameter is not None
        assert session.tree is not None
        self.session = session
        self.site = site
        self.function = function
        self.stage = stage
        self.keep_graph = keep_graph
        self.order = (stage, 0)
        """Where it stands among the listeners of this parameter; the session sets it."""
        self.fired = 0
        self.reason = ""
        """Why there is no gradient of the kind that is asked for, as far as that is known."""
        self._parameter: Tensor | None = None
        """The tensor whose gradient is listened for."""
        self._handle: Any = None
        self._reducer: weakref.ref[Any] | None = None
        """The DDP that reduces the gradient."""
        found = next(
            entry
            for entry in session.tree.parameters
            if (site.module, site.parameter) in entry.places
        )
        self.places = found.places
        self.is_lazy = is_lazy(found.parameter)
        """Whether the parameter waits for the first call of its module to exist."""
        self._station = Station(site.names, site.module, False)

    @property
    def address(self) -> str:
        return self.site.address

    def on_call(self, call: Call) -> None:
        """Deliver the value as a call begins, and follow a parameter that was exchanged."""
        parameter = self._current()
        if parameter is None:
            return
        self.is_lazy = False
        if self.site.is_grad:
            if parameter is not self._parameter:
                self.attach()
            self._find_reducer(is_in_call=True)
            return
        visit = Visit(self._station, call, 0)
        at = At(visit, self.site.module, "parameter")
        self.fired += 1
        if self.stage != 1:
            self.on_value(visit, parameter, at)
            return
        parameter = self._take_back(parameter)
        new = self._run(visit, at, parameter)
        if new is not KEEP and new is not parameter:
            check_fit(parameter, new, describe(visit, at.address))
            owner, name = self.places[0]
            known = _edited.setdefault(owner, {}).setdefault(name, _Edited(parameter))
            known.steps.append((weakref.ref(self), new))
            self._put(new)

    def on_return(self) -> None:
        """Follow a parameter that `fully_shard` has put together for the first time."""
        if self.site.is_local and self._current() is not self._parameter:
            self.attach()

    @property
    def edits_value(self) -> bool:
        """Whether it puts another tensor in the parameter's place."""
        return self.stage == 1 and not self.site.is_grad

    def redo(self, call: Call) -> Callable[[], None]:
        """Edit once more for a call whose forward is being repeated; give what undoes it."""
        owner, name = self.places[0]
        before = owner._parameters[name]
        assert before is not None
        known = _edited.get(owner, {}).get(name)
        made_on: Tensor = before
        if known is not None:
            editors = [editor() for editor, _ in known.steps]
            if self in editors:
                position = editors.index(self)
                made_on = known.steps[position - 1][1] if position else known.original
        visit = Visit(self._station, call, 0)
        at = At(visit, self.site.module, "parameter")
        new = self._run(visit, at, made_on)
        self._put(made_on if new is KEEP else new)
        return lambda: self._put(before)

    def on_value(self, visit: Visit, parameter: Tensor, at: At) -> None:
        value = parameter if self.keep_graph else parameter.detach()
        observing.observe(self.session, visit, self.function, value, at)

    def attach(self) -> None:
        """Listen for the gradient; a lazy parameter has to wait for its first call."""
        self.detach()
        parameter = self._current()
        if parameter is None or not self.site.is_grad or not parameter.requires_grad:
            return
        if not parameter.is_leaf:  # FSDP1 shows views of its flat parameter, which takes the grad
            return
        self._parameter = parameter
        if self.site.is_local:
            self._handle = parameter.register_hook(self._arrived)
        else:
            self._handle = parameter.register_post_accumulate_grad_hook(self._accumulated)
            self._find_reducer(is_in_call=False)
        hooks = self._handle.hooks_dict_ref()
        own = [
            (hook.__self__.order, key)
            for key, hook in hooks.items()
            if isinstance(getattr(hook, "__self__", None), ParameterListener)
        ]
        for _, key in sorted(own):  # torch calls them in this dictionary's order
            hooks[key] = hooks.pop(key)

    def detach(self) -> None:
        """Stop listening, and put an edited parameter back."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            if self.site.is_local and self._parameter is not None:
                drop_empty_hooks(self._parameter)
        self._parameter = None
        self._reducer = None
        owner, name = self.places[0]
        current = owner._parameters.get(name)
        if self.stage == 1 and not self.site.is_grad and current is not None:
            self._take_back(current)

    def _take_back(self, current: Tensor) -> Tensor:
        """Undo this edit and those made on top of it; give what it is made on."""
        owner, name = self.places[0]
        known = _edited.get(owner, {}).get(name)
        if known is None:
            return current
        if known.steps[-1][1] is not current:  # somebody exchanged the parameter meanwhile
            del _edited[owner][name]
            return current
        editors = [editor() for editor, _ in known.steps]
        if self not in editors:
            return current
        del known.steps[editors.index(self) :]
        base = known.steps[-1][1] if known.steps else known.original
        if not known.steps:
            del _edited[owner][name]
        self._put(base)
        return base

    def _put(self, value: Tensor) -> None:
        for owner, name in self.places:
            owner._parameters[name] = value  # type: ignore[assignment]

    def _current(self) -> Tensor | None:
        owner, name = self.places[0]
        parameter = owner._parameters.get(name)
        if parameter is None:
            raise NoSuchSite(f"`{self.address}` is gone: the parameter was removed or renamed.")
        known = _edited.get(owner, {}).get(name) if self.site.is_grad else None
        if known is not None and known.steps[-1][1] is parameter:
            return known.original  # gradients are accumulated there, through the edit
        if is_lazy(parameter):
            return None
        return self._choose(parameter) if self.site.is_grad else parameter

    def _choose(self, parameter: Tensor) -> Tensor | None:
        """Give the tensor at which the gradient that is asked for is heard."""
        reductions = self.session.reductions
        if reductions is None:
            return parameter
        is_local, before = self.site.is_local, self._parameter
        found = reductions.choose(parameter, self.places, is_local=is_local)
        if is_local and found is not None and is_spread(found):
            self.reason = SPREAD
            return None
        is_whole = found is parameter and not is_spread(parameter)
        if not is_local and is_whole and before is not None and is_spread(before):
            return before  # somebody above this model has put it together for the forward
        return found

    def _find_reducer(self, *, is_in_call: bool) -> None:
        reductions = self.session.reductions
        if reductions is not None and self._parameter is not None and not self.site.is_local:
            self._reducer = reductions.find_reducer(self._parameter, is_in_call=is_in_call)

    def _accumulated(self, parameter: Tensor) -> None:
        if not self.session.is_open or parameter.grad is None:
            return
        visit = Visit(self._station, self.session.latest_call(), 0)
        reductions = self.session.reductions
        if reductions is None:
            self._deliver(parameter, visit)
            return
        deliver = partial(self._deliver, parameter, visit)
        reason = reductions.wait(parameter, self._reducer, deliver)
        if reason:
            self.no_grad(visit, reason)

    def _deliver(self, parameter: Tensor, visit: Visit) -> None:
        """Tell of what is in `.grad` now."""
        if not self.session.is_open or parameter.grad is None:
            return
        at = At(visit, self.site.module, "parameter", is_grad=True)
        self.fired += 1
        if self.stage != 1:
            self.on_grad(visit, parameter.grad, at)
            return
        new = self._run(visit, at, parameter.grad)
        if new is KEEP or new is parameter.grad:
            return
        check_fit(parameter.grad, new, describe(visit, at.address))
        if self._reducer is None:
            parameter.grad = new.detach()
        else:  # it may be a view of what DDP reduces, and has to stay that
            with torch.no_grad():
                parameter.grad.copy_(new)

    def _arrived(self, grad: Tensor) -> Tensor | None:
        """Hear what one backward computed here, before it is accumulated or reduced."""
        if not self.session.is_open:
            return None
        visit = Visit(self._station, self.session.latest_call(), 0)
        at = At(visit, self.site.module, "parameter", is_grad=True, is_local=True)
        self.fired += 1
        if self.stage != 1:
            self.on_grad(visit, grad, at)
            return None
        new = self._run(visit, at, grad)
        if new is KEEP or new is grad:
            return None
        check_fit(grad, new, describe(visit, at.address))
        changed: Tensor = new
        return changed

    def no_grad(self, visit: Visit, reason: str) -> None:
        """Learn that a gradient was accumulated that is not the one that is asked for, and why."""
        self.reason = reason

    def on_grad(self, visit: Visit, grad: Tensor, at: At) -> None:
        observing.observe(self.session, visit, self.function, grad.detach(), at)

    def _run(self, visit: Visit, at: At, value: Tensor) -> Any:
        if self.site.is_grad:
            with torch.no_grad():
                return observing.run(self.session, visit, at.address, self.function, value, at)
        # What the edit saves for backward is none of a checkpointed region's, which counts what it
        # saves: a region inside the model, or one around it.
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, _give_back):
            return observing.run(self.session, visit, at.address, self.function, value, at)


def drop_empty_hooks(parameter: Tensor) -> None:
    """Leave a parameter without the empty dictionary that registering a hook has made."""
    if parameter._backward_hooks is not None and not parameter._backward_hooks:
        parameter._backward_hooks = None


class LazyStart(Listener):
    """Tell the follower of a lazy parameter when its module has made it, in its first call."""

    __slots__ = ("follower",)

    def __init__(self, follower: ParameterListener, station: Station) -> None:
        super().__init__(follower.session, station, "input", values=True, gradients=False, stage=0)
        self.follower = follower

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.follower.is_lazy:
            self.follower.on_call(visit.call)
        return args, kwargs
