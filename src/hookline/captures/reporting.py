"""The truth after a capture: every site that was asked for, and what became of it."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass

from torch import nn

from hookline._errors import HooklineWarning
from hookline._tables import Table
from hookline._trees import Path
from hookline.addresses import ModuleTree, format_place
from hookline.addresses.pattern import escape
from hookline.captures.listening import CaptureListener, CaptureSession, ParameterCapture
from hookline.captures.records import NO_GRADIENT
from hookline.hooks.idleness import why_idle
from hookline.hooks.reasons import fast_path_note, is_container, swap_notes, why_not_called
from hookline.hooks.refusals import generator_kind

_MOST_LINES = 8
_USUAL = ("no-grad tensor", "no tensor", "an argument")
"""Why many sites that a pattern names have no gradient."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one site."""

    address: str
    """The site."""

    status: str
    """`captured`, or what happened: `never called`, `never assigned`, `never returned`, `bypassed`,
    `no gradient`, `no such leaf`, `no output`."""

    reason: str = ""
    """Why it was not captured."""

    fix: str = ""
    """What to do about it."""

    is_expected: bool = False
    """Whether only a pattern named it and nothing else was to be expected."""


class Report:
    """List the outcome of every site of a capture."""

    def __init__(
        self,
        captured: list[_Place],
        problems: list[Outcome],
        notes: list[str],
        remarks: list[str],
    ) -> None:
        self._captured = captured
        self.problems = problems
        """The sites that were not captured as asked."""
        self.notes = notes
        """What a user is warned of."""
        self.remarks = remarks
        """What is good to know, and no reason to warn."""

    @property
    def outcomes(self) -> list[Outcome]:
        """List every site with what became of it, what is missing first."""
        # The addresses of what went well are written only when somebody asks.
        return [*self.problems, *(Outcome(_write(place), "captured") for place in self._captured)]

    def why(self, path: str) -> str:
        """Say why there is no value of a module, or of a name inside its forward."""
        for one in self.problems:
            if path in (one.address, one.address.rpartition(":")[0]):
                return f"{one.reason[:1].upper()}{one.reason[1:]}: {one.fix}."
        return ""

    def table(self) -> Table:
        """Show the report, what is missing first."""
        captured = len(self._captured)
        return Table(
            ["site", "status", "reason", "what to do"],
            [[one.address, one.status, one.reason, one.fix] for one in self.problems],
            title=f"{captured} of {captured + len(self.problems)} sites captured",
            notes=[*self.notes, *self.remarks],
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
        table = self.table()
        lines = [f"{one.address}: {one.status}: {one.reason}; {one.fix}" for one in self.problems]
        return "\n".join([table.title, *lines, *self.notes, *self.remarks])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


_Place = tuple[str, str, Path, bool]
"""A site that was captured: path, port, leaf, and whether it is a gradient.

The path of a parameter has what follows it, and no port.
"""


def _write(place: _Place) -> str:
    path, port, leaf, is_grad = place
    if port == "parameter":
        return path
    return format_place(escape(path), port, leaf, is_grad=is_grad)


def make_report(session: CaptureSession) -> Report:
    """Look at what every listener of a session received; before the session is closed."""
    tree = session.tree
    assert tree is not None
    captured: list[_Place] = []
    problems: list[Outcome] = []
    for listener in session.listeners:
        if not isinstance(listener, CaptureListener):  # it waits for a lazy parameter
            continue
        path = listener.station.path
        if listener.values:
            if listener.fired:
                captured.append((path, listener.port, listener.leaf, False))
            else:
                problems.append(_value_problem(session, tree, listener))
        if listener.gradients:
            if listener.received:
                captured.append((path, listener.port, listener.leaf, True))
                problems.extend(_leaf_problems(session, listener))
            elif listener.station.runs or not listener.values:
                problems.append(_gradient_problem(session, tree, listener))
    for parameter in session.parameters:
        assert isinstance(parameter, ParameterCapture)
        if parameter.fired:
            captured.append((parameter.address, "parameter", (), parameter.site.is_grad))
        else:
            problems.append(_parameter_problem(session, parameter))
    problems.extend(
        Outcome(
            site.address,
            "no output",
            f"its forward is a {generator_kind(site.module)}, which returns before its body runs",
            "attach to the modules it calls",
            is_expected=True,
        )
        for site in session.left_out
    )
    notes = fast_path_note(tree, [station.module for station in session.stations])
    notes += swap_notes(session)
    if session.other_thread_calls:
        notes.append(
            f"{session.other_thread_calls} executions in other threads were left out "
            "(this_thread=True)."
        )
    return Report(captured, problems, notes, session.compiler.list())


def _value_problem(session: CaptureSession, tree: ModuleTree, listener: CaptureListener) -> Outcome:
    if not listener.station.runs:
        outcome = _not_called(session, tree, listener, listener.address)
        if listener.inside is not None and outcome.status == "never called":
            instead = ", or another function ran in place of its forward"
            return dataclasses.replace(outcome, reason=outcome.reason + instead)
        return outcome
    if listener.missed_leaf:
        return Outcome(
            listener.address,
            "no such leaf",
            "it ran, but its value has no such leaf",
            "see hl.sites(model, example=x)",
            not listener.is_exact,
        )
    if session.visits is None and session.which_calls is None:
        if listener.inside is not None:
            return _explain_inside(listener)
        return Outcome(
            listener.address,
            "never returned",
            "it was called, but an error came before its value",
            "see the error that was raised",
        )
    return _filtered(session, listener.address)


def _explain_inside(listener: CaptureListener) -> Outcome:
    reason = why_idle(listener, listener.most_seen)
    is_variable = listener.inside is not None and listener.inside.mark == "@"
    status = "never assigned" if is_variable else "never called"
    return Outcome(listener.address, status, reason.what, reason.fix, not listener.is_exact)


def _not_called(
    session: CaptureSession, tree: ModuleTree, listener: CaptureListener, address: str
) -> Outcome:
    if not session.calls:
        what, fix = "the model was not called", "call it in the `with` block"
        return Outcome(address, "never called", what, fix)
    module = listener.station.module
    stations = session.stations
    ran = {id(station.module) for station in stations if station.runs}
    hooked = {id(station.module) for station in stations}
    reason = why_not_called(tree, listener.station.path, module, ran, hooked=hooked)
    status = "bypassed" if reason.is_bypass else "never called"
    is_expected = is_container(module) and not listener.is_exact
    return Outcome(address, status, reason.what, reason.fix, is_expected)


def _leaf_problems(session: CaptureSession, listener: CaptureListener) -> list[Outcome]:
    """Name the parts of a nested value that got no gradient while others did.

    Few use all that an LSTM returns, so the report has them and the warning has not.
    """
    results = session.captured()
    if results is None or not listener.values:
        return []
    what, fix = NO_GRADIENT["not reached"]
    path, port, wanted = listener.station.path, listener.port, listener.leaf
    return [
        Outcome(_write((path, port, leaf, True)), "no gradient", what, fix, is_expected=True)
        for leaf in results.leaves_without_gradient(path, port)
        if leaf[: len(wanted)] == wanted
    ]


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


def _gradient_problem(
    session: CaptureSession, tree: ModuleTree, listener: CaptureListener
) -> Outcome:
    path, port, leaf = listener.station.path, listener.port, listener.leaf
    address = format_place(escape(path), port, leaf, is_grad=True)
    if not listener.station.runs:
        return _not_called(session, tree, listener, address)
    if listener.inside is not None and not listener.grad_reasons and not listener.heard:
        return dataclasses.replace(_explain_inside(listener), address=address)
    known = listener.grad_reasons
    if known:
        key = max(known, key=lambda reason: known[reason])
    else:
        key = "not reached" if session.saw_backward else "no backward"
    what, fix = NO_GRADIENT[key]
    is_expected = key in _USUAL and not listener.is_exact
    return Outcome(address, "no gradient", what, fix, is_expected)


def _parameter_problem(session: CaptureSession, parameter: ParameterCapture) -> Outcome:
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
    unknown = "not accumulated" if session.saw_backward else "no backward"
    what, fix = NO_GRADIENT[parameter.reason or unknown]
    return Outcome(parameter.address, "no gradient", what, fix)
