"""Which sites of which models a watch listens at, and the sessions that do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn
from torch.jit import ScriptModule

from hookline._errors import NoSuchSite, UnsupportedModel
from hookline._tracing import regions
from hookline.addresses import Selector, Site, resolve
from hookline.addresses.variables import has_forward
from hookline.hooks.functions import check_leaf
from hookline.hooks.refusals import hint_for, leave_out_lazy
from hookline.hooks.sessions import Session
from hookline.watchers.listening import CallListener, ReturnListener, WatchListener
from hookline.watchers.options import Options
from hookline.watchers.recording import Recorder

_MOST_NAMED = 10

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


def name_models(models: Models) -> dict[str, nn.Module]:
    """Give each model a prefix: none for a single one, its name or its number for several."""
    if isinstance(models, Mapping):
        return {f"{name}." if name else "": model for name, model in models.items()}
    if isinstance(models, nn.Module):
        return {"": models}
    if isinstance(models, Sequence) and models:
        if len(models) == 1:
            return {"": models[0]}
        return {f"{number}.": model for number, model in enumerate(models)}
    raise TypeError(
        f"hl.watch takes a model, a list of models or a dict of them by name, "
        f"not {type(models).__qualname__}. {hint_for(models)}"
    )


class CallHearer(Protocol):
    """Whoever wants to know of calls of the models."""

    def on_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], prefix: str
    ) -> None:
        """Learn that a call of a model with grad begins."""

    def on_unseen_call(self, module: nn.Module) -> None:
        """Learn that a call with grad begins inside a compiled graph."""

    def on_return(self, module: nn.Module, output: Any) -> None:
        """Learn what a call gave."""


class Attachment:
    """The listeners of one watch, put on the models and taken off as steps ask for it."""

    _needs_visits = False
    """Whether its listeners ask which execution a value is of."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        options: Options,
        recorder: Recorder,
    ) -> None:
        self._options = options
        self._recorder = recorder
        self._sessions: list[Session] = []
        self._clocks: list[Session] = []
        self._hearer: CallHearer | None = None
        self.listeners: list[WatchListener] = []
        self.is_attached = False
        self.left_out: dict[str, str] = {}
        """Models that came later and are not listened at, with the reason."""
        self._moved: list[str] | None = None
        for prefix, model in models.items():
            self._add(prefix, model)

    def _add(self, prefix: str, model: nn.Module) -> None:
        """Prepare what listens at a model; raise where that cannot be."""
        options = self._options
        try:
            clock = Session(model, "the clock of hl.watch")
        except UnsupportedModel as error:
            if options.sites is None:
                return  # parameters need no hooks, and optimizers tell of steps
            raise UnsupportedModel(
                f"{error} Or watch its parameters and updates alone: hl.watch(..., sites=None)."
            ) from None
        clock.follows_recompute = False
        clock.is_reusable = clock.is_lasting = True
        clock.needs_visits = False
        if options.sites is not None:
            session = Session(model, "hl.watch")
            session.is_reusable = session.is_lasting = True
            session.needs_visits = self._needs_visits
            session.follows_recompute = options.gradients
            self.listeners += self._listen(session, options.sites, prefix)
            self._sessions.append(session)
            if self.is_attached:
                session.open()
        self._clocks.append(clock)
        self._prepare_clock(clock, prefix)
        if self._hearer is not None:
            clock.open()

    def _listen(self, session: Session, sites: Selector, prefix: str) -> Iterable[WatchListener]:
        """Put a listener at each site that is asked for."""
        assert session.tree is not None
        options = self._options
        listeners: dict[object, WatchListener] = {}
        for site in _choose(session, sites, gradients=options.gradients):
            if isinstance(site.module, ScriptModule):
                self.left_out[prefix + site.names[0]] = "it is TorchScript, which runs no hooks"
                continue
            key = (id(site.module), site.port, site.leaf)
            listener = listeners.get(key)
            if listener is None:
                station = session.station(site.names, site.module, is_inside=site.port[0] == "@")
                listener = listeners[key] = WatchListener(
                    session,
                    station,
                    site,
                    self._recorder,
                    prefix=prefix,
                    with_inference=options.with_inference,
                )
                session.listen(listener)
            if site.is_grad:
                listener.gradients = True
            else:
                listener.values = True
        if len(options.strides) > 1:
            _set_strides(session, listeners.values(), options.strides)
        return listeners.values()

    def _prepare_clock(self, clock: Session, prefix: str) -> None:
        root = clock.stations[0]
        recorder = self._recorder
        clock.listen(
            CallListener(
                clock,
                root,
                recorder,
                prefix=prefix,
                tell=self._tell_call,
                tell_unseen=self._tell_unseen_call,
            )
        )
        clock.listen(ReturnListener(clock, root, recorder, tell=self._tell_return))

    def _tell_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], prefix: str
    ) -> None:
        if self._hearer is not None:
            self._hearer.on_call(module, args, kwargs, prefix)

    def _tell_unseen_call(self, module: nn.Module) -> None:
        if self._hearer is not None:
            self._hearer.on_unseen_call(module)

    def _tell_return(self, module: nn.Module, output: Any) -> None:
        if self._hearer is not None:
            self._hearer.on_return(module, output)

    @property
    def hears_calls(self) -> bool:
        """Whether calls of any model can be heard: of one that is compiled they cannot."""
        return bool(self._clocks)

    def add_later(self, prefix: str, model: nn.Module) -> None:
        """Listen at a model that has come since; one that cannot be listened at is noted."""
        try:
            self._add(prefix, model)
        except (UnsupportedModel, NoSuchSite) as error:
            self.left_out[prefix.rstrip(".") or type(model).__name__] = str(error)

    def start(self, hearer: CallHearer) -> None:
        """Notice calls of the models from now on."""
        self._hearer = hearer
        for clock in self._clocks:
            clock.open()

    def attach(self) -> None:
        """Listen at every site."""
        if not self.is_attached:
            self.is_attached = True
            for session in self._sessions:
                session.open()

    def detach(self) -> None:
        """Listen at none, at no cost, until attached again."""
        if self.is_attached:
            self.is_attached = False
            self._recorder.queue.close()
            for session in self._sessions:
                session.close()

    def stop(self) -> None:
        """Take everything away for good; does nothing the second time."""
        self.detach()
        if self._moved is None:
            self._moved = self._find_moved()
        for session in self._sessions:
            session.dispose()
        for clock in self._clocks:
            clock.close()
            clock.dispose()

    def set_aside(self) -> None:
        """Take all hooks off for a moment; does nothing before the start and after the end."""
        if self._hearer is not None and self._moved is None:
            self._recorder.queue.close()
            for session in [*(self._sessions if self.is_attached else ()), *self._clocks]:
                session.close()

    def put_back(self) -> None:
        """Put them on again."""
        if self._hearer is not None and self._moved is None:
            for session in [*(self._sessions if self.is_attached else ()), *self._clocks]:
                if not session.is_open:
                    session.open()

    def unheard(self) -> list[str]:
        """Name the sites where nothing has been measured, and those that are not there any more."""
        never = [one for one in self.listeners if not one.has_measured]
        notes = [f"`{name}` is not listened at: {why}" for name, why in self.left_out.items()]
        for region, hidden in self._hidden().items():
            notes.append(f"a compiled graph shows nothing of what is inside {region}: {hidden}")
        others = [one.address for one in never if one.station.module not in regions]
        if others and len(never) < len(self.listeners):
            notes.append(f"never ran while it was watched: {_list(others)}")
        moved = self._find_moved()
        if moved:
            notes.append(f"another module is there now, which is not watched: {_list(moved)}")
        return notes

    def _hidden(self) -> dict[str, str]:
        """Name the sites of which a compiled graph shows nothing, by what they are inside of."""
        found: dict[str, list[str]] = {}
        for one in self.listeners:
            region = regions.get(one.station.module)
            if region is not None and not one.has_measured:
                found.setdefault(region, []).append(one.address)
        return {region: _list(addresses) for region, addresses in found.items()}

    def explain_silence(self) -> str:
        """Say why no value has been measured at any site; empty where some has."""
        if not self.listeners or any(one.has_measured for one in self.listeners):
            return ""
        if self._hidden():
            return ""  # which is noted
        heard = "call" if self._options.with_inference else "call with grad"
        why = f"nothing was measured at any site: no {heard} was heard of in a watched step"
        if not self._options.with_inference:
            why += " (calls without grad are measured with `with_inference=True` alone)"
        return why

    def _find_moved(self) -> list[str]:
        """List the paths where another module is now; after the end, those at the end."""
        if self._moved is None:
            return [path for session in self._sessions for path in session.trails.moved()]
        return self._moved

    def begin_step(self, step: int) -> None:
        """Let those listen whose turn it is in the step that begins."""
        for one in self.listeners:
            one.end_step()
            one.is_due = step % one.every == 0

    def end_step(self, step: int) -> None:
        """Learn that a step that was watched ends."""


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{one}`" for one in names[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return shown + more


def _set_strides(
    session: Session, listeners: Iterable[WatchListener], strides: Mapping[str, int]
) -> None:
    """Give each listener its stride: that of the last pattern that names its module."""
    assert session.tree is not None
    for pattern, stride in strides.items():
        named = {id(site.module) for site in resolve(session.tree, pattern, default_port="output")}
        for listener in listeners:
            if id(listener.station.module) in named:
                listener.every = stride


def _choose(session: Session, sites: Selector, *, gradients: bool) -> list[Site]:
    """Turn a selector into sites, each value with its gradient; parameters have their own way."""
    assert session.tree is not None
    found: dict[object, Site] = {}
    for site in leave_out_lazy(resolve(session.tree, sites, default_port="output")):
        check_leaf(site)
        if site.port == "parameter" or not has_forward(site.module):
            continue
        found.setdefault(site.key, site)
        if gradients and not site.is_grad and site.port != "input":
            grad = site._replace(is_grad=True)
            found.setdefault(grad.key, grad)
    return list(found.values())
