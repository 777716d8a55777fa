"""What is known of a model besides its numbers: each module's class, settings and hooks."""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hookline.addresses import ModuleTree
from hookline.addresses.variables import forward_of, has_forward
from hookline.diffs.traces import ModuleFacts, TraceFacts
from hookline.hooks.module_hooks import ModuleHook
from hookline.hooks.origins import find_origin
from hookline.surveys.naming import is_of_torch
from hookline.watchers.describing import source_of

_MOST_ITEMS = 16
"""Longer lists of plain values say nothing about a module."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype, enum.Enum)
_INTERNAL = frozenset(vars(nn.Module())) | {"forward", "__getstate__"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_SETTING = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)\s*(.*)", re.DOTALL)


def read_facts(model: nn.Module, title: str = "") -> TraceFacts:
    """Read what a model is made of, as it is now."""
    tree = ModuleTree(model)
    modules = {entry.names[0]: _read_module(entry.module, entry.names) for entry in tree.entries}
    root = tree.root
    flat = dict(_flatten_config(getattr(root, "config", None)))
    if flat and "" in modules:
        own = modules[""]
        config = {**own.config, **flat}
        modules[""] = ModuleFacts(
            own.type, own.is_torch, own.training, config, own.names, own.source
        )
    devices = sorted({one.device.type for one in model.parameters()}) or ["cpu"]
    cast = [one for one in devices if one != "meta" and torch.is_autocast_enabled(one)]
    return TraceFacts(
        title=title or type(root).__name__,
        modules=modules,
        ties=tuple(entry.names for entry in tree.parameters if len(entry.names) > 1),
        autocast=str(torch.get_autocast_dtype(cast[0])).removeprefix("torch.") if cast else "",
        has_tf32=torch.backends.cuda.matmul.allow_tf32 and "cuda" in devices,
    )


def _read_module(module: nn.Module, names: tuple[str, ...]) -> ModuleFacts:
    is_callable = has_forward(module)
    return ModuleFacts(
        type=type(module).__name__,
        is_torch=is_of_torch(forward_of(module)) if is_callable else True,
        training=module.training,
        config=dict(_read_config(module)),
        names=names,
        source=source_of(module, "output"),
    )


def _read_config(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Give the settings of a module by name: what it prints of itself, then its attributes."""
    try:
        printed = str(module.extra_repr())
    except Exception:  # a user's own text may fail
        printed = ""
    for number, part in enumerate(_split(printed)):
        found = _SETTING.fullmatch(part)
        yield found.groups() if found else (f"[{number}]", part)  # type: ignore[misc]
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in _INTERNAL:
            text = _write(value)
            if text is not None:
                yield name, text
    own = vars(module).get("forward")
    own = getattr(own, "hookline_original", own)
    usual = getattr(type(module), "forward", None)
    if own is not None and usual is not None and getattr(own, "__func__", own) is not usual:
        yield "forward", _name(own)
    hooks = list(_list_hooks(module))
    if hooks:
        yield "hooks", ", ".join(hooks)


def _list_hooks(module: nn.Module) -> Iterator[str]:
    """Name the hooks that others have put on a module and on its parameters."""
    for place in _HOOKS:
        for hook in getattr(module, place, {}).values():
            if not isinstance(hook, ModuleHook):
                yield _shorten(find_origin(hook).name)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        for place in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            for hook in (getattr(parameter, place, None) or {}).values():
                yield f"{name}: {_shorten(find_origin(hook).name)}"


def _write(value: Any) -> str | None:
    """Write a plain value; None for what is none."""
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)) and len(value) <= _MOST_ITEMS:
        items = [_write(one) for one in value]
        if None in items:
            return None
        return f"({', '.join(map(str, items))})"
    if isinstance(value, functools.partial):
        given = [f"{name}={_write(one)}" for name, one in value.keywords.items()]
        return f"{_name(value.func)}({', '.join(given)})"
    if inspect.isroutine(value):
        return _name(value)
    return None


def _name(function: Any) -> str:
    function = getattr(function, "__func__", function)
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{module}.{_shorten(name)}" if module else _shorten(name)


def _shorten(name: str) -> str:
    """Leave out the function that another was made in."""
    return name.rpartition("<locals>.")[2]


def _split(text: str) -> Iterator[str]:
    """Split at the commas that stand in no bracket and no string."""
    depth, quote, part = 0, "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if letter == "," and not depth and not quote:
            yield part.strip()
            part = ""
        else:
            part += letter
    if part.strip():
        yield part.strip()


def _flatten_config(config: Any) -> Iterator[tuple[str, str]]:
    """Give the plain values of a model's config object, as libraries of models have one."""
    values = getattr(config, "__dict__", None)
    if isinstance(config, Mapping):
        values = config
    if not isinstance(values, Mapping) or isinstance(config, nn.Module):
        return
    for name, value in values.items():
        if isinstance(name, str) and not name.startswith("_"):
            text = _write(value)
            if text is not None:
                yield f"config.{name}", text
