"""The arguments of a call under the names in `forward`'s signature, and back.

`fc(x)` and `fc(input=x)` are the same call; hookline names the value `fc:input.input` in both.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from hookline._trees import Path


class _Signature(NamedTuple):
    positional: tuple[str, ...]
    rest: str | None
    keyword: tuple[str, ...]
    takes_any_keyword: bool


_UNKNOWN = _Signature((), "args", (), True)
_signatures: weakref.WeakKeyDictionary[Callable[..., Any], _Signature]
_signatures = weakref.WeakKeyDictionary()


def _read(function: Callable[..., Any], skip_self: bool) -> _Signature:
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip_self:]
    except (TypeError, ValueError):
        return _UNKNOWN
    kinds = inspect.Parameter
    return _Signature(
        tuple(
            p.name
            for p in parameters
            if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ),
        next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), None),
        tuple(p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY),
        any(p.kind is kinds.VAR_KEYWORD for p in parameters),
    )


def _signature(module: nn.Module) -> _Signature:
    forward = type(module).forward
    own = module.__dict__.get("forward")
    if own is not None:
        original = getattr(own, "hookline_original", own)
        if original is not forward:  # put on this instance by another library
            return _read(original, False)
    known = _signatures.get(forward)
    if known is None:
        known = _signatures[forward] = _read(forward, True)
    return known


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name the arguments of a call as `forward`'s signature does, in the order they were passed."""
    names = _signature(module)
    bound: dict[str, Any] = dict(zip(names.positional, args, strict=False))
    if len(args) > len(names.positional):
        bound[names.rest or "args"] = tuple(args[len(names.positional) :])
    bound.update(kwargs)
    return bound


def unbind(
    module: nn.Module, bound: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn named arguments back into the `args` and `kwargs` of the call they came from."""
    names = _signature(module)
    taken = names.positional[: len(args)]
    new_args = [bound[name] for name in taken]
    rest = names.rest or "args"
    if len(args) > len(names.positional):
        new_args.extend(bound[rest])
        taken = (*taken, rest)
    new_kwargs = {name: value for name, value in bound.items() if name not in taken}
    return tuple(new_args), new_kwargs


def paths(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Path]:
    """List where each passed argument stands among the named ones, positional ones first."""
    names = _signature(module)
    rest = names.rest or "args"
    taken = len(names.positional)
    found: list[Path] = [(name,) for name in names.positional[: len(args)]]
    found.extend((rest, i) for i in range(len(args) - taken))
    found.extend((name,) for name in kwargs)
    return found


def known_names(module: nn.Module) -> tuple[str, ...] | None:
    """List the argument names `forward` accepts; None where it accepts any."""
    names = _signature(module)
    if names.takes_any_keyword:
        return None
    rest = (names.rest,) if names.rest else ()
    return (*names.positional, *rest, *names.keyword)


def positional_names(module: nn.Module) -> tuple[tuple[str, ...], str]:
    """List the names of the arguments passed by position, and give that of those after them."""
    names = _signature(module)
    return names.positional, names.rest or "args"
