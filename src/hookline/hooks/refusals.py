"""What hookline cannot attach to, said before anything runs."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from hookline._errors import UnsupportedModel
from hookline.addresses import ModuleTree, Site

_LAZY_FLAGS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def attachable(model: object) -> ModuleTree:
    """Give the model's tree of modules; raise for what is no model, or runs no Python."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(
            f"a model is a torch.nn.Module; this is {type(model).__qualname__}. {hint_for(model)}"
        )
    refuse_running(model, "")
    return ModuleTree(model)


def hint_for(thing: object) -> str:
    """Say what to give in the place of something that is no model."""
    if type(thing).__name__ == "ExportedProgram":
        return (
            "torch.export.unflatten(program) has the modules of the model that was exported, "
            "program.module() its operations in one forward; both can be attached to."
        )
    return "For one tensor there is hl.register_hook(tensor, fn)."


def refuse_running(module: nn.Module, path: str) -> None:
    """Raise for a module whose call runs compiled or scripted code, which skips hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedModel(
            f"{_show(path)} ({type(module).__qualname__}) is a TorchScript module: Python hooks "
            "on it do not run where the script calls it. Attach to the model as it was before "
            "torch.jit.script or torch.jit.trace."
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


def leave_out_lazy(sites: list[Site], left_out: list[Site] | None = None) -> list[Site]:
    """Drop modules without an output that only a pattern met; raise if nothing else was named."""
    left = []
    for one in sites:
        has_output = generator_kind(one.module) is None
        if one.is_exact or has_output or one.port[0] == "@" or (one.parameter and one.is_grad):
            left.append(one)
        elif left_out is not None:
            left_out.append(one)
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
            f"Attach to its variables (`{path}@name`), or to the modules it calls."
        )


def refuse_tracing() -> None:
    """Say that hooks cannot run inside a graph that `torch.compile` is tracing."""
    raise UnsupportedModel(
        "hookline's hooks cannot run inside torch.compile: they would be traced once and then "
        "skipped. Call the model eagerly while you look at it: "
        'with torch.compiler.set_stance("force_eager"): ...'
    )


def _show(path: str) -> str:
    return f"`{path}`" if path else "the model"
