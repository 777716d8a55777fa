"""Why a module was not called while a session was open, and what its hooks change, for reports.

Pure functions over a tree of modules, asked when a session ends: they may take their time. They
state what is certain and mark as possible what is not; none of them runs the model.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from hookline.addresses import ModuleTree
from hookline.addresses.pattern import escape
from hookline.hooks.bypasses import Bypass, find_bypass
from hookline.hooks.fusing import may_fuse
from hookline.hooks.sessions import Session

# Their own forward reads the weights of their children for the fused path, which hooks switch off.
_READ_WEIGHTS_FOR_FUSED = (nn.TransformerEncoder.forward, nn.TransformerEncoderLayer.forward)


@dataclass(frozen=True, slots=True)
class Reason:
    """Say why a module was not called and what to do about it."""

    what: str
    """The reason, as it follows the module's path and a colon."""

    fix: str
    """What to do, as an imperative."""

    is_bypass: bool = False
    """Whether the module's work was done, but without calling it."""


_NOTHING_RAN = Reason(
    "neither the model nor any module with a hook was called",
    "call `model(x)` while the hooks are attached",
)
_NOT_TAKEN = Reason(
    "the model ran without calling it: a branch not taken, or unused",
    "run an input that takes the branch, or leave this address out",
)


def why_not_called(
    tree: ModuleTree,
    path: str,
    module: nn.Module,
    ran: Container[int],
    *,
    hooked: Container[int] = (),
) -> Reason:
    """Say why a module was not called.

    `ran` holds the ids of modules known to have run. `hooked` holds the ids of modules that had a
    hook, so that those not in `ran` are known not to have run; the root is always one of them.
    """
    if is_container(module):
        return Reason("a container: it is never called itself", _ask_for_children(path))
    entry = tree.entry_of(module)
    names = [] if entry is None else [one for one in entry.names if _find(tree, one) is module]
    if not names:
        return _explain_swap(_find(tree, path))
    is_any_known = any(id(one.module) in ran for one in tree.entries)
    if not path:
        what = "only modules below it were called" if is_any_known else "it was not called"
        return Reason(what, "call `model(x)`, not `model.forward(x)` or a method of it")
    if path in names:
        names = [path, *names]
    bypass = find_bypass(_readable_parents(tree, names), module)
    return (
        _explain_parametrization(tree, names)
        or _explain_attention(tree, names)
        or (_explain_bypass(bypass, module, path) if bypass and not bypass.is_called else None)
        or (_explain_inside(path) if _has_run_inside(tree, module, names, ran) else None)
        or (None if is_any_known else _NOTHING_RAN)
        or _explain_parent(tree, names, ran, hooked)
        or (_explain_bypass(bypass, module, path) if bypass else None)
        or _NOT_TAKEN
    )


def is_container(module: nn.Module) -> bool:
    """Tell whether a module has no forward: `nn.ModuleList`, `nn.ModuleDict` and their like."""
    own = vars(module).get("forward")
    has_own = own is not None and getattr(own, "__func__", None) is not nn.Module.forward
    return type(module).forward is nn.Module.forward and not has_own


def _quote(path: str) -> str:
    return f"`{escape(path)}`" if path else "the root"


def _ask_for_children(path: str) -> str:
    return f"ask for its children: `{escape(path)}.*`" if path else "ask for its children: `*`"


def _ancestors(tree: ModuleTree, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules above a path, nearest first."""
    while path:
        path = path.rpartition(".")[0]
        entry = tree.find(path)
        if entry is not None:
            yield path, entry.module


def _readable_parents(tree: ModuleTree, names: list[str]) -> list[nn.Module]:
    above = {id(one): one for name in names for _, one in _ancestors(tree, name)}
    return [one for one in above.values() if type(one).forward not in _READ_WEIGHTS_FOR_FUSED]


def _find(tree: ModuleTree, path: str) -> nn.Module | None:
    """Give the module that is at a path now, whatever was there when the tree was made."""
    return tree.locate(path)


def _explain_swap(there: nn.Module | None) -> Reason:
    if there is None:
        return Reason("it was removed from the model after attaching", "attach after the change")
    what = f"it was replaced after attaching: a `{type(there).__name__}` is there now"
    return Reason(what, "attach after the swap")


def _explain_parametrization(tree: ModuleTree, names: list[str]) -> Reason | None:
    for name in names:
        for path, one in _ancestors(tree, f"{name}."):  # with the module itself
            if isinstance(one, ParametrizationList):
                owner, _, tensor = path.replace("parametrizations.", "").rpartition(".")
                tensor = f"{owner}.{tensor}" if owner else tensor
                return Reason(
                    f"a parametrization: it runs when `{tensor}` is read, which did not happen "
                    "(or `parametrize.cached()` kept an earlier value)",
                    f"run what reads `{tensor}`, outside of `parametrize.cached()`",
                )
    return None


def _explain_attention(tree: ModuleTree, names: list[str]) -> Reason | None:
    for name in names:
        above, _, child = name.rpartition(".")
        entry = tree.find(above)
        if entry is None or child != "out_proj":
            continue
        if getattr(type(entry.module), "forward", None) is nn.MultiheadAttention.forward:
            return Reason(
                "`nn.MultiheadAttention` never calls it: it uses its weight in a function",
                f"ask for `{escape(above)}:output[0]`, which is what it would give, "
                f"or for `{escape(name)}.weight`",
                is_bypass=True,
            )
    return None


def _explain_bypass(bypass: Bypass, module: nn.Module, path: str) -> Reason:
    where, text = bypass.where, bypass.text
    parent = _quote(path.rpartition(".")[0])
    if bypass.kind == "forward":
        what = f"`{where}` calls `{text}()` directly, which skips hooks"
        fix = f"write `{text.removesuffix('.forward')}(...)` there"
    elif bypass.kind == "method":
        what = f"`{where}` calls `{text}()`, a method, which skips the module's hooks"
        fix = (
            f"ask for its children: `{escape(path)}.*`" if module._modules else f"ask for {parent}"
        )
    else:
        what = f"`{where}` uses `{text}` directly (functional use)"
        name = text.rpartition(".")[2]
        fix = f"ask for the output of {parent}, or for `{escape(path)}.{name}`"
    if bypass.is_called:
        what = f"the model ran without calling it; {what}"
    return Reason(what, fix, is_bypass=not bypass.is_called)


def _explain_inside(path: str) -> Reason:
    what = "modules inside it ran, but it was not called itself: they are called one by one"
    return Reason(what, _ask_for_children(path), is_bypass=True)


def _has_run_inside(
    tree: ModuleTree, module: nn.Module, names: Iterable[str], ran: Container[int]
) -> bool:
    """Tell whether a module below this one ran that can only be reached through it."""
    starts = tuple(f"{name}." for name in names)
    for one in module.modules():
        entry = tree.entry_of(one) if id(one) in ran and one is not module else None
        if entry is not None and all(name.startswith(starts) for name in entry.names):
            return True
    return False


def _explain_parent(
    tree: ModuleTree, names: list[str], ran: Container[int], hooked: Container[int]
) -> Reason | None:
    stopped = [_first_stopped(tree, name, ran, hooked) for name in names]
    if None in stopped:  # a shared module can be reached another way
        return None
    above = stopped[0]
    if not above:
        return Reason(
            "only parts of the model were called, not the model itself", "call `model(x)`"
        )
    is_parent = above == names[0].rpartition(".")[0]
    who = f"its parent `{above}`" if is_parent else f"`{above}`, which holds it,"
    return Reason(f"{who} was not called either", f"look at `{above}` first")


def _first_stopped(
    tree: ModuleTree, name: str, ran: Container[int], hooked: Container[int]
) -> str | None:
    """Give the nearest module above that is known not to have run, unless one nearer ran."""
    for path, module in _ancestors(tree, name):
        if id(module) in ran:
            return None
        entry = tree.entry_of(module)
        is_known = module is tree.root or id(module) in hooked
        if is_container(module) or not is_known or entry is None:
            continue
        if not path or not _has_run_inside(tree, module, entry.names, ran):
            return path
    return None


def swap_notes(session: Session) -> list[str]:
    """Say which of the modules that ran are no longer at their path."""
    moved = session.trails.moved()
    if not moved:
        return []
    ran = {station.path for station in session.stations if station.runs}
    return [
        f"{_quote(path)} was replaced or removed after attaching: "
        "what ran after that was not seen; attach after the swap"
        for path in moved
        if path in ran
    ]


def fast_path_note(tree: ModuleTree, modules: Iterable[nn.Module]) -> list[str]:
    """Say which `nn.TransformerEncoderLayer`s lose their fused kernel to hooks on these modules."""
    if not any(issubclass(kind, nn.TransformerEncoderLayer) for kind in tree.facts.kinds):
        return []
    hooked = {id(module) for module in modules}
    notes = []
    for entry in tree.entries:
        layer = entry.module
        if not isinstance(layer, nn.TransformerEncoderLayer) or not may_fuse(layer):
            continue
        if any(id(module) in hooked for module in layer.modules()):
            notes.append(
                f"hooks switch off the fused kernel of {_quote(entry.names[0])} "
                "(nn.TransformerEncoderLayer in eval mode without grad): the numbers may differ in "
                "the last bits from a run without hooks"
            )
    return notes
