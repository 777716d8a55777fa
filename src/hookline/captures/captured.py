"""The results of a capture: read by address, by attribute, by iteration, as a table."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hookline._errors import AmbiguousRead, NotCaptured
from hookline._tables import Table
from hookline._trees import Path as TreePath
from hookline.captures.keeping import Kept
from hookline.captures.reading import CapturedCall, CapturedVisit, Index, Reader
from hookline.captures.records import ParameterRecord, Place, VisitRecord
from hookline.captures.tabulating import tabulate
from hookline.hooks.visits import LogEntry

if TYPE_CHECKING:
    from hookline.captures.reporting import Report


class Captured(Reader):
    """The values of some sites over some calls.

    got["fc1"].output            what the module returned
    got["fc1"].output.grad       its gradient, once backward ran
    got["fc1:input.x"]           one value by its full address
    got["fc1", 1]                a later visit of a module that ran several times
    got.calls[0]["fc1"]          one call of several
    got.layers[3].mlp.output     the same by attribute
    """

    def __init__(self, *, is_last: bool = False) -> None:
        self.log: list[LogEntry] = []
        """What listeners noted in haste; put in order when somebody reads."""
        self.aside: dict[tuple[str, int, int], tuple[Any, dict[TreePath, Kept]]] = {}
        """Arguments by path, call and visit, kept for somebody who asks what went in."""
        self.index = Index(is_last)
        self._calls: list[CapturedCall] = []
        self._growing = threading.Lock()

    @property
    def calls(self) -> list[CapturedCall]:
        """What each call of the root module left, in order."""
        if self.log:
            entries = self.log[:]
            self.log.clear()  # the listeners hold this very list
            for place, call, visit, tensor, version, task, port in entries:
                record = self.record(place, call, visit)
                if not isinstance(tensor, Tensor):
                    record.trees[port, ()] = tensor
                    continue
                kept = Kept(tensor)
                kept.version = version
                if task is None:
                    record.kept[port, ()] = kept
                    record.trees[port, ()] = kept.tensor
                else:
                    record.add_gradient(port, (), task, kept)
        return self._calls

    @property
    def is_read(self) -> bool:
        """Whether results were looked at, so that gradients have to appear on their tensors."""
        return bool(self._calls)

    # Filling.

    def record(self, place: Place, call: int, visit: int) -> VisitRecord:
        """Give the record of a visit; a new one if it has none."""
        record = self._call(call).records.get((place.names[0], visit))
        if record is None:
            record = VisitRecord(place, call, visit)
            record.aside = self.aside.pop((place.names[0], call, visit), None)
            self.add(record)
        return record

    def add(self, record: VisitRecord) -> None:
        """Take in a new visit."""
        if self.index.is_last:
            for call in self._calls:
                for key in [key for key in call.records if key[0] == record.path]:
                    if (call.number, key[1]) > (record.call, record.visit):
                        return  # a late gradient of a visit that a later one has replaced
                    del call.records[key]
        self._call(record.call).records[record.path, record.visit] = record

    def parameter(self, call: int, names: tuple[str, ...]) -> ParameterRecord:
        """Give the record of a parameter in a call."""
        parameters = self._call(call).parameters
        if self.index.is_last:
            for older in self.calls:
                if older.number != call:
                    older.parameters.pop(names[0], None)
        if names[0] not in parameters:
            parameters[names[0]] = ParameterRecord(names)
        return parameters[names[0]]

    def _call(self, number: int) -> CapturedCall:
        for call in reversed(self._calls):
            if call.number == number:
                return call
        call = CapturedCall(number, self.index)
        # A new list: another thread may be looking at the old one.
        with self._growing:
            self._calls = sorted([*self._calls, call], key=lambda one: one.number)
        return call

    def clear(self) -> None:
        """Forget everything captured so far; a capture that is open goes on."""
        self.log.clear()
        self.aside.clear()
        self._calls.clear()

    def leaves_without_gradient(self, path: str, port: str) -> list[TreePath]:
        """List the tensors of a nested value that never had a gradient and could have had one."""
        found: dict[TreePath, bool] = {}
        for call in self._calls:  # nested values are never only noted
            for record in call.records.values():
                if record.path == path:
                    for leaf, has_gradient in record.leaf_gradients(port):
                        found[leaf] = found.get(leaf, False) or has_gradient
        return [leaf for leaf, has_gradient in found.items() if not has_gradient]

    # Reading.

    def _visits(self, path: str) -> list[CapturedVisit]:
        return [visit for call in self.calls for visit in call._visits(path)]

    def _parameter(self, path: str) -> list[ParameterRecord]:
        return [record for call in self.calls for record in call._parameter(path)]

    def _choose(self, path: str, visits: list[CapturedVisit], visit: int | None) -> CapturedVisit:
        calls = {id(one._call): one._call for one in visits}
        if len(calls) == 1 or (self.index.is_last and visit is None):
            call = visits[-1]._call
            return call._choose(path, [one for one in visits if one._call is call], visit)
        first = self.calls.index(visits[0]._call)
        raise AmbiguousRead(
            f"`{path}` was captured in {len(calls)} calls; choose one: "
            f"got.calls[{first}]['{path}'], or capture with last=True."
        )

    def _explain_missing(self, path: str, inside: object) -> NotCaptured:
        return self.index.explain_missing(path, inside=inside)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Namespace(self, "")._step(name)

    def __dir__(self) -> list[str]:
        tops = {name.split(".", 1)[0] for name in self.index.names}
        return [*super().__dir__(), *(top for top in tops if top.isidentifier())]

    def __iter__(self) -> Iterator[CapturedVisit]:
        """Iterate over all visits in the order they ran."""
        for call in self.calls:
            yield from call

    def __len__(self) -> int:
        return sum(len(call) for call in self.calls)

    def __contains__(self, address: str) -> bool:
        try:
            self[address]
        except (AmbiguousRead, NotCaptured) as error:
            return isinstance(error, AmbiguousRead)
        return True

    def tensors(self) -> dict[str, Tensor]:
        """Give every captured tensor and gradient by its full address.

        Where there are several calls or visits, `#call.visit` follows the address.
        """
        several = len(self.calls) > 1 or any(visit.visit for visit in self)
        found: dict[str, Tensor] = {}
        for call in self.calls:
            for record in call.records.values():
                record.remember_overwritten()  # all at once: reading stops at the first
        for call in self.calls:
            for name, parameter in call.parameters.items():
                end = f"#{call.number}" if several else ""
                if parameter.value is not None:
                    found[name + end] = parameter.read(is_grad=False)
                if parameter.grad is not None:
                    found[f"{name}:grad{end}"] = parameter.read(is_grad=True)
                if parameter.local_grad is not None:
                    local = parameter.read(is_grad=True, is_local=True)
                    found[f"{name}:local_grad{end}"] = local
            for record in call.records.values():
                end = f"#{record.call}.{record.visit}" if several else ""
                for port, path in record.kept:
                    found[record.address(port, path) + end] = record.value(port, path)
                for port, path in record.grads:
                    address = record.address(port, path, is_grad=True)
                    found[address + end] = record.gradient(port, path)
        return found

    @property
    def nbytes(self) -> int:
        """Give how many bytes the captured tensors and gradients hold."""
        sizes: dict[int, int] = {}
        for call in self.calls:
            for record in call.records.values():
                kept = [
                    *record.kept.values(),
                    *(k for g in record.grads.values() for k in g.values()),
                ]
                for one in kept:
                    storage = one.tensor.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
            for parameter in call.parameters.values():
                for held in (parameter.value, parameter.grad, parameter.local_grad):
                    if held is not None:
                        storage = held.tensor.untyped_storage()
                        sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())

    def table(self) -> Table:
        """Show every captured tensor: shape, type, norms of value and gradient."""
        return tabulate(self)

    def report(self) -> Report:
        """Say which sites were captured, and why others were not."""
        if self.index.report is None:
            if self.index.is_open:
                why = "the report is made when the capture ends; leave the `with` block."
            else:
                why = "there is no report: an error ended the `with` block, or this was loaded."
            raise NotCaptured(why)
        return self.index.report

    def save(self, path: str | FilePath) -> None:
        """Write every tensor to a safetensors file that `hl.load` reads."""
        from hookline.captures.storing import save

        save(self, path)

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return f"<hookline.Captured: {len(self.calls)} calls, {len(self)} visits>"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __rich__(self) -> Any:
        return self.table().__rich__()


class _Namespace:
    """A step on the way to a visit: `got.layers[3].mlp`."""

    __slots__ = ("_captured", "_path")

    def __init__(self, captured: Captured, path: str) -> None:
        self._captured = captured
        self._path = path

    def _step(self, name: str) -> Any:
        path = f"{self._path}.{name}" if self._path else name
        names = self._captured.index.names
        if path in names:
            below = any(other.startswith(path + ".") for other in names)
            return _VisitNamespace(self._captured, path) if below else self._captured[path]
        if any(other.startswith(path + ".") for other in names):
            return _Namespace(self._captured, path)
        raise AttributeError(str(self._captured.index.explain_missing(path)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._step(name)

    def __getitem__(self, key: int | str) -> Any:
        return self._step(str(key))

    def __repr__(self) -> str:
        return f"<captured under {self._path}>"


class _VisitNamespace(_Namespace):
    """A module that was captured and has captured modules below it."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name in CapturedVisit.__dict__ and not name.startswith("__"):
            return getattr(self._captured[self._path], name)
        return super().__getattr__(name)
