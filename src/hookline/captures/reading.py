"""Reading what a capture holds: one visit, one call, and the way from an address to them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline._errors import AmbiguousRead, NotCaptured
from hookline.addresses import PARAMETER_PORTS, Address, Inside, format_place, parse
from hookline.addresses.pattern import escape, is_exact
from hookline.captures.records import ParameterRecord, VisitRecord

if TYPE_CHECKING:
    from hookline.captures.reporting import Report

_MOST_SHOWN = 12


class Index:
    """What calls share with the capture they belong to: the names, and why some are missing.

    Calls do not point back to the capture: a cycle would keep tensors alive after their last use.
    """

    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last
        self.is_open = True
        self.names: dict[str, str] = {}
        """Every name that was asked for, with the one results are kept under."""
        self.report: Report | None = None
        self.lost = ""
        """Why all that was captured is gone; empty when nothing was lost."""

    def explain_missing(
        self, path: str, call: int | None = None, inside: object = ""
    ) -> NotCaptured:
        """Say why there is nothing under a path, or of a name inside that module's forward."""
        if path in self.names:
            where = "" if call is None else f" in call {call}"
            why = ""
            if self.report is not None:
                why = self.report.why(self.names[path] + str(inside))
            why = self.lost or why
            when = "yet" if self.is_open else "in this capture"
            why = why or ("Nothing came there." if inside else "It did not run.")
            return NotCaptured(f"`{path}{inside}` has no value{where} {when}. {why}")
        if not is_exact(path):
            return NotCaptured(
                f"`{path}` is a pattern, and reading takes one address. "
                "Loop over the capture (`for visit in got`), or read got.tensors()."
            )
        near = difflib.get_close_matches(path, self.names, 3, 0.5)
        hint = f" Nearest: {', '.join(f'`{name}`' for name in near)}." if near else ""
        return NotCaptured(
            f"`{path}` was not asked for in this capture.{hint} "
            f"Name it in hl.capture(model, '{path}')."
        )


def read_inside(record: VisitRecord, address: Address) -> Any:
    """Read a variable or operation of one visit, which has to have one value there."""
    inside = address.inside
    assert inside is not None
    ports = record.ports_at(inside)
    if not ports:
        held = list(dict.fromkeys(record.address(one) for one, _ in (*record.trees, *record.grads)))
        shown = ", ".join(f"`{one}`" for one in held[:_MOST_SHOWN]) or "nothing"
        more = f" and {len(held) - _MOST_SHOWN} more" if len(held) > _MOST_SHOWN else ""
        raise NotCaptured(
            f"`{address}` has no value in call {record.call}, visit {record.visit}: it was not "
            f"asked for, or not assigned or called there. Captured of this visit: {shown}{more}."
        )
    if inside.number is None:
        if len(ports) > 1:
            verb = "assigned" if inside.mark == "@" else "called"
            raise AmbiguousRead(
                f"`{address}` was {verb} {len(ports)} times in this visit; choose one: "
                f"got['{escape(record.path)}{ports[0]}'], or read all: got.values('{address}')."
            )
        port = ports[0]
    elif inside.number < 0 and -inside.number <= len(ports):
        port = ports[inside.number]
    else:
        port = str(inside)
        if port not in ports:
            raise NotCaptured(
                f"`{address}`: there is no number {inside.number} in call {record.call}, visit "
                f"{record.visit}; captured: {', '.join(f'`{one}`' for one in ports)}."
            )
    if address.is_grad:
        return record.gradient(port, address.leaf)
    return record.value(port, address.leaf)


def _choose_ports(ports: list[str], inside: Inside) -> list[str]:
    """Give those of a variable's or operation's ports, in order, that a number means."""
    number = inside.number
    if number is None:
        return ports
    if number < 0:
        return [ports[number]] if -number <= len(ports) else []
    return [port for port in ports if port == str(inside)]


class CapturedVisit:
    """What was captured of one visit of one module."""

    __slots__ = ("_call", "_record")

    def __init__(self, record: VisitRecord, call: CapturedCall) -> None:
        self._record = record
        self._call = call

    @property
    def path(self) -> str:
        """Give the module's first name."""
        return self._record.path

    @property
    def names(self) -> tuple[str, ...]:
        """Give every name of the module."""
        return self._record.names

    @property
    def visit(self) -> int:
        """Give which execution within the call this was."""
        return self._record.visit

    @property
    def call(self) -> int:
        """Give which call of the root module this was in."""
        return self._record.call

    @property
    def output(self) -> Any:
        """Give what the module returned: a tensor, or the tree it returned."""
        return self._record.value("output", ())

    @property
    def inputs(self) -> dict[str, Any]:
        """Give the arguments by their names in `forward`'s signature."""
        found: dict[str, Any] = self._record.value("input", ())
        return found

    @property
    def input(self) -> Any:
        """Give the only argument; raise where there are several."""
        inputs = self.inputs
        if len(inputs) != 1:
            names = ", ".join(f"`{name}`" for name in inputs)
            raise AmbiguousRead(
                f"`{self.path}` has {len(inputs)} arguments: {names or 'none'}. "
                "Read one by its name in .inputs."
            )
        return next(iter(inputs.values()))

    @property
    def params(self) -> dict[str, Tensor]:
        """Give the module's own parameters as they were when the call began."""
        prefix = f"{self.path}." if self.path else ""
        found = {
            name.removeprefix(prefix): record.read(is_grad=False)
            for name, record in self._call.parameters.items()
            if name.startswith(prefix) and "." not in name.removeprefix(prefix)
            if record.value is not None
        }
        if not found:
            raise NotCaptured(
                f"no parameters of `{self.path}` were captured; use hl.capture(..., params=True)."
            )
        return found

    def __getitem__(self, text: str) -> Any:
        """Read what was captured of this visit by the rest of its address: `visit["@scores"]`."""
        address = parse(text)
        if address.path or (address.port is None and address.inside is None):
            raise NotCaptured(
                f"`{text}` is read of one visit of `{self.path}`: give what follows the module's "
                "path, such as visit['@name'] or visit[':output[0]']."
            )
        if address.inside is not None:
            return read_inside(self._record, address)
        assert address.port is not None
        if address.is_grad:
            return self._record.gradient(address.port, address.leaf)
        return self._record.value(address.port, address.leaf)

    def grads(self, port: str = "output") -> list[Any]:
        """List the gradients of a port, one for each backward pass that came through."""
        passes = {
            task: None
            for (where, _), found in self._record.grads.items()
            if where == port
            for task in found
        }
        return [self._record.gradient(port, (), number) for number in range(len(passes))]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a captured visit has no `{name}`; what the module returned is in `.output`, "
            "what it received in `.inputs`"
        )

    def __repr__(self) -> str:
        held = ", ".join(format_place("", port, leaf) for port, leaf in self._record.trees)
        return f"<{self.path or 'root'} ({self._record.type_name}), visit {self.visit}: {held}>"


class Reader:
    """Reading by address; a call and a whole capture read alike."""

    def _visits(self, path: str) -> list[CapturedVisit]:
        raise NotImplementedError

    def _parameter(self, path: str) -> list[ParameterRecord]:
        raise NotImplementedError

    def _explain_missing(self, path: str, inside: object) -> NotCaptured:
        raise NotImplementedError

    def _choose(self, path: str, visits: list[CapturedVisit], visit: int | None) -> CapturedVisit:
        raise NotImplementedError

    def __getitem__(self, key: str | tuple[str, int]) -> Any:
        text, visit = key if isinstance(key, tuple) else (key, None)
        if not isinstance(text, str) or not (visit is None or isinstance(visit, int)):
            raise TypeError(
                f"read with an address, or an address and a visit: got['fc1'], got['fc1', 1]; "
                f"not {key!r}"
            )
        address = parse(text)
        path = address.path.replace("\\", "")
        is_parameter = address.port is None or address.port in PARAMETER_PORTS
        parameters = self._parameter(path) if is_parameter else []
        if parameters:
            if len(parameters) > 1:
                raise AmbiguousRead(
                    f"`{path}` was captured in {len(parameters)} calls; choose one: "
                    f"got.calls[0]['{text}']."
                )
            is_local = address.port == "local_grad"
            return parameters[0].read(is_grad=address.is_grad, is_local=is_local)
        visits = self._visits(path)
        if not visits:
            raise self._explain_missing(path, address.inside or "")
        chosen = self._choose(path, visits, visit)
        if address.inside is not None:
            return read_inside(chosen._record, address)
        if address.port is None:
            return chosen
        if address.is_grad:
            return chosen._record.gradient(address.port, address.leaf)
        return chosen._record.value(address.port, address.leaf)

    def values(self, text: str) -> list[Any]:
        """List every value captured at an address, over calls, visits and assignments, in order."""
        address = parse(text)
        path = address.path.replace("\\", "")
        found: list[Any] = []
        visits = self._visits(path)
        for visit in visits:
            record = visit._record
            ports = [address.port or "output"]
            if address.inside is not None:
                ports = _choose_ports(record.ports_at(address.inside), address.inside)
            is_held = record.has_gradient if address.is_grad else record.holds
            read = record.gradient if address.is_grad else record.value
            found.extend(read(port, address.leaf) for port in ports if is_held(port))
        if not found and visits and address.inside is not None:
            if ports:
                read(ports[0], address.leaf)  # these raise, and say why
            read_inside(record, address)
        if not found:
            raise self._explain_missing(path, address.inside or "")
        return found


class CapturedCall(Reader):
    """What was captured in one call of the root module."""

    def __init__(self, number: int, index: Index) -> None:
        self.number = number
        """Which call since the capture began, from 0."""
        self.records: dict[tuple[str, int], VisitRecord] = {}
        self.parameters: dict[str, ParameterRecord] = {}
        self._index = index

    def _visits(self, path: str) -> list[CapturedVisit]:
        path = self._index.names.get(path, path)
        return [
            CapturedVisit(record, self)
            for (name, _), record in self.records.items()
            if name == path
        ]

    def _parameter(self, path: str) -> list[ParameterRecord]:
        record = self.parameters.get(self._index.names.get(path, path))
        return [] if record is None else [record]

    def _explain_missing(self, path: str, inside: object) -> NotCaptured:
        return self._index.explain_missing(path, self.number, inside)

    def _choose(self, path: str, visits: list[CapturedVisit], visit: int | None) -> CapturedVisit:
        if visit is None:
            if len(visits) == 1 or self._index.is_last:
                return visits[-1]
            raise AmbiguousRead(
                f"`{path}` ran {len(visits)} times in this call; choose a visit: "
                f"got['{path}', {visits[0].visit}], or capture with last=True."
            )
        known = {one.visit: one for one in visits}
        if visit < 0 and len(visits) + visit >= 0:
            return visits[visit]
        if visit not in known:
            raise NotCaptured(
                f"`{path}` has no visit {visit} in this call; captured visits: "
                f"{', '.join(map(str, known))}."
            )
        return known[visit]

    def __iter__(self) -> Iterator[CapturedVisit]:
        for record in self.records.values():
            yield CapturedVisit(record, self)

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        return f"<call {self.number}: {len(self.records)} visits>"
