"""The one owner of what stands in for a module's forward: variables, operations, skips.

It is put into the module's own `__dict__`, made from the forward that was there, and whatever was
there comes back. A copy or a replica of the module that carries the stand-in along runs as its own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.compiler import is_dynamo_compiling, is_exporting

from hookline._errors import UnsupportedModel
from hookline.addresses.variables import forward_of, forward_place
from hookline.hooks import operations
from hookline.hooks.module_hooks import drop_hooks
from hookline.hooks.refusals import generator_kind, refuse_tracing
from hookline.hooks.traced_operations import run_traced
from hookline.hooks.uncompiled import is_left_alone, leave_alone
from hookline.hooks.variables import ForwardTaps
from hookline.sources import NoSource, rewrite, unwrap

if TYPE_CHECKING:
    from hookline.hooks.junctions import Junction

_ABSENT = object()
_GETSTATE = "__getstate__"
"""What pickle and copy ask an instance for; they take the instance's own before its class's."""
_REPLICATE = "_replicate_for_data_parallel"
"""What DataParallel asks an instance for."""


class Skipping(Protocol):
    """What may answer in the place of a module."""

    def take(self, module: nn.Module) -> Callable[..., Any] | None:
        """Give what answers this execution; None to let the module run."""


class _Answer:
    """Answer in the place of a method of the instance; a deep copy of it does nothing special."""

    def __init__(self, stand_in: StandIn, method: Callable[[StandIn], Any]) -> None:
        self.stand_in = stand_in
        self.method = method

    def __call__(self) -> Any:
        return self.method(self.stand_in)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Met by a class that copies its `__dict__` itself; others ask `__getstate__` first.
        name = _GETSTATE if self.method is StandIn._state else _REPLICATE
        copied = memo.get(id(self.stand_in._module))
        return functools.partial(getattr(type(self.stand_in._module), name), copied)


def _clean_copy(module: nn.Module) -> None:
    """Take away what a copy of another module took along and never got rid of."""
    attributes = module.__dict__
    if hasattr(attributes.get("forward"), "hookline_original"):
        for name in ("forward", _GETSTATE, _REPLICATE):
            attributes.pop(name, None)


def _stand_in_of(attribute: Any) -> StandIn | None:
    return attribute.stand_in if isinstance(attribute, _Answer) else None


class StandIn:
    """Own the forward of one module while something needs it to be another one."""

    def __init__(self, junction: Junction, module: nn.Module) -> None:
        _clean_copy(module)
        self._junction = junction
        self._module = module
        self._place = "forward"
        self._own: Any = _ABSENT
        """What the module had of its own there; absent where its class has the forward."""
        self._installed: Any = None
        self._made: dict[tuple[frozenset[str], bool, bool, bool, bool, bool], tuple[Any, Any]] = {}
        """What stands in for each thing that was asked, and the code of the forward in it."""
        self.skips: list[Skipping] = []

    def update(self) -> None:
        """Put in place what is asked for now; give back what was there if nothing is."""
        plan = self._junction.plan.inside
        has_end = self._junction.quick is None
        # The compiler is told what comes in, which others use too.
        has_arguments = plan.has_gradients and self._junction.wiring is not None
        asked = (plan.variables, bool(plan.operations), bool(self.skips))
        if not any(asked) and not self._junction.must_be_noticed:
            self.restore()
            return
        attributes = self._module.__dict__
        if self._installed is None:
            self._place = forward_place(self._module)
            own = attributes.get(self._place, _ABSENT)
            if own is not self._own:
                self._own = own
                self._made.clear()
        own = getattr(type(self._module), "forward", None) if self._own is _ABSENT else self._own
        is_uncompiled = is_left_alone(self._module, own)
        kind = (*asked, has_end, has_arguments, is_uncompiled)
        made = self._made.get(kind)
        if made is None:
            made = self._made[kind] = self._make(*kind)
        new, self._junction.own_code = made
        if self._junction.wiring is not None and any("." in one for one in plan.variables):
            self._junction.callees.make_ready(forward_of(self._module), self._module)
        if self._is_ours():
            attributes[self._place] = self._installed = new
            attributes.setdefault(_GETSTATE, _Answer(self, StandIn._state))
            if self._junction.is_hookless:
                attributes.setdefault(_REPLICATE, _Answer(self, StandIn._replicate))

    def restore(self) -> None:
        """Give the module its own forward back, unless somebody put another one on top."""
        if self._installed is None:
            return
        attributes = self._module.__dict__
        if self._is_ours():
            if self._own is _ABSENT:
                del attributes[self._place]
            else:
                attributes[self._place] = self._own
        for name in (_GETSTATE, _REPLICATE):
            if _stand_in_of(attributes.get(name)) is self:
                del attributes[name]
        self._installed = None

    def dispose(self) -> None:
        """Let go of what was made, which holds the module in a circle."""
        self._made.clear()
        self.skips.clear()
        self._junction.own_code = None

    @staticmethod
    def find(module: nn.Module) -> StandIn | None:
        """Give the stand-in that is on a module."""
        found = _stand_in_of(module.__dict__.get(_GETSTATE))
        return found if found is not None and found._module is module else None

    @property
    def junction(self) -> Junction:
        """Give the junction that owns it."""
        return self._junction

    @property
    def may_do_without_hooks(self) -> bool:
        """Tell whether a rewritten forward is enough to know when the module runs."""
        module = self._module
        has_own = self._own is not _ABSENT if self._installed else "forward" in module.__dict__
        return (
            not has_own
            and inspect.isfunction(inspect.getattr_static(type(module), "forward"))
            and generator_kind(module) is None
        )

    def _replicate(self) -> nn.Module:
        """Make a replica as DataParallel does, with the forward bound to it."""
        module = self._module
        replica: nn.Module = type(module)._replicate_for_data_parallel(module)
        installed = replica.__dict__.get(self._place)
        if isinstance(installed, MethodType) and installed is self._installed:
            replica.__dict__[self._place] = MethodType(installed.__func__, replica)
        return replica

    def _state(self) -> Any:
        """Give what a pickle or a copy of the module holds: all but the stand-in and hooks."""
        module = self._module
        state = type(module).__getstate__(module)
        if not isinstance(state, dict) or state.get(self._place) is not self._installed:
            return state
        kept = {key: value for key, value in state.items() if key not in (_GETSTATE, _REPLICATE)}
        if self._own is _ABSENT:
            del kept[self._place]
        else:
            kept[self._place] = self._own
        return drop_hooks(kept)

    def _is_ours(self) -> bool:
        """Tell whether what is there now is what was there or what was put there."""
        now = self._module.__dict__.get(self._place, _ABSENT)
        return now is (self._own if self._installed is None else self._installed)

    def _make(
        self,
        variables: frozenset[str],
        has_operations: bool,
        has_skips: bool,
        has_end: bool,
        has_arguments: bool,
        is_uncompiled: bool,
    ) -> tuple[Any, Any]:
        module = self._module
        # A function of the class is bound when it is called: to the module, or to its replica.
        # Another descriptor, or what is written in C, binds as it likes: its result is taken.
        written = inspect.getattr_static(type(module), "forward")
        takes_self = self._own is _ABSENT and inspect.isfunction(written)
        original = self._own
        if takes_self:
            original = written
        elif self._own is _ABSENT:
            bind = getattr(type(written), "__get__", None)
            original = written if bind is None else bind(written, module, type(module))
        inner = original
        if variables:
            taps = ForwardTaps(self._junction, module, takes_self)
            try:
                inner, table = rewrite(
                    original,
                    variables,
                    taps,
                    is_method=takes_self or None,
                    has_end=takes_self and has_end,
                )
            except NoSource as error:
                raise UnsupportedModel(
                    f"the variables of `{type(module).__qualname__}.forward` cannot be reached: "
                    f"{error}. Operations need no source: name them as `path/operation`."
                ) from error
            taps.name(table)
        if is_uncompiled:
            inner = leave_alone(inner)
        code = getattr(unwrap(inner)[-1], "__code__", None)
        outer: Any = inner
        if takes_self and not (variables or has_operations or has_skips or has_arguments):
            outer = _copy_function(inner)  # there only to be noticed by compiled graphs
        elif not takes_self or has_operations or has_skips or has_arguments:
            outer = self._stand_in(inner, takes_self, has_operations)
            outer = leave_alone(outer) if is_uncompiled else outer
            outer = functools.wraps(getattr(original, "__func__", original))(outer)
            if not takes_self:
                with contextlib.suppress(TypeError, ValueError):  # what is in C may have none
                    outer.__signature__ = _with_self(inspect.signature(original))
        # For those who read the module's forward.
        outer.hookline_original = original
        return MethodType(outer, module), code

    def _stand_in(self, inner: Any, takes_self: bool, has_operations: bool) -> Callable[..., Any]:
        junction, module, skips = self._junction, self._module, self.skips

        def forward(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or is_exporting():
                if this is not module or skips:
                    refuse_tracing()
                return run_traced(
                    junction.traced,
                    module,
                    inner,
                    args=(this, *args) if takes_self else args,
                    kwargs=kwargs,
                    has_operations=has_operations,
                )
            if this is not module:
                return self._leave_copy(this)(*args, **kwargs)
            frame = junction.current()
            target = module if frame is None else frame.module
            for skip in reversed(skips):  # the latest has the word
                answer = skip.take(target)
                if answer is not None:
                    return answer(*args, **kwargs)
            bound = inner.__get__(target, type(target)) if takes_self else inner
            if not has_operations:
                return bound(*args, **kwargs)
            if frame is not None:
                return operations.see(junction, frame, bound, *args, **kwargs)
            with junction.directly(args, kwargs) as begun:
                return operations.see(junction, begun, bound, *args, **kwargs)

        return forward

    def _leave_copy(self, copied: nn.Module) -> Callable[..., Any]:
        """Take the stand-in away from a copy of the module that took it along."""
        for name in (_GETSTATE, _REPLICATE):
            copied.__dict__.pop(name, None)
        if self._own is _ABSENT:
            copied.__dict__.pop(self._place, None)
        else:
            memo: dict[int, Any] = {id(self._module): copied}
            copied.__dict__[self._place] = copy.deepcopy(self._own, memo)
        forward: Callable[..., Any] = getattr(copied, self._place)
        return forward


def _copy_function(function: Any) -> Any:
    """Give a function that does the same, and can be marked."""
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copied, function, updated=("__dict__",))


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    """Add the argument that binding takes away again."""
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    names = [one.name for one in signature.parameters.values()]
    if "self" in names:
        this = this.replace(name="this_module")
    return signature.replace(parameters=[this, *signature.parameters.values()])
