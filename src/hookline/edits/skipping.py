"""Not running a module: its forward is answered with a given value."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import nn

from hookline._errors import AddressError, UnsupportedModel
from hookline.addresses import Site
from hookline.hooks import observing
from hookline.hooks.ears import VisitEar
from hookline.hooks.functions import Which, is_among
from hookline.hooks.junctions import Junction
from hookline.hooks.sessions import Session
from hookline.hooks.visits import At, Listener, Visit


class Skip:
    """A declared skip: what a module returns instead of running."""

    __slots__ = ("calls", "value", "visits")

    def __init__(self, value: Any, visits: Which = None, calls: Which = None) -> None:
        self.value = value
        self.visits = visits
        self.calls = calls

    def where(self, *, visits: Which = None, calls: Which = None) -> Skip:
        """Give the same skip for some visits or calls only; what is not given stays as it was."""
        return Skip(
            self.value,
            self.visits if visits is None else visits,
            self.calls if calls is None else calls,
        )

    def __repr__(self) -> str:
        return "skip(...)"


def skip(value: Any) -> Skip:
    """Do not run this module; use `value` as its output.

    A function is called as `value(at)`, with the arguments in `at.inputs`:

        hl.edit(model, {"layers.3": hl.skip(lambda at: at.inputs["x"])})
    """
    return Skip(value)


class SkipListener(Listener):
    """Decide before each execution whether it is skipped."""

    __slots__ = ("decided", "skip")

    def __init__(self, session: Session, site: Site, how: Skip) -> None:
        if site.port == "parameter":
            raise AddressError(f"hl.skip replaces a module; `{site.address}` is a parameter")
        if site.port != "output" or site.leaf or site.is_grad:
            raise AddressError(
                f"hl.skip replaces a whole module, so `{site.address}` is too much: "
                f"write `{site.path}`"
            )
        station = session.station(site.names, site.module)
        super().__init__(session, station, "input", values=True, gradients=False, stage=1)
        self.skip = how
        self.decided: dict[int, Visit] = {}
        self.fired = 0

    def make_ear(self, device: torch.device, visits: VisitEar | None) -> NoReturn:
        raise UnsupportedModel(
            f"{self.session.purpose}: hl.skip at `{self.station.path}` cannot be made inside a "
            "graph that torch.compile made, which would have to be another one. Ask for the model "
            'to be run eagerly: compiled="eager"'
        )

    def attach(self) -> Callable[[], None]:
        """Answer in the place of the module from now on; give what ends that."""
        junction = Junction.find(self.station.module)
        assert junction is not None
        return junction.add_skip(self)

    def take(self, module: nn.Module) -> Callable[..., Any] | None:
        """Give what answers this execution; None to let the module run."""
        visit = self.decided.pop(get_ident(), None)
        if visit is None:
            return None
        return lambda *args, **kwargs: self.answer(visit, module, args, kwargs)

    def on_input(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.decided.pop(get_ident(), None)
        wanted = is_among(visit.index, self.skip.visits)
        if wanted and is_among(visit.call.index, self.skip.calls):
            self.decided[get_ident()] = visit
        return args, kwargs

    def answer(
        self, visit: Visit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Give the value that stands for the module's output."""
        self.fired += 1
        self.session.note_edit(visit)
        value = self.skip.value
        if isinstance(value, nn.Module) or not callable(value):
            return value
        at = At(visit, module, "output", arguments=(args, kwargs))
        result = observing.run(self.session, visit, at.address, value, at)
        at.forget()
        return result
