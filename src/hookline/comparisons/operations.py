"""The operations of one module's own forward, in order: names, lines, arguments and results.

What a child does is one operation, named as the child is; what an autograd function does is one,
named after its class. Each says which operations its tensors come from.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, get_testing_overrides
from torch.utils.weak import WeakTensorKeyDictionary

from hookline._torch import add_forward_hooks
from hookline.addresses import ModuleTree
from hookline.hooks.operations import bind_operation, names_of
from hookline.replays.naming import changed_in_place, tensors_in
from hookline.replays.places import SourceLine, find_function, find_line, find_owner
from hookline.replays.staging import Stage

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_MOST_BYTES = 1 << 30
"""How much of the results of one module is kept; of what comes after, nothing is compared."""


@dataclass(slots=True, eq=False)
class Call:
    """One operation that a forward called."""

    name: str
    """Its name as addresses have it, or that of a child."""

    is_child: bool
    """Whether it is a child of the module."""

    line: SourceLine
    """The line of the user's code."""

    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of its results."""

    inputs: tuple[int, ...] = ()
    """The operations its tensors come from; -1 for what comes from outside."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments that are no tensors."""

    results: tuple[Tensor | None, ...] = ()
    """Copies of its results; None past the budget."""

    gradients: dict[int, Tensor] = field(default_factory=dict)
    """The gradients of its results that arrived, by their number."""

    wants_gradient: tuple[bool, ...] = ()
    """Whether each result wants a gradient."""

    stops_gradient: bool = False
    """Whether it was given what wants a gradient and gives nothing that does."""

    number: int = 0
    """Which call of that name it is."""

    def __repr__(self) -> str:
        return f"<{self.name}[{self.number}] {self.shapes} {self.line.place}>"


class OperationNotes(TorchFunctionMode):
    """Note the operations of one module's forward while it runs; its children are marked too."""

    def __init__(self, stage: Stage, *, gradients: bool = False) -> None:
        super().__init__()
        self._module = stage.call.module
        tree = ModuleTree(self._module)
        self._names = {id(entry.module): entry.names[0] for entry in tree.entries}
        self._gradients = gradients
        self._makers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._counts: dict[str, int] = {}
        self._bytes = 0
        self._depth = 0
        self._alive: list[tuple[Tensor, Call, int]] = []
        self.calls: list[Call] = []
        for entry in tree.entries:
            if entry.module is not self._module:
                add_forward_hooks(entry.module, self._enter, self._leave, place=3)

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            given = tensors_in([*args, *kwargs.values()])
            plain = _plain({**dict(enumerate(args)), **kwargs})
            with torch._C.DisableTorchFunction():
                name = self._names[id(module)]
                line = find_line(sys._getframe(1))
                self._note(name, line, given, plain, tensors_in(output), is_child=True)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        names = names_of(func)
        result = func(*args, **kwargs)
        if self._depth:
            return result
        with torch._C.DisableTorchFunction():
            given = tensors_in([*args, *kwargs.values()])
            if not names:  # an attribute such as `.T`: what it gives comes from where that came
                made = tensors_in(result)
                if made and given:
                    for one in made:
                        self._makers.setdefault(one, self._maker(given[0]))
                return result
            frame = sys._getframe(1)
            owner = find_owner(frame, self._names)
            target = changed_in_place(func, names, args, kwargs)
            outputs = tensors_in(result) if target is None else [target]
            if owner.module is self._module and outputs:
                bound = name_arguments(func, args, kwargs)
                name = owner.inside or names[-1]
                applied = find_function(frame) if owner.inside else None
                self._note(
                    name,
                    find_line(frame) if applied is None else applied[1],
                    given,
                    {} if owner.inside else _plain(bound),
                    outputs,
                    is_inside=bool(owner.inside),
                )
        return result

    def _maker(self, tensor: Tensor) -> int:
        found = self._makers.get(tensor, -1)
        if found == -1 and tensor._base is not None:
            found = self._makers.get(tensor._base, -1)
        return int(found)

    def _note(
        self,
        name: str,
        line: SourceLine,
        given: list[Tensor],
        plain: Mapping[str, Any],
        outputs: list[Tensor],
        *,
        is_child: bool = False,
        is_inside: bool = False,
    ) -> None:
        inputs = tuple(self._maker(one) for one in given)
        number = len(self.calls)
        last = self.calls[-1] if self.calls else None
        if is_inside and last is not None and last.name == name and last.line == line:
            # One more of what an autograd function does: they are one operation together.
            number -= 1
            inputs = (*last.inputs, *(one for one in inputs if one != number))
            self.calls.pop()
            self._counts[name] -= 1
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        call = Call(
            name=name,
            is_child=is_child,
            line=line,
            shapes=tuple(tuple(one.shape) for one in outputs),
            inputs=inputs,
            arguments=plain,
            results=tuple(map(self._keep, outputs)),
            wants_gradient=tuple(one.requires_grad for one in outputs),
            stops_gradient=_stops(given, outputs),
            number=count,
        )
        self.calls.append(call)
        for index, one in enumerate(outputs):
            self._makers[one] = number
            if self._gradients:
                self._alive.append((one, call, index))

    def _keep(self, tensor: Tensor) -> Tensor | None:
        size = tensor.numel() * tensor.element_size()
        if self._bytes + size > _MOST_BYTES:
            return None
        self._bytes += size
        return tensor.detach().clone()

    def hear_gradients(self) -> None:
        """Ask for the gradients of the results, once the forward is over."""
        for tensor, call, index in self._alive:
            if tensor.requires_grad:
                tensor.register_hook(_Hear(call, index))
        self._alive.clear()


class _Hear:
    """Serve as a tensor hook: keep the gradient that arrives."""

    def __init__(self, call: Call, index: int) -> None:
        self._call = call
        self._index = index

    def __call__(self, grad: Tensor) -> None:
        before = self._call.gradients.get(self._index)
        now = grad.detach().clone()
        self._call.gradients[self._index] = now if before is None else before + now


@functools.lru_cache(maxsize=1024)
def _signature(func: Any) -> tuple[str, ...]:
    """Name the arguments of a function that is written in C; torch lists them for its tests."""
    twin = get_testing_overrides().get(func)
    if twin is None:
        return ()
    return tuple(inspect.signature(twin).parameters)


def name_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments of an operation, as far as torch tells."""
    bound = bind_operation(func, args, kwargs)
    names: tuple[str, ...] = ()
    if any(isinstance(name, int) for name in bound):
        try:
            names = _signature(func)
        except Exception:  # a function that cannot be hashed, or without a signature
            names = ()
    found = {}
    for name, value in bound.items():
        if isinstance(name, int) and name < len(names):
            found[names[name]] = value
        else:
            found[str(name)] = value
    return found


def _stops(given: list[Tensor], outputs: list[Tensor]) -> bool:
    floats = [one for one in outputs if one.is_floating_point()]
    is_wanted = any(one.requires_grad for one in given)
    return bool(floats) and is_wanted and not any(one.requires_grad for one in floats)


def _plain(bound: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in bound.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) <= 16 and all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
