"""What the compiler did to the code of a model while it was listened at: breaks, and giving up."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import CodeType

from torch import nn

from hookline._compiler import (
    count_recompile_limits,
    describe_guards,
    is_compiled,
    list_compiled_codes,
    list_graph_breaks,
    list_spent_codes,
)
from hookline.addresses.names import unwrap
from hookline.hooks.limits import count_graphs_per_limit

_MOST_NAMED = 3

_LIMIT = (
    "torch.compile has made as many graphs of a function as it may and runs it eagerly where none "
    "fits, which is heard as well. What listens takes graphs of its own: "
    "torch._dynamo.config.recompile_limit says how many there may be"
)

_callers: weakref.WeakKeyDictionary[CodeType, weakref.WeakValueDictionary[int, nn.Module]]
_callers = weakref.WeakKeyDictionary()
"""The functions that the compiler gave up on, with the models that run in them, by identity.

Known of those that it gave up on while the model was listened at.
"""


class CompilerNotes:
    """Notice what the compiler does from now on, and what it gave up before."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = [weakref.ref(one) for one in models]
        self._seen = len(list_graph_breaks())
        self._limits = count_recompile_limits()
        self._spent = frozenset(list_spent_codes(count_graphs_per_limit))
        self._breaks: dict[tuple[str, str], None] = {}
        self._has_reached_limit = False

    def list_limits(self) -> list[str]:
        """Say whether it compiles a function no more that this model runs."""
        limits, spent = count_recompile_limits(), list_spent_codes(count_graphs_per_limit)
        models = [one for known in self._models if (one := known()) is not None]
        if limits > self._limits and self._may_be_ours(models, spent):
            self._has_reached_limit = True
            self._remember_callers(models, spent)
        self._limits = limits
        if spent and not self._has_reached_limit:
            called = {one for code in spent for one in _callers.get(code, ())}
            self._has_reached_limit = any(id(unwrap(one)) in called for one in models) or any(
                code in spent
                for model in models
                for module in model.modules()
                if is_compiled(module)
                for code in list_compiled_codes(module)
            )
        return [_LIMIT] if self._has_reached_limit else []

    def list(self) -> list[str]:
        """Say what it could not compile as one graph, or not at all."""
        breaks = list_graph_breaks()
        # Torch forgets all of them where it is told to begin anew.
        self._breaks.update(dict.fromkeys(breaks[self._seen :]))
        self._seen = len(breaks)
        notes = []
        if self._breaks:
            count = len(self._breaks)
            shown = [f"{where}: {why}" for where, why in self._breaks][:_MOST_NAMED]
            shown += [f"and {count - _MOST_NAMED} more"] if count > _MOST_NAMED else []
            places = "a place" if count == 1 else f"{count} places"
            notes.append(
                f"torch.compile broke its graph at {places}, which is heard as well: "
                f"{'; '.join(shown)}"
            )
        return [*notes, *self.list_limits()]

    @staticmethod
    def _remember_callers(models: Iterable[nn.Module], spent: Iterable[CodeType]) -> None:
        for code in spent:
            guards = describe_guards(code) if code.co_name != "forward" else ""
            known = _callers.setdefault(code, weakref.WeakValueDictionary())
            for model in models:
                inner = unwrap(model)
                if code in _list_own(model) or str(id(type(inner))) in guards:
                    known[id(inner)] = inner

    def _may_be_ours(self, models: Iterable[nn.Module], spent: Iterable[CodeType]) -> bool:
        """Tell whether the compiler gave up on something else than forwards of other models."""
        new = [code for code in spent if code not in self._spent]
        own = set().union(*map(_list_own, models))
        return not new or any(code in own or code.co_name != "forward" for code in new)


def _list_own(model: nn.Module) -> set[CodeType]:
    return {code for module in model.modules() for code in list_compiled_codes(module)}
