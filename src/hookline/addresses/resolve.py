"""Resolve selectors against a model: from an address, class, module or predicate to sites.

Whatever matches nothing raises; `hookline.addresses.nearest` finds the words for it. This file
knows no hooks: a site says where a value is, not how to reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from hookline._errors import AddressError, NoSuchSite
from hookline.addresses import nearest, variables
from hookline.addresses.address import (
    PARAMETER_PORTS,
    Address,
    Leaf,
    format_parameter,
    format_place,
    parse,
)
from hookline.addresses.inside import MARKS, is_inside
from hookline.addresses.names import ModuleEntry, ModuleTree, ParameterEntry
from hookline.addresses.pattern import compile_path, escape, read_exact

_PORT_ORDER = {"input": 0, "output": 1, "parameter": 2}


class Site(NamedTuple):
    """Say where one value of a model is; two are equal when they name the same value."""

    # A tuple, not a dataclass: one is made for each module whenever something is attached.

    names: tuple[str, ...]
    """The paths of the module, or the full paths of the parameter."""

    module: nn.Module
    """The module, or the first module that has the parameter."""

    port: str
    """`input`, `output`, `parameter`, or a name inside forward: `@scores[1]`, `/softmax:input`."""

    leaf: Leaf = ()
    """The names and indexes that lead to one leaf of the value."""

    is_grad: bool = False
    """Whether it is the gradient of that value."""

    parameter: str | None = None
    """The parameter's name in its module; None for a port."""

    is_exact: bool = True
    """Whether it was named by an exact path or as the module itself, not by a pattern."""

    is_local: bool = False
    """Whether it is what this rank alone computed of a parameter's gradient."""

    @property
    def path(self) -> str:
        """Return the first of its names."""
        return self.names[0]

    @property
    def address(self) -> str:
        """Write the address that names this site, with its port."""
        if self.port == "parameter":
            return format_parameter(self.path, is_grad=self.is_grad, is_local=self.is_local)
        return format_place(escape(self.path), self.port, self.leaf, is_grad=self.is_grad)

    @property
    def is_inside(self) -> bool:
        """Whether it is a variable or an operation of the module's `forward`."""
        return is_inside(self.port)

    @property
    def key(self) -> tuple[int, str, Leaf, bool, str | None, bool]:
        """Return what makes it this site: the module's identity and the place in it."""
        return id(self.module), self.port, self.leaf, self.is_grad, self.parameter, self.is_local

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Site) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, slots=True)
class Selection:
    """Hold a selector together with the port it asks for; made by `port`."""

    selector: Selector
    """What it selects."""

    port: str
    """The port as written in an address: `input`, `output[0]`, `input.grad`, `@scores`."""


Selector: TypeAlias = (
    "str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool] | Selection"
    " | Iterable[Selector]"
)


def port(selector: Selector, name: str) -> Selection:
    """Choose the port of a selector that is not a string.

    A string has its own port (`"fc1:input.grad"`); a class, a module or a predicate takes it here.

    >>> port(nn.Linear, "input.grad").port
    'input.grad'
    """
    _parse_port(name)
    return Selection(selector, name)


def resolve(tree: ModuleTree, selector: Selector, *, default_port: str = "output") -> list[Site]:
    """Return the sites a selector names in a model, in model order and each once.

    `default_port` is what a selector without a port means. It may name a leaf or a gradient; a
    parameter, which has no ports, takes only the gradient from it.
    """
    found = _resolve(tree, selector, _parse_port(default_port), False)
    if isinstance(selector, str) or len(found) < 2:
        return found
    sites: dict[Any, Site] = {}
    for site in found:
        if site.key not in sites or site.is_exact:
            sites[site.key] = site
    return sorted(sites.values(), key=lambda site: _order(tree, site))


def _resolve(tree: ModuleTree, selector: Any, request: Address, is_chosen: bool) -> list[Site]:
    if isinstance(selector, str):
        return _resolve_text(tree, selector, request, is_chosen)
    if isinstance(selector, Selection):
        if is_chosen:
            raise AddressError(f"`{selector!r}` has a port of its own; choose it once")
        return _resolve(tree, selector.selector, _parse_port(selector.port), True)
    if isinstance(selector, nn.Module):
        entry = tree.entry_of(selector)
        if entry is None:
            raise nearest.explain_stranger(tree, selector)
        return _make_sites(tree, [entry], request, True)
    if isinstance(selector, type):
        entries = [entry for entry in _visible(tree) if isinstance(entry.module, selector)]
        if not entries:
            raise nearest.explain_class(tree, selector)
        return _make_sites(tree, entries, request, False)
    if callable(selector) and not isinstance(selector, Tensor):
        return _resolve_predicate(tree, selector, request)
    if not isinstance(selector, Iterable) or isinstance(selector, Tensor):
        raise AddressError(
            f"a `{type(selector).__name__}` is no selector; give an address, a class, a module, "
            "a predicate of `(path, module)`, or a list of these"
        )
    items = list(selector)
    if not items:
        raise NoSuchSite("an empty list of selectors names no site")
    return [site for item in items for site in _resolve(tree, item, request, is_chosen)]


def _resolve_text(tree: ModuleTree, text: str, request: Address, is_chosen: bool) -> list[Site]:
    address = parse(text)
    path = address.path
    if address.port is not None or address.inside is not None:
        if is_chosen:
            raise AddressError("this address has a port of its own", text, len(path))
        request = address
    exact = read_exact(path)
    if address.port not in PARAMETER_PORTS:
        if exact is None:
            entries = tree.select(path)
        else:
            entry = tree.find(exact)
            entries = [] if entry is None else [entry]
        if entries:
            return _make_sites(tree, entries, request, exact is not None)
    if exact is None:
        parameters = tree.select_parameters(compile_path(path))
    else:
        parameter = tree.find_parameter(exact)
        parameters = [] if parameter is None else [parameter]
    if not parameters:
        raise nearest.explain_address(tree, address)
    if address.port in ("input", "output") or address.inside is not None or is_chosen:
        raise AddressError(
            f"`{path}` names a parameter, which has no ports; write `{path}` or `{path}:grad`",
            text,
            len(path) if len(path) < len(text) else None,
        )
    return [_make_parameter_site(entry, request, exact is not None) for entry in parameters]


def _resolve_predicate(
    tree: ModuleTree, predicate: Callable[[str, nn.Module], bool], request: Address
) -> list[Site]:
    entries = []
    for entry in _visible(tree):
        path = entry.pattern_names[0]
        try:
            is_selected = predicate(path, entry.module)
        except Exception as error:
            error.add_note(f"in a predicate, called with (path, module) for `{path}`")
            raise
        if is_selected:
            entries.append(entry)
    if not entries:
        raise nearest.explain_predicate(tree, predicate)
    return _make_sites(tree, entries, request, False)


def _visible(tree: ModuleTree) -> list[ModuleEntry]:
    return [entry for entry in tree.entries if entry.pattern_names]


def _parse_port(name: str) -> Address:
    address = parse(name if name[:1] in MARKS else f":{name}")
    if address.port in PARAMETER_PORTS:
        raise AddressError(
            f"a module has no port `{address.port}`: write `output.grad` or `input.grad`; "
            "the gradients of parameters are named by an address such as `**.weight:grad`"
        )
    return address


def _make_sites(
    tree: ModuleTree, entries: list[ModuleEntry], request: Address, is_exact: bool
) -> list[Site]:
    if request.inside is None:
        port = request.port or "output"
        return [
            Site(entry.names, entry.module, port, request.leaf, request.is_grad, None, is_exact)
            for entry in entries
        ]
    found = variables.expand(tree, entries, request.inside, is_exact)
    is_exact = is_exact and request.inside.is_exact
    return [
        Site(entry.names, entry.module, port, request.leaf, request.is_grad, None, is_exact)
        for entry, ports in found
        for port in ports
    ]


def _make_parameter_site(entry: ParameterEntry, request: Address, is_exact: bool) -> Site:
    module, name = entry.places[0]
    is_local = request.port == "local_grad"
    return Site(entry.names, module, "parameter", (), request.is_grad, name, is_exact, is_local)


def _order(tree: ModuleTree, site: Site) -> tuple[int, int, int]:
    index = 0
    if site.parameter is not None:
        index = list(site.module._parameters.keys()).index(site.parameter)
    return tree.position(site.module), _PORT_ORDER.get(site.port, len(_PORT_ORDER)), index
