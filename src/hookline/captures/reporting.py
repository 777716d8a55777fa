"""The truth after a capture: every site that was asked for, and what became of it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import nn

from hookline._errors import HooklineWarning
from hookline._tables import Table
from hookline.addresses import ModuleTree
from hookline.captures.listening import CaptureListener, CaptureSession, ParameterCapture
from hookline.captures.records import NO_GRADIENT
from hookline.hooks.reasons import fast_path_note, is_container, why_not_called

_MOST_LINES = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one site."""

    address: str
    """The site."""

    status: str
    """`captured`, `never called`, `bypassed`, `no gradient` or `no such leaf`."""

    reason: str = ""
    """Why it was not captured."""

    fix: str = ""
    """What to do about it."""

    is_expected: bool = False
    """Whether only a pattern named it and nothing else was to be expected."""


class Report:
    """List the outcome of every site of a capture."""

    def __init__(self, outcomes: list[Outcome], notes: list[str]) -> None:
        self.outcomes = outcomes
        self.notes = notes

    @property
    def problems(self) -> list[Outcome]:
        """List the sites that were not captured as asked."""
        return [one for one in self.outcomes if one.status != "captured"]

    def why(self, path: str) -> str:
        """Say why there is no value of a module."""
        for one in self.problems:
            if one.address.rpartition(":")[0] == path:
                return f"{one.reason[:1].upper()}{one.reason[1:]}: {one.fix}."
        return ""

    def table(self) -> Table:
        """Show the report, what is missing first."""
        captured = len(self.outcomes) - len(self.problems)
        return Table(
            ["site", "status", "reason", "what to do"],
            [[one.address, one.status, one.reason, one.fix] for one in self.problems],
            title=f"{captured} of {len(self.outcomes)} sites captured",
            notes=self.notes,
        )

    def warn(self, stacklevel: int) -> None:
        """Warn of what a user would not expect; containers that a pattern met are no surprise."""
        lines = [
            f"  {one.address}: {one.status}: {one.reason}; {one.fix}"
            for one in self.problems
            if not one.is_expected
        ]
        if not lines and not self.notes:
            return
        more = len(lines) - _MOST_LINES
        if more > 0:
            lines = [*lines[:_MOST_LINES], f"  and {more} more: see got.report()"]
        head = ["hookline: not everything was captured as asked:"] if lines else ["hookline:"]
        text = "\n".join([*head, *lines, *(f"  {note}" for note in self.notes)])
        warnings.warn(text, HooklineWarning, stacklevel=stacklevel + 1)

    def __str__(self) -> str:
        return str(self.table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def make_report(session: CaptureSession) -> Report:
    """Look at what every listener of a session received; before the session is closed."""
    tree = session.tree
    assert tree is not None
    hooked = {id(station.module) for station in session.stations}
    ran = {id(station.module) for station in session.stations if station.runs}
    outcomes: list[Outcome] = []
    for listener in session.listeners:
        if isinstance(listener, CaptureListener):
            outcomes.extend(_module_outcomes(session, tree, listener, ran, hooked))
    outcomes.extend(
        _parameter_outcome(session, parameter)
        for parameter in session.parameters
        if isinstance(parameter, ParameterCapture)
    )
    notes = fast_path_note(tree, [station.module for station in session.stations])
    if session.other_thread_calls:
        notes.append(
            f"{session.other_thread_calls} executions in other threads were left out "
            "(this_thread=True)."
        )
    return Report(outcomes, notes)


def _module_outcomes(
    session: CaptureSession,
    tree: ModuleTree,
    listener: CaptureListener,
    ran: set[int],
    hooked: set[int],
) -> list[Outcome]:
    station = listener.station
    found = []
    if not station.runs:
        status, what, fix = (
            "never called",
            "the model was not called",
            "call it in the `with` block",
        )
        is_expected = False
        if session.calls:
            reason = why_not_called(tree, station.path, station.module, ran, hooked=hooked)
            what, fix = reason.what, reason.fix
            is_expected = is_container(station.module) and not listener.is_exact
            status = "bypassed" if reason.is_bypass else status
        kinds = [""] * listener.values + [".grad"] * (listener.gradients and not listener.values)
        return [Outcome(listener.address + kind, status, what, fix, is_expected) for kind in kinds]
    if listener.values:
        if listener.fired:
            found.append(Outcome(listener.address, "captured"))
        elif listener.missed_leaf:
            found.append(
                Outcome(
                    listener.address,
                    "no such leaf",
                    "it ran, but its value has no such leaf",
                    "see hl.sites(model, example=x)",
                    not listener.is_exact,
                )
            )
        else:
            found.append(_filtered(session, listener.address))
    if listener.gradients:
        found.append(_gradient_outcome(session, listener))
    return found


def _filtered(session: CaptureSession, address: str) -> Outcome:
    asked = [f"{name}={which!r}" for name, which in _filters(session) if which is not None]
    return Outcome(
        address,
        "never called",
        f"it ran, but never in the visits or calls asked for ({', '.join(asked)})",
        "count them with hl.sites(model, example=x)",
    )


def _filters(session: CaptureSession) -> list[tuple[str, object]]:
    return [("visits", session.visits), ("calls", session.which_calls)]


def _gradient_outcome(session: CaptureSession, listener: CaptureListener) -> Outcome:
    address = f"{listener.address}.grad"
    if listener.received:
        return Outcome(address, "captured")
    known = listener.grad_reasons
    if known:
        key = max(known, key=lambda reason: known[reason])
    else:
        key = "not reached" if session.saw_backward else "no backward"
    what, fix = NO_GRADIENT[key]
    is_expected = key == "no-grad tensor" and not listener.is_exact
    return Outcome(address, "no gradient", what, fix, is_expected)


def _parameter_outcome(session: CaptureSession, parameter: ParameterCapture) -> Outcome:
    if parameter.fired:
        return Outcome(parameter.address, "captured")
    if not parameter.site.is_grad:
        return Outcome(
            parameter.address,
            "never called",
            "no call began while the capture was open",
            "call the model in the `with` block",
        )
    owner: nn.Module = parameter.site.module
    held = owner._parameters.get(parameter.site.parameter or "")
    if held is not None and not held.requires_grad:
        return Outcome(
            parameter.address, "no gradient", "it is frozen (requires_grad=False)", "unfreeze it"
        )
    what, fix = NO_GRADIENT["not reached" if session.saw_backward else "no backward"]
    return Outcome(parameter.address, "no gradient", what, fix)
