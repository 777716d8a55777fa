"""`hl.hook`: a function of `(value, at)` at any site, observing or editing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline._errors import EditError, NoSuchSite
from hookline._trees import Path
from hookline.addresses import Selector, Site, format_leaf, parse_port, resolve
from hookline.addresses.variables import forward_of
from hookline.hooks import everywhere, observing
from hookline.hooks.arguments import bind, known_names, unbind
from hookline.hooks.eagerly import Compiled, check_compiled
from hookline.hooks.ears import VisitEar
from hookline.hooks.fitting import check_fit, is_met_again, refuse_second_order
from hookline.hooks.hearing import Ear
from hookline.hooks.parameters import ParameterListener
from hookline.hooks.refusals import leave_out_lazy
from hookline.hooks.sessions import Handle, Session
from hookline.hooks.uncompiled import outside_of_graphs
from hookline.hooks.visits import KEEP, MISSING, At, Listener, Station, Visit, describe
from hookline.sources import read

HookFunction = Callable[[Any, At], Any]
Which = int | slice | Container[int] | None
"""One number, several, a slice of them, or None for all."""


def is_among(number: int | None, which: Which) -> bool:
    """Tell whether a visit or call number is one of those asked for."""
    if which is None:
        return True
    if number is None:
        return False
    if isinstance(which, int):
        return number == which
    if isinstance(which, slice):
        start = which.start or 0
        is_before = which.stop is None or number < which.stop
        return number >= start and is_before and (number - start) % (which.step or 1) == 0
    return number in which


def check_which(name: str, which: Any) -> Which:
    """Give back what selects visits or calls; raise at once for what cannot."""
    is_numbers = isinstance(which, Container) and not isinstance(which, (str, bytes))
    if which is None or is_numbers or (isinstance(which, int) and not isinstance(which, bool)):
        return which  # type: ignore[no-any-return]
    if isinstance(which, slice):
        parts = [one or 0 for one in (which.start, which.stop, which.step)]
        if all(isinstance(one, int) and one >= 0 for one in parts):
            return which
    raise TypeError(
        f"{name}={which!r} selects nothing: give a number, several in a list, set or range, "
        "or a slice of numbers from 0"
    )


def check_function(function: object, what: str) -> None:
    """Raise at once for a hook that cannot be called."""
    if not callable(function):
        raise TypeError(f"{what} takes a function, not {type(function).__qualname__}")


class Options(TypedDict, total=False):
    """How a function listens: at which stage, when, and with what it sees."""

    stage: Required[int]
    visits: Which
    calls: Which
    keep_graph: bool
    second_order: bool


class FunctionListener(Listener):
    """Call a user's function with the values or gradients of one site."""

    __slots__ = (
        "calls",
        "function",
        "is_exact",
        "keep_graph",
        "met",
        "reasons",
        "second_order",
        "visits",
    )

    def __init__(
        self,
        session: Session,
        station: Station,
        site: Site,
        function: HookFunction,
        *,
        stage: int,
        visits: Which = None,
        calls: Which = None,
        keep_graph: bool = False,
        second_order: bool = False,
    ) -> None:
        super().__init__(
            session,
            station,
            site.port,
            site.leaf,
            values=not site.is_grad,
            gradients=site.is_grad,
            stage=stage,
        )
        self.function = function
        self.is_exact = site.is_exact
        self.visits = visits
        self.calls = calls
        self.keep_graph = keep_graph
        self.second_order = second_order
        self.fired = 0
        self.met = False
        """Whether a value inside forward came by, also one that a condition kept it from."""
        self.reasons: set[str] = set()

    @property
    def depends_on_place(self) -> bool:
        return bool(getattr(self.function, "depends_on_place", False))

    def applies(self, visit: Visit) -> bool:
        if self.visits is None and self.calls is None:
            return True
        if visit.index is None and self.stage == 1:
            raise EditError(
                f"the edit at {describe(visit, self.address)} depends on the visit or call, and "
                "this recompute cannot be traced back to one. Use torch.utils.checkpoint, or an "
                "edit without `visits` and `calls`."
            )
        return is_among(visit.index, self.visits) and is_among(visit.call.index, self.calls)

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.applies(visit):
            return args, kwargs
        bound = bind(module, args, kwargs)
        at = At(visit, module, "input", self.leaf)
        new = self._pass(visit, bound, at)
        return (args, kwargs) if new is bound else unbind(module, new, args, kwargs)

    def on_output(
        self,
        visit: Visit,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        if not self.applies(visit):
            return output
        at = At(visit, module, "output", self.leaf, arguments=(args, kwargs))
        return self._pass(visit, output, at)

    def on_value(self, visit: Visit, module: nn.Module, port: str, value: Any) -> Any:
        self.met = True
        if not self.applies(visit):
            return value
        new = self._pass(visit, value, At(visit, module, port, self.leaf))
        if new is not value:
            if port[0] == "/" and self.session.is_in_own_region(visit):
                raise EditError(
                    f"the edit at {describe(visit, self.address)} is in a part of forward that is "
                    "checkpointed by itself: the recompute would run without it and the gradient "
                    "be wrong. Edit a variable there, or checkpoint the whole module."
                )
            self.session.note_inside_edit(visit)
        return new

    def _pass(self, visit: Visit, tree: Any, at: At) -> Any:
        try:
            value = _trees.get(tree, self.leaf) if self.leaf else tree
        except _trees.NoSuchLeaf:
            self.no_leaf(visit, tree)
            return tree
        self.fired += 1
        if self.stage != 1:
            if not self.keep_graph:
                value = _detached(value)
            observing.observe(self.session, visit, self.function, value, at)
            return tree
        new = observing.run(self.session, visit, at.address, self.function, value, at)
        at.forget()
        if new is KEEP or new is value:
            return tree
        check_fit(value, new, describe(visit, at.address))
        self.session.note_edit(visit)
        return _trees.put(tree, self.leaf, new)

    def on_gradient(
        self, visit: Visit, port: str, leaf: Path, grad: Tensor | None, task: int
    ) -> Tensor | None:
        if not self.applies(visit):
            return grad
        self.fired += 1
        at = At(visit, visit.station.module, port, leaf, is_grad=True)
        if self.stage != 1:
            value = MISSING if grad is None else grad if self.keep_graph else grad.detach()
            observing.observe(self.session, visit, self.function, value, at)
            return grad
        if grad is None:
            return None
        if not self.second_order and is_met_again(visit, task):
            refuse_second_order(
                describe(visit, at.address), "Pass second_order=True if that is meant."
            )
        new = observing.run(self.session, visit, at.address, self.function, grad, at)
        if new is KEEP or new is grad:
            return grad
        check_fit(grad, new, describe(visit, at.address))
        return new  # type: ignore[no-any-return]

    def make_ear(self, device: torch.device, visits: VisitEar | None) -> tuple[Ear | None, Any]:
        make = getattr(self.function, "make_traced", None)
        if make is None or visits is None:
            return super().make_ear(device, visits)
        return make(self, device, visits)  # type: ignore[no-any-return]

    def no_gradient(self, visit: Visit, port: str, leaf: Path | None, reason: str) -> None:
        self.reasons.add(reason)

    def no_leaf(self, visit: Visit, tree: Any) -> None:
        if self.is_exact and (self.port == "output" or self.inside is not None):
            there = [format_leaf(path) or "the value itself" for path, _ in _trees.leaves(tree)]
            raise NoSuchSite(
                f"{describe(visit, self.address)}: there is no `{format_leaf(self.leaf)}` in it. "
                f"Tensors there: {', '.join(there) or 'none'}."
            )
        self.reasons.add("no leaf")


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return _trees.map_tensors(value, lambda _, tensor: tensor.detach())


def check_leaf(site: Site) -> None:
    """Raise at once for an input name that the module's `forward` does not know."""
    if site.port != "input" or not site.leaf or not site.is_exact:
        return
    names, first = known_names(site.module), site.leaf[0]
    if names is not None and isinstance(first, str) and first not in names:
        raise NoSuchSite(
            f"`{site.address}`: `{type(site.module).__qualname__}.forward` has no argument "
            f"`{first}`. It takes: {', '.join(f'`{name}`' for name in names) or 'nothing'}."
        )


def count_from_start(site: Site) -> Site:
    """Turn `@h[-1]` into the number it has, for an edit, which cannot wait for the end."""
    inside = parse_port(site.port)
    if inside.number is None or inside.number >= 0:
        return site
    if inside.mark == "@":
        points = read(forward_of(site.module)).names.get(inside.name, [])
        number = len(points) + inside.number
        if points and all(one.is_certain for one in points) and number >= 0:
            return site._replace(port=str(inside._replace(number=number)))
    raise NoSuchSite(
        f"`{site.address}`: an edit has to know which one it is when the value is made, and which "
        "is the last is known only when forward ends. Count from the start: "
        f"`{site._replace(port=str(inside._replace(number=0))).address}`."
    )


def _limit(function: HookFunction, visits: Which, calls: Which) -> HookFunction:
    """Give a function that runs in some visits and calls only."""
    if visits is None and calls is None:
        return function

    @functools.wraps(function)
    def limited(value: Any, at: At) -> Any:
        wanted = is_among(at.visit, visits) and is_among(at.call, calls)
        return function(value, at) if wanted else KEEP

    return limited


def attach_function(
    session: Session,
    sites: list[Site],
    function: HookFunction,
    *,
    prepend: bool = False,
    **options: Unpack[Options],
) -> None:
    """Let a function listen at sites of a session that is not open yet."""
    for site in sites:
        check_leaf(site)
        if site.port == "parameter":
            limited = _limit(function, options.get("visits"), options.get("calls"))
            follower = ParameterListener(
                session,
                site,
                limited,
                stage=options["stage"],
                keep_graph=options.get("keep_graph", False),
            )
            session.follow_parameter(follower, prepend=prepend)
            continue
        if options["stage"] == 1 and site.is_inside and not site.is_grad:
            site = count_from_start(site)
        station = session.station(site.names, site.module, is_inside=site.port[0] == "@")
        session.listen(
            FunctionListener(session, station, site, function, **options), prepend=prepend
        )


@outside_of_graphs
def hook(
    model: nn.Module | None,
    where: Selector,
    function: HookFunction,
    *,
    edit: bool = False,
    before_edits: bool = False,
    prepend: bool = False,
    visits: Which = None,
    calls: Which = None,
    keep_graph: bool = False,
    second_order: bool = False,
    this_thread: bool = False,
    compiled: Compiled = "graph",
) -> Handle:
    """Attach `function(value, at)` to every site that `where` names.

    The function observes: its return is ignored, it runs without grad and autocast, and it gets
    the value detached (`keep_graph=True`: with its graph). With `edit=True` it returns the new
    value, or `hl.KEEP`; what it returns is checked against the old value first. A value of a whole
    port comes as the module returned it, inputs as a dict of arguments by name; gradients come
    tensor by tensor, and `at.leaf` says which.

    At one site, observers with `before_edits=True` run first, then edits in the order they were
    attached (`prepend=True`: before those attached earlier), then all other observers.
    `model=None` means every module of every model; `where` is then `"**"`, a class or a predicate.
    A function cannot run inside a graph that `torch.compile` made: with `compiled="eager"` the
    model is run without its graphs as long as the hook is attached.

        handle = hl.hook(model, "fc1:output.grad", lambda grad, at: print(at.address, grad.norm()))
        handle.remove()
    """
    check_function(function, "hl.hook")
    check_which("visits", visits)
    check_which("calls", calls)
    if edit and before_edits:
        raise ValueError("an edit cannot run before edits; drop before_edits, or use prepend=True.")
    options: Options = {
        "stage": 1 if edit else 0 if before_edits else 2,
        "visits": visits,
        "calls": calls,
        "keep_graph": keep_graph,
        "second_order": second_order,
    }
    if model is None:
        return everywhere.attach(
            f"hl.hook(None, {_show(where)})",
            where,
            lambda session, station, site: [
                FunctionListener(session, station, site, function, **options)
            ],
        )
    session = Session(
        model,
        f"hl.hook({_show(where)})",
        this_thread=this_thread,
        is_eager=check_compiled(compiled),
    )
    assert session.tree is not None
    sites = leave_out_lazy(resolve(session.tree, where))
    attach_function(session, sites, function, prepend=prepend, **options)
    session.open()
    return Handle(session)


def _show(where: object) -> str:
    text = repr(where) if isinstance(where, (str, list, tuple)) else str(where)
    return text if len(text) <= 60 else text[:57] + "..."
