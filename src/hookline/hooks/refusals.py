"""What hookline cannot attach to, said before anything runs."""

from __future__ import annotations

import inspect
from typing import NoReturn

import torch
from torch import nn

from hookline import _torch
from hookline._errors import UnsupportedModel
from hookline.addresses import ModuleTree, Site

_LAZY_FLAGS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


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
    refuse_compiled(tree)
    if any(issubclass(kind, torch.jit.ScriptModule) for kind in set(map(type, tree.modules))):
        module = next(one for one in tree.modules if isinstance(one, torch.jit.ScriptModule))
        _refuse_script(module, _path(tree, module))
    return tree


def refuse_compiled(tree: ModuleTree) -> None:
    """Raise if a part of the model runs compiled code, unless everything is forced eager."""
    compiled = [one for one in tree.modules if one._compiled_call_impl is not None]
    compiled += [wrapper for wrapper in tree.wrappers if _torch.is_compiled(wrapper)]
    if compiled and not _torch.is_compile_forced_eager():
        _refuse_compiled(compiled[0], _path(tree, compiled[0]))


def _path(tree: ModuleTree, module: nn.Module) -> str:
    entry = tree.entry_of(module)
    return "" if entry is None else entry.names[0]


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
    forward = module.__dict__.get("forward") or type(module).forward
    # Not unwrapped: a decorator may turn a generator into a plain function.
    code = getattr(forward, "__code__", None)
    flags = 0 if code is None else code.co_flags
    if not flags & _LAZY_FLAGS:
        return None
    if flags & inspect.CO_GENERATOR:
        return "generator"
    return "coroutine" if flags & inspect.CO_COROUTINE else "async generator"


def leave_out_lazy(sites: list[Site]) -> list[Site]:
    """Drop modules without an output that only a pattern met; raise if nothing else was named."""
    left = [
        one
        for one in sites
        if one.is_exact or generator_kind(one.module) is None or (one.parameter and one.is_grad)
    ]
    if not left:
        refuse_module(sites[0].module, sites[0].path)
    return left


def refuse_module(module: nn.Module, path: str) -> None:
    """Raise for a module whose forward has not run when it returns."""
    kind = generator_kind(module)
    if kind is not None:
        raise UnsupportedModel(
            f"`{path}` ({type(module).__qualname__}): its forward is a {kind}, which returns "
            "before its body runs, so there is no output to see at the module's border. "
            "Attach to the modules it calls."
        )
