"""Go up and down from the module that a comparison blames, until one is found that differs itself.

Traces show values at the borders of modules; what cannot be seen there (an index of another shape,
state, other cuts of the same work) may lead to the wrong one. Run on the same input, modules say
it themselves: one that agrees only inherits, so the module that called it is asked; one that
differs is descended into, and a child that differs itself takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from hookline.addresses.pattern import escape
from hookline.comparisons.calling import StepCall
from hookline.comparisons.catching import NotCaught, find_module
from hookline.comparisons.descending import Descent, descend
from hookline.comparisons.grafting import Graft, NotMeasured, copying_inputs, make_graft
from hookline.diffs.difference import Difference
from hookline.diffs.tolerances import TELLING_GAIN
from hookline.replays.staging import CannotReplay

BACKWARD = ("backward", "parameter gradient")
_DEEPEST = 32
"""How far down or up is gone."""

Paths = tuple[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two models and the step that each of them made."""

    models: tuple[nn.Module, nn.Module]
    """A and B."""

    calls: tuple[StepCall, StepCall]
    """What each was called with."""


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """What the modules themselves say."""

    paths: Paths
    """The module to blame, in A and in B."""

    graft: Graft | None = None
    """What it gave on the same input; None where it could not be asked."""

    is_itself: bool = False
    """Whether it differs itself."""

    written_for: str | None = None
    """The module that differs no more once the blamed one cannot write into its input."""

    is_state: bool = False
    """Whether it differs in the step alone, by what it keeps or reads besides its arguments."""

    descent: Descent | None = None
    """The operation where it does."""

    excused: str | None = None
    """A module of A that gives the same on the same input, whatever differs inside of it."""

    reason: str = ""
    """Why it could not be asked."""


class Locator:
    """Ask the modules around one difference."""

    def __init__(self, difference: Difference, pair: Pair) -> None:
        assert difference.traces is not None
        self._difference = difference
        self._pair = pair
        self._is_backward = difference.direction in BACKWARD
        self._callers = {
            site.module: site.caller for site in difference.traces[0].sites if site.kind == "value"
        }
        self._known_b = difference.traces[1].facts.modules
        self._fine = {
            pair.site
            for pair in difference.pairs
            if pair.kind == "parameter gradient" and pair.verdict in ("agrees", "noise")
        }
        """The gradients of parameters that are the same in both steps."""
        self._made: dict[Paths, Graft | str] = {}
        self._unmeasured: set[Paths] = set()
        """Modules that ran, but whose outputs cannot be compared."""

    def locate(self) -> Located:
        """Find the module that differs itself, beginning at the one that is blamed."""
        difference = self._difference
        first = (difference.first or "", difference.first_b or "")
        if difference.written:
            return self._ask_writers(first)
        for paths in [*self._list_candidates(), first]:
            graft = self._graft(paths, difference.visit)
            if isinstance(graft, Graft) and self.is_itself(graft):
                return self._go_down(paths, graft)
        graft = self._graft(first, difference.visit)
        if isinstance(graft, Graft) and self._is_state(first[0], graft):
            return Located(first, graft, is_state=True)
        if difference.direction == "forward" or self._can_excuse_gradients():
            return self._go_up(first, graft)
        if isinstance(graft, str):
            return Located(first, reason=graft)
        return Located(first, graft)

    def is_itself(self, graft: Graft) -> bool:
        """Tell whether two modules differ on an input that is bit for bit the same.

        What came in agreed to rounding before and is equal now, so nothing is amplified.
        """
        at = self._difference.introduced
        limit = self._difference.limit
        if at is not None and math.isfinite(at):
            limit = min(limit, at / 4)
        return self.measure(graft) > limit

    def _is_state(self, path: str, graft: Graft) -> bool:
        """Tell whether a module that agrees by itself has given something else in the step.

        It was given the same there, in all that it can be given, so nobody above made it.
        """
        difference = self._difference
        at = next(one for one in difference.pairs if one.verdict == "introduces")
        if difference.direction != "forward" or (at.module, at.port) != (path, "output"):
            return False
        return graft.call.visit == at.visit and graft.given * TELLING_GAIN <= (at.r or 0.0)

    def measure(self, graft: Graft) -> float:
        """Give the error that counts; not of parameters whose gradients agreed, or are noise."""
        start = f"{graft.call.path}." if graft.call.path else ""
        fine = {name for name in graft.parameters if f"{escape(start + name)}:grad" in self._fine}
        return graft.error(self._difference.direction, without=fine)

    def _ask_writers(self, first: Paths) -> Located:
        """Ask whether the code around a module that writes into its input differs without that."""
        difference = self._difference
        at = next(one for one in difference.pairs if one.verdict == "introduces")
        scope = at.module if at.port == "output" else self._callers.get(at.module) or ""
        around = (scope, self._partner(scope) or "")
        plain = self._graft(around, difference.visit)
        if isinstance(plain, str):
            return Located(first, reason=plain)
        if not self.is_itself(plain):
            return self._go_up(around, plain)
        for path in difference.candidates:
            if path == scope:
                continue
            paths = (path, self._partner(path) or path)
            try:
                models = zip(self._pair.models, paths, strict=True)
                writers = [find_module(model, one) for model, one in models]
            except NotCaught:
                continue
            with copying_inputs(writers):
                copied = self._try_graft(around, difference.visit)
            if isinstance(copied, Graft) and not self.is_itself(copied):
                return Located(paths, plain, is_itself=True, written_for=scope)
        return self._go_down(around, plain)

    def _list_candidates(self) -> list[Paths]:
        """List who may be to blame where that is not certain, innermost first."""
        candidates = self._difference.candidates
        if not self._is_backward or len(candidates) < 2:
            return []
        named = [(path, self._partner(path)) for path in candidates]
        known = [(a, b) for a, b in named if b is not None]
        return sorted(known, key=lambda paths: -paths[0].count("."))

    def _partner(self, path: str) -> str | None:
        """Give the module of B that is aligned with one of A."""
        found = self._difference.names.get(path)
        return path if found is None and path in self._known_b else found

    def _graft(self, paths: Paths, visit: int = 0) -> Graft | str:
        """Run both modules on A's input, or say why not."""
        if paths not in self._made:
            self._made[paths] = self._try_graft(paths, visit)
        return self._made[paths]

    def _try_graft(self, paths: Paths, visit: int) -> Graft | str:
        pair = self._pair
        try:
            return make_graft(
                pair.models, paths, pair.calls, visit=visit, backward=self._is_backward
            )
        except NotMeasured as error:
            self._unmeasured.add(paths)
            return str(error)
        except NotCaught as error:
            # The visit is that of the site, whose module may run more often than the blamed one.
            return self._try_graft(paths, 0) if visit else str(error)
        except CannotReplay as error:
            return str(error)
        except Exception as error:  # a module that does not run on another one's input
            return f"{type(error).__name__}: {error}"

    def _go_down(self, paths: Paths, graft: Graft) -> Located:
        """Descend into a module that differs itself, and into the child that does."""
        found: Descent | None = None
        for _ in range(_DEEPEST):
            found = self._descend(graft)
            if found is None or found.children is None:
                break
            below = found.children
            inner = self._graft(below, found.number)
            if isinstance(inner, str) or not self.is_itself(inner):
                break
            paths, graft = below, inner
        return Located(paths, graft, is_itself=True, descent=found)

    def _descend(self, graft: Graft) -> Descent | None:
        error = self.measure(graft)
        limit = self._difference.limit
        try:
            return descend(
                graft,
                backward=self._is_backward,
                limit=limit,
                error=error,
                names=self._difference.names,
            )
        except Exception:  # the graft has run; a mode inside may be what a forward does not bear
            return None

    def _go_up(self, first: Paths, graft: Graft | str) -> Located:
        """Ask those who called a module that agrees, or that cannot be asked."""
        if first in self._unmeasured and isinstance(graft, str):
            return Located(first, reason=graft)  # what the traces say of its outputs stands
        agrees = None if isinstance(graft, str) or not self._is_inside(first[0]) else first[0]
        for paths in self._list_callers(first[0]):
            above = self._graft(paths)
            if isinstance(above, str):
                continue
            if not self.is_itself(above):
                agrees = paths[0] if agrees is None else agrees
            elif isinstance(graft, str):
                break  # it may be the blamed module as well as another one
            else:
                return self._go_down(paths, above)
        else:
            if agrees is not None:
                return Located(first, excused=agrees)
        if isinstance(graft, str):
            return Located(first, reason=graft)
        return Located(first, graft)

    def _can_excuse_gradients(self) -> bool:
        """Tell whether a gradient inside may differ: what came of them for parameters agrees."""
        return self._difference.direction == "backward" and not any(
            pair.kind in ("parameter gradient", "update") for pair in self._difference.differing
        )

    def _is_inside(self, path: str) -> bool:
        """Tell whether the value that differs is inside of a module, not what it gives."""
        pair = next(one for one in self._difference.pairs if one.verdict == "introduces")
        return pair.module != path

    def _list_callers(self, path: str) -> Iterator[Paths]:
        """List who called a module, from the inside out."""
        seen = {path}
        caller = self._callers.get(path)
        while caller is not None and caller not in seen and len(seen) < _DEEPEST:
            seen.add(caller)
            partner = self._partner(caller)
            if partner is not None:
                yield caller, partner
            caller = self._callers.get(caller)
