"""`hl.capture`: keep the values and gradients of named sites while a block runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn

from hookline._errors import SessionError
from hookline.addresses import ModuleTree, Selector, Site, resolve
from hookline.addresses.pattern import escape
from hookline.captures.captured import Captured
from hookline.captures.keeping import Clone, Keeper, Reduce
from hookline.captures.listening import (
    AsideListener,
    CaptureListener,
    CaptureSession,
    ParameterCapture,
    StopForward,
)
from hookline.captures.reporting import make_report
from hookline.captures.shortage import is_out_of_memory, remark_on_shortage
from hookline.hooks.eagerly import Compiled, check_compiled
from hookline.hooks.functions import Which, check_leaf, check_which
from hookline.hooks.refusals import attachable, leave_out_lazy
from hookline.hooks.uncompiled import around_graphs, outside_of_graphs

P = ParamSpec("P")
R = TypeVar("R")
Grads = bool | Literal["all"]


@outside_of_graphs
def capture(
    model: nn.Module,
    *where: Selector,
    inputs: bool | None = None,
    outputs: bool = True,
    grads: Grads = False,
    params: bool = False,
    visits: Which = None,
    calls: Which = None,
    last: bool = False,
    keep_graph: bool = False,
    clone: Clone = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    select: Any = None,
    reduce: Reduce = None,
    max_bytes: int | None = None,
    full: bool = False,
    stop: bool = False,
    before_edits: bool = False,
    this_thread: bool = False,
    compiled: Compiled = "graph",
) -> Capture:
    """Keep the values of named sites while a `with` block runs.

        with hl.capture(model, "layers.*", grads=True) as got:
            model(x).sum().backward()
        got["layers.3"].output.grad

    Args:
        model: any `nn.Module`.
        where: addresses, patterns, classes, predicates or modules; none means every module.
        inputs: keep the arguments of the modules named without a port, by argument name. By default
            those of modules named one by one are kept aside, for `got["fc1"].inputs`.
        outputs: keep what they return.
        grads: keep the gradient of each captured output, and of each input named as `:input`;
            `"all"` also of what `inputs=True` adds. Gradients appear once backward has run.
        params: keep the modules' own parameters as a call begins (and their gradients).
        visits: which executions within one call to keep: a number, several, or all.
        calls: which calls of the model to keep.
        last: keep only the last visit of each site.
        keep_graph: keep tensors with their graph instead of detached.
        clone: copy each tensor; `"auto"` copies where something may overwrite it. A value that was
            overwritten all the same raises when it is read.
        device: move what is kept there. From a GPU to `"cpu"` it travels beside the model's own
            work; who reads a value waits for it.
        dtype: keep it as this type.
        select: an index (`(slice(None), -1)`) or a function of a tensor; the rest is not held.
        reduce: a function of a tensor, or `mean`, `std`, `norm`, `absmax`, `min`, `max`, `sum`.
        max_bytes: raise `hl.OutOfBudget` before more than this is held. Where memory itself runs
            out, `hl.OutOfMemory` is raised and what was captured is let go.
        full: keep a value that is spread over ranks (a DTensor) whole, on every rank, in place of
            this rank's part. All ranks have to capture the same.
        stop: end the forward, and the block, once every site was captured.
        before_edits: see values as they are before edits at the same site.
        this_thread: ignore what runs in other threads.
        compiled: `"graph"` captures inside the graphs of a compiled model, `"eager"` runs it
            without them meanwhile.
    """
    return Capture(
        model,
        where,
        {
            "keep_graph": keep_graph,
            "clone": clone,
            "device": device,
            "dtype": dtype,
            "select": select,
            "reduce": reduce,
            "max_bytes": max_bytes,
            "full": full,
        },
        inputs=inputs,
        outputs=outputs,
        grads=grads,
        params=params,
        visits=visits,
        calls=calls,
        last=last,
        stop=stop,
        before_edits=before_edits,
        this_thread=this_thread,
        is_eager=check_compiled(compiled),
    )


class Capture:
    """A capture that is ready to begin: enter it with `with`, again and again if you like.

    Each `with` makes new results. As a decorator it captures every call of the function; the
    results of the latest are in the function's `captured` attribute.
    """

    def __init__(
        self,
        model: nn.Module,
        where: tuple[Selector, ...],
        options: dict[str, Any],
        *,
        inputs: bool | None,
        outputs: bool,
        grads: Grads,
        params: bool,
        visits: Which,
        calls: Which,
        last: bool,
        stop: bool,
        before_edits: bool,
        this_thread: bool,
        is_eager: bool,
    ) -> None:
        self._model = model
        self._keeper = Keeper(**options)
        self._visits = check_which("visits", visits)
        self._calls = check_which("calls", calls)
        self._keeps_aside = inputs is None and outputs
        self._left_out: list[Site] = []
        self._grads = grads
        self._last = last
        self._stop = stop
        self._stage = 0 if before_edits else 2
        self._this_thread = this_thread
        self._is_eager = is_eager
        if stop and grads:
            raise ValueError(
                "stop=True ends the forward early, so there is no loss to take gradients of; "
                "drop stop or grads."
            )
        if grads not in (True, False, "all"):
            raise ValueError(f"grads={grads!r} must be True, False or 'all'")
        self._choose = functools.partial(
            _choose_sites,
            where=where,
            left_out=self._left_out,
            inputs=bool(inputs),
            outputs=outputs,
            grads=grads,
            params=params,
        )
        self._tree: ModuleTree = attachable(model)
        self._sites: list[Site] = self._choose(self._tree)
        self._copies = self._keeper.copies(self._tree.facts.has_inplace)
        self._session: CaptureSession | None = None
        self._captured: Captured | None = None

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None:
            session.dispose()

    @outside_of_graphs
    def __enter__(self) -> Captured:
        if self._captured is not None:
            raise SessionError(
                "this capture is open already: one `with` at a time. "
                "Make a second one with hl.capture(...)."
            )
        self._refresh()
        if self._session is None:
            self._session = self._make_session()
        session = self._session
        captured = Captured(is_last=self._last)
        captured.index.names = self._names
        session.reset(captured)
        if self._stop:
            session.awaited = self._awaited(session)
        session.open()
        self._captured = captured
        return captured

    def _refresh(self) -> None:
        """Look at the model again when the capture is entered again and modules were exchanged."""
        if self._session is not None and not self._session.trails.are_current():
            self._tree = attachable(self._model)
            self._sites = self._choose(self._tree)
            self._copies = self._keeper.copies(self._tree.facts.has_inplace)
            self._session.dispose()
            self._session = None

    @outside_of_graphs
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        session, captured = self._session, self._captured
        assert session is not None
        assert captured is not None
        self._captured = None
        stopped = isinstance(error, StopForward) and error.owner is session
        if error is not None and is_out_of_memory(error):
            remark_on_shortage(error, captured.nbytes, to_host=session.keeper.is_for_host)
        report = None
        try:
            if error is None or stopped:
                report = make_report(session)
        finally:
            session.close()
            captured.index.is_open = False
            captured.index.report = report
        if report is not None:
            report.warn(stacklevel=2)
        return stopped

    def __getitem__(self, address: object) -> NoReturn:
        raise SessionError(
            "a capture holds nothing itself; read what `with` gives: "
            f"with hl.capture(...) as got: model(x); then got[{address!r}]."
        )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Capture every call of a function."""

        @around_graphs
        @functools.wraps(function)
        def captured(*args: P.args, **kwargs: P.kwargs) -> R:
            result: Any = None  # what stop=True leaves
            with self as got:
                captured.captured = got  # type: ignore[attr-defined]
                result = function(*args, **kwargs)
            return result  # type: ignore[no-any-return]

        return captured

    def _make_session(self) -> CaptureSession:
        session = CaptureSession(
            self._tree, "hl.capture", this_thread=self._this_thread, is_eager=self._is_eager
        )
        session.is_reusable = True
        session.keeper = self._keeper
        session.visits = self._visits
        session.which_calls = self._calls
        session.copies = self._copies
        everything = self._visits is None and self._calls is None
        session.is_plain = (
            session.keeper.is_plain and everything and not self._last and not self._stop
        )
        listeners: dict[Any, CaptureListener] = {}
        self._names = {name: site.path for site in self._sites for name in site.names}
        for site in self._sites:
            if site.port == "parameter":
                session.follow_parameter(ParameterCapture(session, site, stage=self._stage))
                continue
            key = (id(site.module), site.port, site.leaf)
            listener = listeners.get(key)
            if listener is None:
                station = session.station(site.names, site.module, is_inside=site.port[0] == "@")
                listener = CaptureListener(session, station, site, stage=self._stage)
                listeners[key] = listener
                session.listen(listener)
            if site.is_grad:
                listener.gradients = True
            else:
                listener.values = True
            is_whole_output = site.port == "output" and not site.leaf and not site.is_grad
            if self._keeps_aside and session.is_plain and site.is_exact and is_whole_output:
                session.listen(AsideListener(session, listener))
        session.grads = self._grads
        session.hears_leaving = self._stop
        session.follows_recompute = any(one.gradients for one in listeners.values())
        session.left_out = self._left_out
        return session

    def _awaited(self, session: CaptureSession) -> dict[CaptureListener, set[int]]:
        """List what has to flow by before the forward may stop."""
        wanted = {self._visits} if isinstance(self._visits, int) else self._visits
        return {
            one: set(wanted) if isinstance(wanted, (set, list, tuple, range)) else {0}
            for one in session.listeners
            if isinstance(one, CaptureListener) and one.values
        }


def _choose_sites(
    tree: ModuleTree,
    *,
    where: tuple[Selector, ...],
    left_out: list[Site],
    inputs: bool,
    outputs: bool,
    grads: Grads,
    params: bool,
) -> list[Site]:
    """Turn what was asked for into sites, each value and each gradient once.

    `left_out` receives what a pattern met and cannot be captured.
    """
    left_out.clear()
    if not (inputs or outputs or grads or params):
        raise ValueError("nothing to capture: inputs, outputs, grads and params are all False")
    selectors = list(where) or ["**"]
    found: dict[Any, Site] = {}

    def add(site: Site) -> None:
        check_leaf(site)
        if site.key not in found or site.is_exact:
            found[site.key] = site

    for selector in selectors:
        sites = leave_out_lazy(resolve(tree, selector, default_port="output"), left_out)
        named: set[Any] = set()
        if inputs or not outputs or any(site.port == "input" for site in sites):
            # Sites with a port of their own are the same whatever the default is.
            at_input = leave_out_lazy(resolve(tree, selector, default_port="input"))
            named = {site.key for site in sites} & {site.key for site in at_input}
            sites = [*at_input, *sites]
        for site in sites:
            is_default = site.key not in named
            if not is_default or (inputs if site.port == "input" else outputs):
                add(site)
            wants_grad = grads and (
                site.port != "input" or (grads == "all" and inputs) or not is_default
            )
            if wants_grad and not site.is_grad:
                add(_gradient_of(site))
            if params and site.port != "parameter":
                for parameter in tree.parameters:
                    if any(owner is site.module for owner, _ in parameter.places):
                        own = resolve(tree, escape(parameter.names[0]))[0]
                        add(own)
                        if grads:
                            add(_gradient_of(own))
    return list(found.values())


def _gradient_of(site: Site) -> Site:
    return Site(site.names, site.module, site.port, site.leaf, True, site.parameter, site.is_exact)
