"""What hookline cannot attach to, said before anything runs."""

from __future__ import annotations

import inspect
from typing import NoReturn

import torch
from torch import nn

from hookline import _torch
from hookline._errors import UnsupportedModel
from hookline.addresses import ModuleTree


def attachable(model: object) -> ModuleTree:
    """Give the model's tree of modules; raise for what is scripted, compiled, or no model."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(
            f"a model is a torch.nn.Module; this is {type(model).__qualname__}. "
            "For one tensor there is hl.register_hook(tensor, fn)."
        )
    if isinstance(model, torch.jit.ScriptModule):
        _refuse_script(model, "")
    tree = ModuleTree(model)
    forced_eager = _torch.is_compile_forced_eager()
    for wrapper in tree.wrappers:
        if _torch.is_compiled(wrapper) and not forced_eager:
            _refuse_compiled(wrapper, "")
    for entry in tree.entries:
        module = entry.module
        if isinstance(module, torch.jit.ScriptModule):
            _refuse_script(module, entry.names[0])
        if module._compiled_call_impl is not None and not forced_eager:
            _refuse_compiled(module, entry.names[0])
    return tree


def _refuse_script(module: nn.Module, path: str) -> NoReturn:
    raise UnsupportedModel(
        f"`{path}` ({type(module).__qualname__}) is a TorchScript module: Python hooks on it do "
        "not run where the script calls it. Attach to the model as it was before torch.jit.script "
        "or torch.jit.trace."
    )


def _refuse_compiled(module: nn.Module, path: str) -> NoReturn:
    raise UnsupportedModel(
        f"`{path}` ({type(module).__qualname__}) is compiled: torch.compile would skip the hooks "
        "in silence. Attach and call it eagerly: "
        'with torch.compiler.set_stance("force_eager"): ...'
    )


def generator_kind(module: nn.Module) -> str | None:
    """Name what kind of lazy function a module's forward is; None for a plain one."""
    forward = module.forward
    if inspect.isgeneratorfunction(forward):
        return "generator"
    if inspect.iscoroutinefunction(forward):
        return "coroutine"
    if inspect.isasyncgenfunction(forward):
        return "async generator"
    return None


def refuse_module(module: nn.Module, path: str) -> None:
    """Raise for a module whose forward has not run when it returns."""
    kind = generator_kind(module)
    if kind is not None:
        raise UnsupportedModel(
            f"`{path}` ({type(module).__qualname__}): its forward is a {kind}, which returns "
            "before its body runs, so there is no output to see at the module's border. "
            "Attach to the modules it calls."
        )
