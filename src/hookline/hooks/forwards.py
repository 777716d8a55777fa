"""The one owner of what stands in for a module's forward: variables, operations, skips.

It is put into the module's own `__dict__`, made from the forward that was there, and whatever was
there comes back. A copy or a replica of the module that carries the stand-in along runs as its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from hookline._errors import UnsupportedModel
from hookline.hooks import operations
from hookline.hooks.variables import ForwardTaps
from hookline.sources import NoSource, rewrite

if TYPE_CHECKING:
    from hookline.hooks.junctions import Junction

_ABSENT = object()


class Skipping(Protocol):
    """What may answer in the place of a module."""

    def take(self, module: nn.Module) -> Callable[..., Any] | None:
        """Give what answers this execution; None to let the module run."""


class StandIn:
    """Own the forward of one module while something needs it to be another one."""

    def __init__(self, junction: Junction, module: nn.Module) -> None:
        self._junction = junction
        self._module = module
        self._place = "forward"
        self._own: Any = _ABSENT
        """What the module had of its own there; absent where its class has the forward."""
        self._installed: Any = None
        self._made: dict[tuple[frozenset[str], bool, bool], Any] = {}
        self.skips: list[Skipping] = []

    def update(self) -> None:
        """Put in place what is asked for now; give back what was there if nothing is."""
        plan = self._junction.plan.inside
        kind = (plan.variables, bool(plan.operations), bool(self.skips))
        if not any(kind):
            self.restore()
            return
        attributes = self._module.__dict__
        if self._installed is None:
            self._place = self._find_place()
            own = attributes.get(self._place, _ABSENT)
            if own is not self._own:
                self._own = own
                self._made.clear()
        new = self._made.get(kind)
        if new is None:
            new = self._made[kind] = self._make(*kind)
        if self._is_ours():
            attributes[self._place] = self._installed = new

    def restore(self) -> None:
        """Give the module its own forward back, unless somebody put another one on top."""
        if self._installed is None:
            return
        if self._is_ours():
            if self._own is _ABSENT:
                del self._module.__dict__[self._place]
            else:
                self._module.__dict__[self._place] = self._own
        self._installed = None

    def _is_ours(self) -> bool:
        """Tell whether what is there now is what was there or what was put there."""
        now = self._module.__dict__.get(self._place, _ABSENT)
        return now is (self._own if self._installed is None else self._installed)

    def _find_place(self) -> str:
        """Find the attribute that holds the forward; accelerate keeps the real one elsewhere."""
        own = self._module.__dict__.get("forward")
        wrapped = getattr(own, "__wrapped__", None)
        if wrapped is not None:
            for name, value in self._module.__dict__.items():
                if name != "forward" and isinstance(value, MethodType) and value == wrapped:
                    return name
        return "forward"

    def _make(self, variables: frozenset[str], has_operations: bool, has_skips: bool) -> Any:
        own, module = self._own, self._module
        original = type(module).forward if own is _ABSENT else own
        inner = original
        if variables:
            taps = ForwardTaps(self._junction, module)
            try:
                inner, table = rewrite(original, variables, taps)
            except NoSource as error:
                raise UnsupportedModel(
                    f"the variables of `{type(module).__qualname__}.forward` cannot be reached: "
                    f"{error}. Operations need no source: name them as `path/operation`."
                ) from error
            taps.name(table)
        if not (has_operations or has_skips):
            _remember(inner, original)
            return MethodType(inner, module) if own is _ABSENT else inner
        is_bound = own is not _ABSENT
        outer = functools.wraps(_function_of(original))(
            self._stand_in(inner, is_bound, has_operations)
        )
        if is_bound:
            outer.__signature__ = _with_self(inspect.signature(original))  # type: ignore[attr-defined]
        _remember(outer, original)
        return MethodType(outer, module)

    def _stand_in(
        self, inner: Callable[..., Any], is_bound: bool, has_operations: bool
    ) -> Callable[..., Any]:
        junction, module, skips = self._junction, self._module, self.skips

        def forward(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if this is not module:  # a copy of the module took this along
                this.__dict__.pop("forward", None)
                return this.forward(*args, **kwargs)
            frame = junction.current()
            target = module if frame is None else frame.module
            for skip in reversed(skips):  # the latest has the word
                answer = skip.take(target)
                if answer is not None:
                    return answer(*args, **kwargs)
            bound = inner if is_bound else MethodType(inner, target)
            if not has_operations:
                return bound(*args, **kwargs)
            if frame is not None:
                return operations.see(junction, frame, bound, *args, **kwargs)
            with junction.directly() as begun:
                return operations.see(junction, begun, bound, *args, **kwargs)

        return forward


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    """Add the argument that binding takes away again."""
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    names = [one.name for one in signature.parameters.values()]
    if "self" in names:
        this = this.replace(name="this_module")
    return signature.replace(parameters=[this, *signature.parameters.values()])


def _function_of(original: Any) -> Any:
    return getattr(original, "__func__", original)


def _remember(function: Any, original: Any) -> None:
    """Note on a stand-in what it stands for, for those who read the module's forward."""
    function = getattr(function, "__func__", function)
    function.hookline_original = original
