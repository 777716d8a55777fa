"""`hl.sites`: what a pattern means in a model, before anything is captured or changed.

With an example it runs one forward and adds what flowed at each site: metadata only, no tensor is
kept, and the model is as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline import _trees
from hookline._errors import UnsupportedModel
from hookline._tables import Table
from hookline._trees import Path
from hookline.addresses import ModuleTree, Selector, Site, format_leaf, resolve
from hookline.hooks.arguments import bind
from hookline.hooks.functions import check_leaf
from hookline.hooks.refusals import generator_kind
from hookline.hooks.sessions import Session
from hookline.hooks.visits import Listener, Station, Visit
from hookline.surveys.preserving import preserved


class SiteTable(Table):
    """The sites of a model as a table: `.addresses` lists them, iterating gives rows as dicts."""

    @property
    def addresses(self) -> list[str]:
        """Give each address once, in model order."""
        return list(dict.fromkeys(str(row["address"]) for row in self))


class _Seen(NamedTuple):
    """What one leaf of a site was; `shape` is None where the value holds no tensor."""

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

    def _note(self, tree: Any) -> None:
        try:
            value = _trees.get(tree, self.leaf)
        except _trees.NoSuchLeaf:
            self.missing = [f"{self.port}{format_leaf(path)}" for path, _ in _trees.leaves(tree)]
            return
        noted = [
            _Seen(path, *_describe(tensor))
            for path, tensor in _trees.leaves(value, self.leaf)
            if not self.site.is_grad or tensor.is_floating_point() or tensor.is_complex()
        ]
        self.seen.update(noted or [_Seen(self.leaf)])


def _describe(tensor: Tensor) -> tuple[tuple[int, ...] | None, str, str]:
    shape = None if is_lazy(tensor) else tuple(tensor.shape)
    return shape, str(tensor.dtype).removeprefix("torch."), str(tensor.device)


def _observe(
    model: nn.Module, tree: ModuleTree, found: list[Site], example: Any
) -> dict[Site, _Metadata]:
    """Run the model once and give what was seen at each site that could be listened at."""
    session = Session(model, "hl.sites(...)", this_thread=True)
    session.follows_recompute = False
    _refuse_uninitialized(tree)
    listeners: dict[Site, _Metadata] = {}
    for site in found:
        if site.port == "parameter" or generator_kind(site.module) is not None:
            continue
        station = session.station(site.names, site.module)
        listeners[site] = _Metadata(session, station, site)
        session.listen(listeners[site])
    args, kwargs = _arguments(example)
    with preserved([entry.module for entry in tree.entries]):
        session.open()
        try:
            model(*args, **kwargs)
        except Exception as error:
            error.add_note("in the forward that hl.sites ran with `example`; nothing is left of it")
            raise
        finally:
            session.close()
    return listeners


def _arguments(example: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(example, Mapping):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}


def _refuse_uninitialized(tree: ModuleTree) -> None:
    for entry in tree.entries:
        for owned in (entry.module._parameters, entry.module._buffers):
            for name, tensor in owned.items():
                if tensor is not None and is_lazy(tensor):
                    path = f"{entry.names[0]}.{name}" if entry.names[0] else name
                    raise UnsupportedModel(
                        f"`{path}` is not initialized yet, and running the example would do it. "
                        "Run the model once first: model(example); or list without an example."
                    )


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
    # By leaf, so that the shapes of one leaf stand together; sorting is stable.
    order = {leaf: i for i, leaf in enumerate(dict.fromkeys(seen.leaf for seen in listener.seen))}
    return [
        row | seen._asdict() | {"address": site._replace(leaf=seen.leaf).address, "visits": visits}
        for seen, visits in sorted(listener.seen.items(), key=lambda item: order[item[0].leaf])
    ]


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
