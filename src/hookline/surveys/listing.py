"""`hl.sites`: what a pattern means in a model, before anything is captured or changed.

With an example it runs one forward and adds what flowed at each site: metadata only, no tensor is
kept, and the model is as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline import _trees
from hookline._tables import Table
from hookline._trees import Path
from hookline.addresses import (
    ModuleTree,
    Selector,
    Site,
    format_place,
    is_inside,
    parse_port,
    resolve,
)
from hookline.hooks.arguments import bind
from hookline.hooks.functions import check_leaf
from hookline.hooks.refusals import generator_kind
from hookline.hooks.sessions import Session
from hookline.hooks.visits import Listener, Station, Visit
from hookline.surveys.examples import ExampleRun


class SiteTable(Table):
    """The sites of a model as a table: `.addresses` lists them, iterating gives rows as dicts."""

    @property
    def addresses(self) -> list[str]:
        """Give each address once, in model order."""
        return list(dict.fromkeys(str(row["address"]) for row in self))


class _Seen(NamedTuple):
    """What one leaf of a site was; `shape` is None where the value holds no tensor."""

    port: str
    leaf: Path
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str | None = None


def sites(model: nn.Module, where: Selector = "**", *, example: Any = None) -> SiteTable:
    """List the sites that `where` names; with an `example`, also what flows there.

    The example is what the model takes: one value, a tuple of arguments, or a dict of keyword
    arguments. It runs once, without grad. Buffers, attributes and random states are put back. A
    value of several tensors has a row for each, and one that changed its shape from visit to visit
    a row for each shape; `visits` says how often it was seen. Gradients show the shape of the
    value they belong to.

        print(hl.sites(model, "layers.*", example=x))
    """
    tree = ModuleTree(model)
    found = resolve(tree, where)
    for site in found:
        check_leaf(site)
    notes = _lazy_function_notes(found)
    if example is None and any(site.port[0] == "/" for site in found):
        notes.append("which operations run is known with an example: hl.sites(..., example=x).")
    observed = None if example is None else _observe(model, tree, found, example)
    rows = [row for site in found for row in _site_rows(site, observed)]
    columns = ["address", "type", "names", "shape", "dtype", "device", "visits"]
    if observed is None:
        columns = columns[:5]
        if not any(site.port == "parameter" for site in found):
            columns = columns[:3]
    else:
        notes += _missing_leaf_notes(found, observed)
        idle = sum(not one.seen and one.missing is None for one in observed.values())
        if idle:
            notes.append(f"{idle} of {len(found)} sites did not run with this example.")
    if not any(row["names"] for row in rows):
        columns.remove("names")
    return SiteTable(
        columns,
        [[row[column] for column in columns] for row in rows],
        title=f"{len(found)} site{'' if len(found) == 1 else 's'} in `{type(tree.root).__name__}`",
        notes=notes,
    )


class _Metadata(Listener):
    """Count what the leaves of one site were, visit by visit."""

    __slots__ = ("missing", "seen", "site")

    def __init__(self, session: Session, station: Station, site: Site) -> None:
        super().__init__(
            session, station, site.port, site.leaf, values=True, gradients=False, stage=2
        )
        self.site = site
        self.seen: Counter[_Seen] = Counter()
        self.missing: list[str] | None = None
        """The tensors that were there instead, where the site's leaf was not."""

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._note(bind(module, args, kwargs))
        return args, kwargs

    def on_output(
        self,
        visit: Visit,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        self._note(output)
        return output

    def on_value(self, visit: Visit, module: nn.Module, port: str, value: Any) -> Any:
        self._note(value, port)
        return value

    def _note(self, tree: Any, port: str | None = None) -> None:
        port = port or self.port
        try:
            value = _trees.get(tree, self.leaf)
        except _trees.NoSuchLeaf:
            self.missing = [
                format_place("", port, path).removeprefix(":") for path, _ in _trees.leaves(tree)
            ]
            return
        noted = [
            _Seen(port, path, *_describe(tensor))
            for path, tensor in _trees.leaves(value, self.leaf)
            if not self.site.is_grad or tensor.is_floating_point() or tensor.is_complex()
        ]
        self.seen.update(noted or [_Seen(port, self.leaf)])


def _describe(tensor: Tensor) -> tuple[tuple[int, ...] | None, str, str]:
    shape = None if is_lazy(tensor) else tuple(tensor.shape)
    return shape, str(tensor.dtype).removeprefix("torch."), str(tensor.device)


def _observe(
    model: nn.Module, tree: ModuleTree, found: list[Site], example: Any
) -> dict[Site, _Metadata]:
    """Run the model once and give what was seen at each site that could be listened at."""
    run = ExampleRun(model, tree, "hl.sites")
    listeners: dict[Site, _Metadata] = {}
    for site in found:
        if site.port == "parameter" or generator_kind(site.module) is not None:
            continue
        station = run.session.station(site.names, site.module)
        listeners[site] = _Metadata(run.session, station, site)
        run.session.listen(listeners[site])
    run.start(example)
    return listeners


def _site_rows(site: Site, observed: Mapping[Site, _Metadata] | None) -> list[dict[str, Any]]:
    row: dict[str, Any] = {
        "address": site.address,
        "type": "parameter" if site.port == "parameter" else type(site.module).__name__,
        "names": ", ".join(site.names[1:]),
        "shape": None,
        "dtype": None,
        "device": None,
        "visits": None,
    }
    if site.parameter is not None:
        parameter = site.module._parameters[site.parameter]
        assert parameter is not None
        row["shape"], row["dtype"], row["device"] = _describe(parameter)
        return [row]
    listener = None if observed is None else observed.get(site)
    if listener is None:
        return [row]
    if not listener.seen:
        return [row | {"visits": 0}]
    # By place, so that the shapes of one leaf stand together; sorting is stable.
    places = dict.fromkeys((seen.port, seen.leaf) for seen in listener.seen)
    order = {place: number for number, place in enumerate(places)}
    ports = _shorten(list(dict.fromkeys(port for port, _ in places)))
    return [
        row
        | {name: value for name, value in seen._asdict().items() if name in row}
        | {
            "address": site._replace(port=ports[seen.port], leaf=seen.leaf).address,
            "visits": visits,
        }
        for seen, visits in sorted(
            listener.seen.items(), key=lambda item: order[item[0].port, item[0].leaf]
        )
    ]


def _shorten(ports: list[str]) -> dict[str, str]:
    """Leave out the number of what was assigned or called only once in a visit."""
    short = {
        port: str(parse_port(port)._replace(number=None)) if is_inside(port) else port
        for port in ports
    }
    often = Counter(short.values())
    return {port: short[port] if often[short[port]] == 1 else port for port in ports}


def _lazy_function_notes(found: list[Site]) -> list[str]:
    notes = []
    for site in found:
        kind = None if site.port == "parameter" else generator_kind(site.module)
        if kind is not None:
            notes.append(
                f"`{site.address}`: its forward is a {kind}, which returns before its body runs; "
                "attach to the modules it calls."
            )
    return notes


def _missing_leaf_notes(found: list[Site], observed: Mapping[Site, _Metadata]) -> list[str]:
    notes = []
    for site in found:
        listener = observed.get(site)
        if listener is not None and listener.missing is not None and not listener.seen:
            there = ", ".join(f"`{leaf}`" for leaf in listener.missing) or "none"
            notes.append(f"`{site.address}` was not in the value; tensors there: {there}.")
    return notes
