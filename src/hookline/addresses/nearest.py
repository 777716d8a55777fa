"""Say why a selector names nothing in a model, and what is near it.

Each function returns the error to raise. Time does not matter here: the program stops.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from hookline._errors import NoSuchSite
from hookline.addresses.address import PARAMETER_PORTS, PORTS, Address
from hookline.addresses.names import WRAPPED_ATTRIBUTES, ModuleTree
from hookline.addresses.pattern import (
    REGEX_PREFIX,
    compile_path,
    escape,
    is_regex,
    read_exact,
    read_path,
    unescape,
)

_MOST_SUGGESTIONS = 3
_MOST_CLASSES = 5
_LIST_THEM = "List them with `hl.sites(model)`."


def explain_address(tree: ModuleTree, address: Address) -> NoSuchSite:
    """Say why an address or pattern names nothing."""
    exact = read_exact(address.path)
    reason = _explain_module_gradient(tree, address)
    if reason is None and exact is not None:
        reason = _explain_slot(tree, exact)
    if reason is not None:
        return NoSuchSite(reason)
    message = f"`{address}` matches no site in {_describe(tree)}."
    if exact is None and any(map(compile_path(address.path), _hidden_names(tree))):
        message += " Modules below `parametrizations` are named by exact paths only."
    suggestions = _suggest_port(tree, address) or _suggest(tree, address)
    if suggestions:
        message += f" Nearest: {', '.join(f'`{suggestion}`' for suggestion in suggestions)}."
    return NoSuchSite(f"{message} {_LIST_THEM}")


def explain_class(tree: ModuleTree, kind: type) -> NoSuchSite:
    """Say that no module is an instance of the class."""
    classes = list(dict.fromkeys(type(entry.module) for entry in tree.entries))
    message = f"`{_format_class(kind)}` matches no module in {_describe(tree)}."
    if any(_format_class(other) == _format_class(kind) for other in classes):
        return NoSuchSite(
            f"{message} A class of that name is there, but it is another one: "
            "it was defined again, or its file was reloaded, after the model was made."
        )
    shown = [f"`{_format_class(other)}`" for other in classes[:_MOST_CLASSES]]
    more = ", ..." if len(classes) > _MOST_CLASSES else ""
    return NoSuchSite(f"{message} Its classes: {', '.join(shown)}{more}. {_LIST_THEM}")


def explain_predicate(tree: ModuleTree, predicate: Callable[..., object]) -> NoSuchSite:
    """Say that the predicate is true for no module."""
    name = getattr(predicate, "__name__", type(predicate).__name__)
    return NoSuchSite(f"the predicate `{name}` is true for no module in {_describe(tree)}.")


def explain_stranger(tree: ModuleTree, module: nn.Module) -> NoSuchSite:
    """Say that a module is not part of the model."""
    return NoSuchSite(
        f"the `{_format_class(type(module))}` given is not a module of {_describe(tree)}; "
        f"it may belong to a copy of it. {_LIST_THEM}"
    )


def _describe(tree: ModuleTree) -> str:
    count = sum(1 for entry in tree.entries if entry.pattern_names)
    return f"`{type(tree.root).__name__}` ({count} site{'s' if count != 1 else ''})"


def _format_class(kind: type) -> str:
    if kind.__module__.startswith("torch.nn.modules."):
        return f"nn.{kind.__name__}"
    return kind.__qualname__.rpartition("<locals>.")[2]


def _explain_module_gradient(tree: ModuleTree, address: Address) -> str | None:
    if address.port not in PARAMETER_PORTS:
        return None
    modules = tree.select(address.path)
    if not modules:
        return None
    path = address.path
    message = (
        f"`{address}` names no parameter: the gradients of a module are `{path}:output.grad` "
        f"and `{path}:input.grad`"
    )
    below = f"{path}." if path else ""
    own = next(
        (name for name, value in modules[0].module._parameters.items() if value is not None), ""
    )
    inside = f"{below}{escape(own) if own else '**'}"
    if own or tree.select_parameters(compile_path(inside)):
        message += f", those of its parameters `{inside}:{address.port}`"
    return message + "."


def _explain_slot(tree: ModuleTree, path: str) -> str | None:
    """Say what is registered under an exact path that is neither module nor parameter."""
    above, _, name = path.rpartition(".")
    owner = tree.find(above)
    if owner is None:
        return None
    module = owner.module
    if module._buffers.get(name) is not None:
        return (
            f"`{path}` is a buffer, not a parameter or module, so it is no site. "
            f"Read it in a hook of its module: `{escape(above)}:output`."
        )
    if any(name in slots for slots in (module._parameters, module._modules, module._buffers)):
        return f"`{path}` is None in this `{_format_class(type(module))}`, so it is no site."
    parametrizations = module._modules.get("parametrizations")
    if parametrizations is not None and name in parametrizations._modules:
        start = f"{above}." if above else ""
        inside = f"{start}parametrizations.{name}"
        return (
            f"`{path}` is parametrized: it is computed at every read, not a parameter. "
            f"What it is computed from: `{escape(inside)}.original*`; "
            f"what computes it: `{escape(inside)}`."
        )
    return None


def _hidden_names(tree: ModuleTree) -> Iterator[str]:
    for entry in tree.entries:
        yield from set(entry.names) - set(entry.pattern_names)


def _suggest(tree: ModuleTree, address: Address) -> list[str]:
    names = _list_names(tree, address.port)
    for proposals in _propose(address.path, names):
        found = [path for path in dict.fromkeys(proposals) if any(map(compile_path(path), names))]
        if found:
            return [path + address.suffix for path in found[:_MOST_SUGGESTIONS]]
    return []


def _suggest_port(tree: ModuleTree, address: Address) -> list[str]:
    """Suggest `fc1:output` for `fc1.output`, and `fc1.weight:grad` for `fc1.weight.grad`."""
    if address.port is not None or is_regex(address.path):
        return []
    for port in PORTS:
        before, found, after = f".{address.path}".rpartition(f".{port}")
        path = before[1:]
        if not found or after not in ("", ".grad"):
            continue
        is_of_parameter = port in PARAMETER_PORTS
        if not is_of_parameter and tree.select(path):
            return [f"{path}:{port}{after}"]
        if is_of_parameter and tree.select_parameters(compile_path(path)):
            return [f"{path}:{port}"]
        if is_of_parameter and tree.select(path):
            return [f"{path}:output.grad", f"{path}:input.grad"]
    return []


def _list_names(tree: ModuleTree, port: str | None) -> list[str]:
    names: list[str] = []
    if port not in PARAMETER_PORTS:
        names += [name for entry in tree.entries for name in entry.pattern_names if name]
    if port is None or port in PARAMETER_PORTS:
        names += [name for entry in tree.parameters for name in entry.names]
    return names


def _propose(path: str, names: list[str]) -> Iterator[list[str]]:
    """Propose other paths in groups, the likeliest first; not all of them match."""
    if is_regex(path):
        yield [f"{REGEX_PREFIX}.*(?:{path[len(REGEX_PREFIX) :]}).*"]
        return
    segments = list(read_path(path).segments)
    if not segments:
        return
    wrapped = set(WRAPPED_ATTRIBUTES.values())
    yield [".".join(segment for segment in segments if segment not in wrapped)]
    # `layers[12]` is a character class, but a list index is what people mean by it.
    yield [re.sub(r"(?<=\w)\[([0-9]+)\]", r".\1", path)]
    yield [re.sub(r"(?<=\w)\[", ".[", path)]
    yield [path if segments[0] == "**" else f"**.{path}"]
    yield list(_repair(segments, names))
    yield [escape(name) for name in difflib.get_close_matches(path, names, n=_MOST_SUGGESTIONS)]


def _repair(segments: list[str], names: list[str]) -> Iterator[str]:
    """Replace the first segment that leads nowhere by its nearest siblings, then the next."""
    known = {
        ".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 2)
    }
    known.add("")
    for index in range(len(segments)):
        if any(map(compile_path(".".join(segments[: index + 1])), known)):
            continue
        is_parent = compile_path(".".join(segments[:index]))
        siblings = {
            name.rpartition(".")[2] for name in known if name and is_parent(name.rpartition(".")[0])
        }
        for rank, sibling in enumerate(_find_near(unescape(segments[index]), siblings)):
            repaired = [*segments[:index], escape(sibling), *segments[index + 1 :]]
            whole = ".".join(repaired)
            if any(map(compile_path(whole), names)):
                yield whole
            elif rank == 0:
                # The nearest only: each wrong segment would triple the search.
                yield from list(_repair(repaired, names)) or [".".join(repaired[: index + 1])]
        return


def _find_near(segment: str, siblings: Iterable[str]) -> list[str]:
    by_lower = {sibling.lower(): sibling for sibling in sorted(siblings)}
    near = difflib.get_close_matches(segment.lower(), by_lower, n=_MOST_SUGGESTIONS, cutoff=0.5)
    return [by_lower[lower] for lower in near]
