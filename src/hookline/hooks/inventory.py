"""`hl.inventory`: every hook on a model, whoever put it there, without calling any.

What torch keeps outside of Python is not seen: hooks on the tensors of a graph, and those on
gradient accumulators that DDP registers in C++.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from hookline._tables import Table
from hookline.addresses import ModuleTree
from hookline.addresses.variables import forward_of
from hookline.hooks.forwards import StandIn
from hookline.hooks.junctions import Junction
from hookline.hooks.module_hooks import ModuleHook, forget_hook, is_of_pickle
from hookline.hooks.origins import find_origin
from hookline.hooks.parameters import ParameterListener
from hookline.hooks.sessions import Session

_COLUMNS = ("where", "kind", "function", "file:line", "owner")

_MODULE_HOOKS = {
    "_forward_pre_hooks": "forward pre",
    "_forward_hooks": "forward",
    "_backward_pre_hooks": "full backward pre",
    "_backward_hooks": "backward",
    "_state_dict_pre_hooks": "state_dict pre",
    "_state_dict_hooks": "state_dict",
    "_load_state_dict_pre_hooks": "load_state_dict pre",
    "_load_state_dict_post_hooks": "load_state_dict post",
}
_TENSOR_HOOKS = {
    "_backward_hooks": "tensor",
    "_post_accumulate_grad_hooks": "post accumulate grad",
}
_GLOBAL_HOOKS = {
    "_global_forward_pre_hooks": "forward pre",
    "_global_forward_hooks": "forward",
    "_global_backward_pre_hooks": "full backward pre",
    "_global_backward_hooks": "backward",
    "_global_module_registration_hooks": "module registration",
    "_global_parameter_registration_hooks": "parameter registration",
    "_global_buffer_registration_hooks": "buffer registration",
}
_OWN_FORWARD = "instance forward"
_HOOKLINE = "hookline"
_LEFTOVER = "hookline leftover"


class _Row(NamedTuple):
    where: str
    kind: str
    function: str
    location: str
    owner: str


def inventory(model: nn.Module | None = None) -> Table:
    """List every hook on a model, torch's own and other libraries' included, and who put it there.

    Also the hooks that torch applies to all modules of the process (where: `*`), which are all it
    lists without a model. Iterating gives each row as a dict; no hook is called.

        print(hl.inventory(model))
    """
    rows = list(_global_rows())
    title = "hooks of the whole process"
    if model is not None:
        tree = ModuleTree(model)
        rows.extend(_module_rows(tree))
        title = f"hooks on `{type(tree.root).__name__}`"
    return Table(_COLUMNS, rows, title=title, notes=_notes(rows))


def _notes(rows: list[_Row]) -> list[str]:
    if not rows:
        return ["no hooks"]
    owners = Counter(row.owner for row in rows)
    notes = [f"{_count(len(rows), 'hook')}: {_list(owners)}."]
    others = Counter({name: n for name, n in owners.items() if name not in ("torch", "hookline")})
    if others:
        are = "is" if others.total() == 1 else "are"
        them = "it" if others.total() == 1 else "them"
        notes.append(
            f"{_count(others.total(), 'hook')} {are} neither torch's nor hookline's: "
            f"remove {them} through the handle that registering returned."
        )
    replaced = sum(row.kind == _OWN_FORWARD for row in rows)
    if replaced:
        has = "has" if replaced == 1 else "have"
        notes.append(f"{_count(replaced, 'module')} {has} a forward set on the instance, no hook.")
    return notes


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _list(owners: Counter[str]) -> str:
    return ", ".join(f"{number} {owner}" for owner, number in owners.most_common())


def _global_rows() -> Iterator[_Row]:
    return _folded_rows("*", _global_hooks())


def _global_hooks() -> Iterator[tuple[str, Any]]:
    for attribute, kind in _GLOBAL_HOOKS.items():
        if kind == "backward":
            kind = _backward_kind(torch_module._global_is_full_backward_hook)
        yield from ((kind, hook) for hook in getattr(torch_module, attribute).values())


def _module_rows(tree: ModuleTree) -> Iterator[_Row]:
    parameters = {id(entry.parameter): entry for entry in tree.parameters}
    named = [(entry.names[0] or "(root)", entry.module) for entry in tree.entries]
    for wrapper in tree.wrappers:
        entry = tree.entry_of(wrapper)
        assert entry is not None
        where = f"{entry.names[0] or '(root)'} [{type(wrapper).__name__}]"
        named.insert(tree.position(entry.module), (where, wrapper))
    for where, module in named:
        own = module.__dict__.get("forward")
        if own is not None and not isinstance(module, torch.jit.ScriptModule):
            own = forward_of(module)  # where hookline stands in, its hooks have a row below
            if own is not type(module).forward:
                yield _plain_row(where, _OWN_FORWARD, own)
        stand_in = StandIn.find(module)
        if stand_in is not None and stand_in.junction.is_hookless:
            yield _junction_row(where, stand_in.junction)
        yield from _folded_rows(where, _module_hooks(module))
        for parameter in module._parameters.values():
            known = parameters.pop(id(parameter), None)  # a tied one shows once
            if known is not None:
                yield from _folded_rows(known.names[0], _tensor_hooks(known.parameter))


def _module_hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for attribute, kind in _MODULE_HOOKS.items():
        if attribute == "_backward_hooks":
            kind = _backward_kind(module._is_full_backward_hook)
        hooks: Mapping[int, Callable[..., Any]] = getattr(module, attribute)
        yield from ((kind, hook) for hook in hooks.values())


def _tensor_hooks(tensor: Tensor) -> Iterator[tuple[str, Any]]:
    for attribute, kind in _TENSOR_HOOKS.items():
        hooks: Mapping[int, Callable[..., Any]] | None = getattr(tensor, attribute, None)
        yield from ((kind, hook) for hook in (hooks or {}).values())


def _backward_kind(is_full: bool | None) -> str:
    return "full backward" if is_full else "legacy backward"


def _folded_rows(where: str, hooks: Iterator[tuple[str, Any]]) -> Iterator[_Row]:
    """Make a row for each hook, but one for all that hookline does at this place."""
    seen: set[_Row] = set()
    for kind, hook in hooks:
        row = _hookline_row(where, hook)
        if row is None:
            yield _plain_row(where, kind, hook)
        elif row not in seen:
            seen.add(row)
            yield row


def _hookline_row(where: str, hook: Any) -> _Row | None:
    if isinstance(hook, ModuleHook):
        return _junction_row(where, hook.junction)
    if hook is forget_hook:
        return _Row(where, _LEFTOVER, "of a copy; goes at the first uncompiled call", "", _HOOKLINE)
    if is_of_pickle(hook):
        return _Row(where, _LEFTOVER, "of a pickle; does nothing", "", _HOOKLINE)
    if isinstance(hook, MethodType) and isinstance(hook.__self__, ParameterListener):
        listener = hook.__self__
        location = _locate([listener.function])
        return _Row(where, _HOOKLINE, listener.session.purpose, location, _HOOKLINE)
    if isinstance(hook, MethodType) and isinstance(hook.__self__, Session):  # on every module
        return _Row(where, _HOOKLINE, hook.__self__.purpose, "", _HOOKLINE)
    return None


def _junction_row(where: str, junction: Junction) -> _Row:
    purposes = "; ".join(session.purpose for session in junction.sessions())
    functions = [getattr(one, "function", None) for one in junction.listeners()]
    return _Row(where, _HOOKLINE, purposes, _locate(functions), _HOOKLINE)


def _locate(functions: list[Any]) -> str:
    """Say where the user's functions behind hookline's own hook were written."""
    found = [find_origin(getattr(one, "edit", one)) for one in functions if one is not None]
    return "; ".join(dict.fromkeys(one.location for one in found if one.owner != _HOOKLINE))


def _plain_row(where: str, kind: str, hook: Any) -> _Row:
    origin = find_origin(hook)
    return _Row(where, kind, origin.name, origin.location, origin.owner)
