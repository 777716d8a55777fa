"""Find the models that a script trains, at the moment when each is called for the first time.

A model is whatever is called with grad by something that is no module, has something to train, and
is trained: an optimizer has parameters of it, or there is no optimizer yet. Copies that only follow
a model (EMA) and teachers are in no optimizer and stay unwatched. A part of a bigger module stands
for that whole, and has its path there as its name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hookline._compiler import is_compiled
from hookline._torch import graph_task_id, is_functorch_active, is_tracing
from hookline.scripts.owners import (
    Census,
    find_name,
    has_trainable,
    is_scripted,
    path_within,
    unwrap,
)

MOST_MODELS = 20
"""How many models of one script are watched; one that makes a new model in a loop has no end."""


@dataclass(frozen=True, slots=True)
class Found:
    """A model that a script trains."""

    model: nn.Module
    """The whole of it, without wrappers but that of torch.compile."""

    name: str
    """What its addresses begin with; empty for the only model of a script."""


class _Acquaintance:
    """What is known of a module that was called."""

    __slots__ = ("calls", "is_watched", "module", "path")

    def __init__(self, module: nn.Module, *, is_watched: bool, path: str) -> None:
        self.module = weakref.ref(module)
        self.is_watched = is_watched
        self.path = path
        """Its path in what is watched, with the name of the model; empty for a whole model."""
        self.calls = 0


class Discovery:
    """Hear of outermost calls, and tell of models and of their parts."""

    def __init__(
        self,
        *,
        on_model: Callable[[Found], None],
        on_part: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], str], None],
        on_call: Callable[[], None],
        on_return: Callable[[Any], None],
        note: Callable[[str], None],
    ) -> None:
        self._on_model = on_model
        self._on_part = on_part
        self._on_call = on_call
        self._on_return = on_return
        self._note = note
        self._known: dict[int, _Acquaintance] = {}
        self._roots: list[tuple[weakref.ref[nn.Module], str]] = []
        self._names: set[str] = set()
        self._has_noted_most = False
        self._looks = 0
        """How often somebody wanted to look around."""

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call that begins; one of a module not met before may be of a new model."""
        if not _is_training():
            return
        known = self._known.get(id(module))
        if known is None or known.module() is not module:
            known = self._meet(module)
        elif not known.is_watched:
            known.calls += 1
            # An optimizer may have come since; looking costs too much to do it every time.
            if known.calls.bit_count() == 1:
                known = self._meet(module, calls=known.calls)
        if known.is_watched:
            self._on_call()
            if known.path:
                self._on_part(module, args, kwargs, known.path)

    def end(self, module: nn.Module, result: Any) -> None:
        """Take what a call has returned."""
        if _is_training():
            known = self._known.get(id(module))
            if known is not None and known.is_watched:
                self._on_return(result)

    def begin_function(self) -> None:
        """Take a call of a compiled function, inside of which calls of models are not heard."""
        if not _is_training():
            return
        self.look_around()
        if self._roots:
            self._on_call()

    def look_around(self) -> None:
        """Find what optimizers have, whoever calls it; now and then, as looking costs much."""
        self._looks += 1
        if self._looks.bit_count() != 1:
            return
        census = Census()
        tops = [
            one
            for one in census.trained_tops()
            if self._find_root(one) is None and not is_scripted(one) and not _is_meta(one)
        ]
        if tops and len(self._roots) < MOST_MODELS:
            self._introduce(tops[0], census)

    def _meet(self, module: nn.Module, *, calls: int = 0) -> _Acquaintance:
        known = self._place(module)
        known.calls = calls
        self._known[id(module)] = known
        return known

    def _place(self, module: nn.Module) -> _Acquaintance:
        """Find out what a module is; where it is of a new model, tell of that."""
        unknown = _Acquaintance(module, is_watched=False, path="")
        # DataParallel makes copies for one forward each.
        if vars(module).get("_is_replica", False) or not has_trainable(module):
            return unknown
        if _is_meta(module):
            self._note(f"`{name_class(module)}` is on the meta device, where there are no values")
            return unknown
        if is_scripted(module):
            self._note(f"`{name_class(module)}` is TorchScript, inside of which nothing is watched")
            return unknown
        within = self._find_root(module)
        if within is None:
            census = Census()
            top = census.topmost(module)
            if is_compiled(module) and unwrap(module) is top:
                top = module  # it tells that it is compiled
            if not self._is_trained(module, census):
                return unknown
            if len(self._roots) >= MOST_MODELS:
                if not self._has_noted_most:
                    self._has_noted_most = True
                    self._note(f"{MOST_MODELS} models are watched; those made later are not")
                return unknown
            self._introduce(top, census)
            within = self._find_root(module)
        return unknown if within is None else _Acquaintance(module, is_watched=True, path=within)

    def _find_root(self, module: nn.Module) -> str | None:
        """Give the path of a module in a model that is watched; None where it is in none."""
        inner = unwrap(module)
        for reference, name in self._roots:
            root = reference()
            path = None if root is None else path_within(unwrap(root), inner)
            if path is not None:
                return ".".join(filter(None, [name, path])) if path else ""
        return None

    def _is_trained(self, module: nn.Module, census: Census) -> bool:
        trained = census.trained()
        if not trained:
            return True
        return any(
            id(one) in trained or (one.requires_grad and one.grad is not None)
            for one in module.parameters()
        )

    def _introduce(self, top: nn.Module, census: Census) -> None:
        """Tell of a new model, and the first time of all others that optimizers have."""
        tops = [top]
        if not self._roots:
            inner = unwrap(top)
            tops += [one for one in census.trained_tops() if path_within(one, inner) is None]
        is_only = len(tops) == 1 and not self._roots
        for one in tops[:MOST_MODELS]:
            name = self._choose_name(one)
            found = Found(one, "" if is_only else name)
            self._roots.append((weakref.ref(one), found.name))
            self._on_model(found)

    def _choose_name(self, model: nn.Module) -> str:
        wanted = find_name(model)
        name, number = wanted, 2
        while name in self._names:
            name = f"{wanted}_{number}"
            number += 1
        self._names.add(name)
        return name


def name_class(module: nn.Module) -> str:
    """Name the class of a module, of TorchScript the one that it was made of."""
    return str(getattr(module, "original_name", "")) or type(module).__name__


def _is_meta(module: nn.Module) -> bool:
    return any(one.is_meta for one in module.parameters())


def _is_training() -> bool:
    """Tell whether a call may be a training's own.

    In a backward, checkpoints call parts of a model again; inside of torch.func a call stands for
    many, or for a derivative; in a trace, for a graph.
    """
    if not torch.is_grad_enabled() or graph_task_id() != -1:
        return False
    return not is_functorch_active() and not is_tracing()
