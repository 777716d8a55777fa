"""`hl.edit`: declared changes at any site, applied to the model itself while they are attached."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline._errors import EditError, HooklineError, HooklineWarning, UnsupportedModel
from hookline._tables import Table
from hookline.addresses import Selector, Site, format_place, resolve
from hookline.addresses.pattern import escape
from hookline.edits.actions import Action
from hookline.edits.skipping import Skip, SkipListener
from hookline.edits.traced_edits import make_traced_edit
from hookline.hooks.eagerly import Compiled, check_compiled
from hookline.hooks.ears import VisitEar
from hookline.hooks.functions import FunctionListener, Which, attach_function, check_which
from hookline.hooks.hearing import Ear
from hookline.hooks.idleness import why_idle
from hookline.hooks.reasons import swap_notes, why_not_called
from hookline.hooks.refusals import leave_out_lazy
from hookline.hooks.sessions import Handle, Session
from hookline.hooks.uncompiled import outside_of_graphs
from hookline.hooks.visits import KEEP, At

EditFunction = Callable[[Any, At], Any]
Edits = Mapping[Any, "Action | Skip | EditFunction"] | Iterable[tuple[Selector, Any]]


class EditHandle(Handle):
    """Hold edits that are in effect; remove them with `remove()` or by leaving `with`."""

    def __init__(self, session: Session, edits: list[_Applied]) -> None:
        super().__init__(session)
        self._edits = edits
        self._tree = session.tree
        self._missed: dict[_Applied, str] | None = None

    def __enter__(self) -> EditHandle:
        return self

    @outside_of_graphs
    def __exit__(self, *exception: object) -> None:
        missed = self._find_missed()
        swapped = swap_notes(self._session) if self._session.is_open else []
        self.remove()
        if exception[0] is not None or not (missed or swapped):
            return
        lines = [f"  {one.site.address}: {one.name}: {why}" for one, why in missed.items()]
        head = ["hookline: some edits were never applied:"] if missed else ["hookline:"]
        text = "\n".join([*head, *lines, *(f"  {note}" for note in swapped)])
        warnings.warn(text, HooklineWarning, stacklevel=2)

    @outside_of_graphs
    def remove(self) -> None:
        """Remove the edits at once; a checkpointed region keeps its own until its backward."""
        if self._session.is_open:
            self._missed = self._find_missed()
        super().remove()
        self._tree = None

    def report(self) -> Table:
        """Say how often each edit was applied, and why some never were."""
        missed = self._missed if self._missed is not None else self._find_missed()
        rows = [[one.site.address, one.name, one.count, missed.get(one, "")] for one in self._edits]
        return Table(["site", "edit", "applied", "why not"], rows)

    def _find_missed(self) -> dict[_Applied, str]:
        if self._missed is not None or self._tree is None:
            return self._missed or {}
        ran = {id(station.module) for station in self._session.stations if station.runs}
        found: dict[_Applied, str] = {}
        for one in self._edits:
            if one.count:
                continue
            module = one.site.module
            if not self._session.is_open:
                why = "an error in a hook removed all edits before"
            elif not self._session.calls:
                why = "the model was not called"
            elif one.site.is_grad and (id(module) in ran or one.site.parameter is not None):
                why = "no gradient reached it while the edit was attached"
            elif id(module) in ran and one.site.is_inside and not one.is_met(self._session):
                why = self._why_idle(one)
            elif id(module) in ran or one.site.parameter is not None:
                why = "it ran, but its condition never held"
            else:
                why = why_not_called(self._tree, one.site.path, module, ran).what
            found[one] = why
        return found

    def _why_idle(self, one: _Applied) -> str:
        for listener in self._session.listeners:
            if isinstance(listener, FunctionListener) and listener.function is one:
                return why_idle(listener, listener.most_seen).what
        raise AssertionError("an edit inside a forward has a listener")


class _Applied:
    """One edit at one site: run it, and count."""

    __slots__ = ("_count", "edit", "name", "site", "skip")

    def __init__(self, site: Site, edit: Action | Skip | EditFunction) -> None:
        self.site = site
        self.edit = edit
        self.skip: SkipListener | None = None
        self._count = 0
        self.name = (
            edit.name
            if isinstance(edit, Action)
            else getattr(edit, "__qualname__", None) or repr(edit)
        )

    def is_met(self, session: Session) -> bool:
        """Tell whether the value came by, whatever the condition."""
        return any(
            isinstance(listener, FunctionListener) and listener.function is self and listener.met
            for listener in session.listeners
        )

    def count_one(self) -> None:
        """Count what a compiled graph does by itself."""
        self._count += 1

    def make_traced(
        self, listener: FunctionListener, device: torch.device, visits: VisitEar
    ) -> tuple[Ear, Any]:
        """Make the edit a part of compiled graphs; raise where it takes Python at run time."""
        action = self.edit
        if not isinstance(action, Action):
            raise _refuse(listener, "a function of Python's cannot run")
        if listener.visits is not None or listener.calls is not None:
            raise _refuse(listener, "an edit for some visits or calls cannot be made")
        operands: tuple[Tensor, ...] | None = action.operands
        if action.find is not None:
            try:
                operands = None if action.fix is None else action.fix(self.site.address)
            except HooklineError as error:  # to be heard of where there is a graph, and only there
                raise UnsupportedModel(str(error)) from error
        if operands is None:
            raise _refuse(listener, f"{action.name}, another one for each value, cannot be made")
        return make_traced_edit(
            listener, device, visits=visits, action=action, operands=operands, counter=self
        )

    @property
    def depends_on_place(self) -> bool:
        """Whether the edit asks which assignment or call of an operation it is at."""
        return isinstance(self.edit, Action) and self.edit.depends_on_place

    @property
    def count(self) -> int:
        return self._count if self.skip is None else self.skip.fired

    def __call__(self, value: Any, at: At) -> Any:
        if not isinstance(self.edit, Action):
            assert not isinstance(self.edit, Skip)
            new = self.edit(value, at)
            if new is None:
                raise EditError(
                    f"the edit at `{at.address}` returned None. Return the new value, or hl.KEEP "
                    "to leave it as it is."
                )
            self._count += new is not KEEP
            return new
        self._count += 1
        if isinstance(value, Tensor):
            return self.edit.apply(value, at)
        tensors = list(_trees.leaves(value))
        if len(tensors) != 1:
            owner = escape(at.path)
            places = [f"`{format_place(owner, at.port, (*at.leaf, *p))}`" for p, _ in tensors]
            raise EditError(
                f"{self.edit.name} at `{at.address}` needs one tensor, and there are "
                f"{len(tensors)}: {', '.join(places) or 'none'}. Name one of them."
            )
        path, tensor = tensors[0]
        at.leaf = (*at.leaf, *path)
        return _trees.put(value, path, self.edit.apply(tensor, at))


def _refuse(listener: FunctionListener, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{listener.session.purpose}: {what} at `{listener.address}` inside a graph that "
        'torch.compile made. Ask for the model to be run eagerly: compiled="eager"'
    )


@outside_of_graphs
def edit(
    model: nn.Module,
    edits: Edits,
    *,
    visits: Which = None,
    calls: Which = None,
    prepend: bool = False,
    second_order: bool = False,
    this_thread: bool = False,
    compiled: Compiled = "graph",
) -> EditHandle:
    """Change values and gradients at named sites, until the handle is removed.

    Each address maps to an action (`hl.set`, `add`, `scale`, `zero`, `clip`, `noise`, `mask`,
    `patch`, `swap_rows`, `skip`) or to a function `fn(value, at)` that returns the new value or
    `hl.KEEP`. The edits apply to `model(x)` itself, so trainers and `generate` see them. What an
    edit gives is checked for structure, shape, type and device before it enters the model.

        with hl.edit(model, {"layers.3.mlp": hl.scale(0), "fc1:output.grad": hl.clip(1.0)}):
            model(x)

    `visits` and `calls` limit all edits; `action.where(...)` limits one. At one site, edits run in
    the order they were attached; captures and hooks see the result.

    In a compiled model actions become a part of its graphs. What takes Python at run time (a
    function, `visits`, `calls`, `noise`) needs `compiled="eager"`, which runs the model without
    its graphs as long as the edits are attached.
    """
    if isinstance(edits, (str, Action, Skip)) or not isinstance(edits, Iterable):
        raise TypeError(
            "hl.edit takes a dict of what to do where, hl.edit(model, {'fc1': hl.scale(0)}); "
            f"not {type(edits).__qualname__}."
        )
    pairs = list(edits.items()) if isinstance(edits, Mapping) else [tuple(one) for one in edits]
    check_which("visits", visits)
    check_which("calls", calls)
    if not pairs:
        raise ValueError("there is nothing to edit: give {address: action}")
    purpose = f"hl.edit({', '.join(str(where) for where, _ in pairs)})"
    is_eager = check_compiled(compiled)
    session = Session(model, purpose[:80], this_thread=this_thread, is_eager=is_eager)
    assert session.tree is not None
    applied: list[_Applied] = []
    skips: list[SkipListener] = []
    for where, action in pairs:
        for site in leave_out_lazy(resolve(session.tree, where)):
            one = _Applied(site, action)
            applied.append(one)
            if isinstance(action, Skip):
                limited = Skip(
                    action.value,
                    visits if action.visits is None else action.visits,
                    calls if action.calls is None else action.calls,
                )
                listener = one.skip = SkipListener(session, site, limited)
                session.listen(listener, prepend=prepend)
                skips.append(listener)
                continue
            if getattr(action, "__module__", "") == Action.__module__ and inspect.isfunction(
                action
            ):
                raise TypeError(f"`{site.address}`: write hl.{action.__name__}(...), with brackets")
            if not callable(action) and not isinstance(action, Action):
                raise TypeError(
                    f"`{site.address}`: an edit is an action such as hl.scale(0), or a function "
                    f"of (value, at); not {type(action).__qualname__}. For a value there is hl.set."
                )
            own = action if isinstance(action, Action) else None
            attach_function(
                session,
                [site],
                one,
                stage=1,
                prepend=prepend,
                visits=own.visits if own and own.visits is not None else visits,
                calls=own.calls if own and own.calls is not None else calls,
                second_order=second_order,
            )
    session.open()
    for listener in skips:
        session.when_detached(listener.attach())
    return EditHandle(session, applied)
