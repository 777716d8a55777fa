"""The variables of a module's `forward`, by name: which there are, and what a pattern means.

Names of operations are not known before they run, so they are taken as they are written.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from hookline._errors import NoSuchSite
from hookline.addresses.inside import Inside
from hookline.addresses.names import ModuleEntry, ModuleTree
from hookline.addresses.pattern import escape
from hookline.sources import Callee, NoSource, Reading, read

_MOST_NAMES = 40


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Give the forward that a module has by itself, past what hookline put there."""
    own = module.__dict__.get(forward_place(module))
    if own is None:
        # A scripted module has none in its class.
        return getattr(type(module), "forward", None) or module.forward
    original: Callable[..., Any] = getattr(own, "hookline_original", own)
    return original


def forward_place(module: nn.Module) -> str:
    """Name the attribute that holds the forward; accelerate wraps one that it keeps elsewhere."""
    wrapped = getattr(module.__dict__.get("forward"), "__wrapped__", None)
    if wrapped is not None:
        for name, value in module.__dict__.items():
            is_other = name != "forward" and isinstance(value, MethodType)
            if is_other and getattr(value, "hookline_original", value) == wrapped:
                return name
    return "forward"


def has_forward(module: nn.Module) -> bool:
    """Tell whether a module can be called at all: a list of modules cannot."""
    is_own = getattr(type(module), "forward", None) is not nn.Module.forward
    return is_own or "forward" in module.__dict__


def expand(
    tree: ModuleTree, entries: list[ModuleEntry], inside: Inside, is_exact: bool
) -> list[tuple[ModuleEntry, list[str]]]:
    """Give the ports that a name inside `forward` means in each module; raise if there is none.

    `is_exact` says that the module was named, so that it must have the variable.
    """
    callable_ones = [entry for entry in entries if has_forward(entry.module)]
    if not callable_ones:
        path = escape(entries[0].names[0])
        raise NoSuchSite(
            f"`{path}{inside}`: `{type(entries[0].module).__name__}` is a container and has no "
            f"forward. Name what is in it: `{path}.*{inside}`."
        )
    if inside.mark == "/":
        return [(entry, [str(inside)]) for entry in callable_ones]
    found = []
    errors: list[NoSuchSite] = []
    for entry in callable_ones:
        try:
            names = match_names(entry.module, inside)
        except NoSource as error:
            errors.append(_explain_no_source(entry, inside, error))
            continue
        if names:
            found.append((entry, [str(inside._replace(name=name)) for name in names]))
        elif is_exact or len(callable_ones) == 1:
            errors.append(_explain_unknown(entry, inside))
    if found:
        return found
    if len(errors) == 1:
        raise errors[0]
    kinds = list(dict.fromkeys(type(entry.module) for entry in callable_ones))
    shown = ", ".join(f"`{kind.__name__}`" for kind in kinds[:5])
    near = _nearest(inside.name, {name for entry in callable_ones for name in _names(entry.module)})
    raise NoSuchSite(
        f"no forward of {len(callable_ones)} modules ({shown}{', ...' if len(kinds) > 5 else ''}) "
        f"has `{inside}`.{near} See one with `print(hl.source(model, "
        f"'{escape(callable_ones[0].names[0])}'))`."
    )


def match_names(module: nn.Module, inside: Inside) -> list[str]:
    """List the variables of a module's forward that a name or pattern means.

    A name in a function that is only known when it is called is taken as it is written.
    """
    reading = read(forward_of(module))
    return _match(reading, inside.name, module, 0)


def _match(reading: Reading, name: str, module: nn.Module | None, depth: int) -> list[str]:
    pattern = Inside("@", name)
    if pattern.is_exact:
        if name in reading.names:
            return [name]
    else:
        matches = pattern.matches
        found = [one for one in reading.names if matches(one)]
        if found:
            return found
    return list(dict.fromkeys(_match_callees(reading, name, module, depth)))


def _match_callees(
    reading: Reading, name: str, module: nn.Module | None, depth: int
) -> Iterator[str]:
    """Find a name such as `helper.w` in the functions that are called."""
    head, dot, _ = name.rpartition(".")
    if not dot or depth > 3:
        return
    is_met = False
    called = dict.fromkeys(reading.callees)
    for callee in dict.fromkeys([*called, *reading.handed]):
        start = f"{callee.name}."
        if not name.startswith(start):
            continue
        function = called_function(callee, module)
        if function is None and callee not in called:
            continue  # an argument that is no function
        is_met = True
        if function is None:
            yield name
            continue
        if isinstance(function, nn.Module):
            continue
        inner = read(function)
        owner = module if callee.function is None else None
        rest = name[len(start) :]
        yield from (start + one for one in _match(inner, rest, owner, depth + 1))
    is_name = head.replace(".", "").replace("_", "").isalnum()
    if not is_met and is_name and any(_is_late(callee, module) for callee in reading.callees):
        yield name  # a function under another name: known when it is called


def called_function(callee: Callee, module: nn.Module | None) -> Callable[..., Any] | None:
    """Find the function behind a call; None where it is known only then."""
    return callee.function or _method(callee, module)


def _is_late(callee: Callee, module: nn.Module | None) -> bool:
    """Tell whether which function is called is known only then."""
    return callee.function is None and callee.expression.isidentifier()


def _method(callee: Callee, module: nn.Module | None) -> Callable[..., Any] | None:
    """Find the method behind `self.name(...)` or `super().name(...)`."""
    if module is None:
        return None
    start, _, name = callee.expression.rpartition(".")
    if start == "self" and name.isidentifier():
        found = getattr(module, name, None)
        return found if callable(found) else None
    return None


def list_names(module: nn.Module) -> list[str]:
    """List the variables of a module's forward; raise NoSource where there is no source."""
    return list(read(forward_of(module)).names)


def _names(module: nn.Module) -> list[str]:
    try:
        return list_names(module)
    except NoSource:
        return []


def _nearest(name: str, names: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(names), 3, 0.5)
    return f" Nearest: {', '.join(f'`@{one}`' for one in near)}." if near else ""


def _explain_unknown(entry: ModuleEntry, inside: Inside) -> NoSuchSite:
    module = entry.module
    names = _names(module)
    shown = ", ".join(f"`@{name}`" for name in names[:_MOST_NAMES])
    more = ", ..." if len(names) > _MOST_NAMES else ""
    path = escape(entry.names[0])
    message = f"`{path}{inside}`: `{_qualname(module)}` has no `{inside}`."
    head, _, rest = inside.name.partition(".")
    child = module._modules.get(head)
    if child is not None and rest:
        below = f"{path}.{head}" if path else head
        message += f" `{head}` is a module: write `{below}@{rest}`."
    message += _nearest(inside.name, set(names))
    return NoSuchSite(f"{message} It has: {shown or 'none'}{more}.")


def _explain_no_source(entry: ModuleEntry, inside: Inside, error: NoSource) -> NoSuchSite:
    from hookline.addresses.bytecodes import describe_operations

    path = escape(entry.names[0])
    if isinstance(entry.module, torch.jit.ScriptModule):
        return NoSuchSite(
            f"`{path}{inside}`: a scripted module runs no Python, so nothing inside its forward "
            "can be reached. Attach to the model as it was before torch.jit.script."
        )
    instead = describe_operations(
        forward_of(entry.module), inside.name, path, entry.module._modules
    )
    return NoSuchSite(
        f"`{path}{inside}`: variables are read from the source, and for "
        f"`{_qualname(entry.module)}` {error}. Operations need none: {instead}"
    )


def _qualname(module: nn.Module) -> str:
    return f"{type(module).__qualname__.rpartition('<locals>.')[2]}.forward"
