"""The guards by which the compiler tells graphs apart, kept where users have guards dropped.

With `torch.compile(options={"guard_filter_fn": ...})` a graph serves whatever hooks there are: one
made before a session is not heard, and one made in it runs on when its hooks are gone. Those guards
that tell whether hookline listens are kept all the same.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hookline._compiler import forget_filtered_graphs

_OF_HOOKS = re.compile(r"\._forward_(pre_)?hooks\b|\.forward(\.__code__)?$|\b__hl_taps__\b")
"""What they are guards of. What a user's own forward holds is none of it."""

_kept: weakref.WeakSet[Any] = weakref.WeakSet()
"""The guards of the graphs that were made since they are kept."""


def _keep(wanted: Callable[[Sequence[Any]], Sequence[bool]]) -> Any:
    """Give a filter of guards that keeps those that tell of hooks, and what the user's one does."""

    def choose(guards: Sequence[Any]) -> list[bool]:
        return [
            is_wanted
            # Where a module has no hookline on it, its own dictionary has no `forward`.
            or one.guard_type == "NOT_PRESENT_IN_GENERIC_DICT"
            or _OF_HOOKS.search(one.name) is not None
            for one, is_wanted in zip(guards, wanted(guards), strict=True)
        ]

    return choose


def keep_guards() -> None:
    """Have the compiler keep them, where it is loaded."""
    if "torch._dynamo" in sys.modules:
        _patch()


@functools.cache
def _patch() -> None:
    kind: Any = importlib.import_module("torch._dynamo.guards").CheckFunctionManager
    make = kind.__init__
    signature = inspect.signature(make)
    if "guard_filter_fn" not in signature.parameters:
        return

    @functools.wraps(make)
    def make_keeping(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        wanted = given.get("guard_filter_fn")
        if wanted is not None and not given.get("save_guards"):  # guards of hooks cannot be saved
            given["guard_filter_fn"] = _keep(wanted)
        made = given.pop("self")
        make(made, **given)
        _kept.add(made.guard_manager)

    kind.__init__ = make_keeping


def forget_unguarded() -> None:
    """Have graphs made again that would serve whatever hooks there are, where it is loaded."""
    if "torch._dynamo" in sys.modules:
        _forget()


@functools.cache
def _forget() -> None:  # once, because those that are made from now on have what it takes
    keep_guards()
    forget_filtered_graphs(_kept)
