"""A capture as a table: one row a tensor, with the norms of its value and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline._errors import Overwritten
from hookline._tables import Table
from hookline._trees import Path

if TYPE_CHECKING:
    from hookline.captures.captured import Captured
    from hookline.captures.records import VisitRecord


def _norm(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    wide = tensor.detach()
    if wide.is_nested:  # torch has no norm of it
        wide = torch.cat([one.reshape(-1) for one in wide.unbind()])
    if not (wide.is_floating_point() or wide.is_complex()) or wide.dtype.itemsize < 4:
        wide = wide.to(torch.float32)
    return float(torch.linalg.vector_norm(wide))


def _shape(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    return "x".join(map(str, tensor.shape)) or "scalar"


def tabulate(captured: Captured) -> Table:
    """Make the table of everything captured, in the order it ran."""
    several_calls = len(captured.calls) > 1
    several_visits = any(visit.visit for visit in captured)
    columns = ["site", "type"]
    if several_calls:
        columns.append("call")
    if several_visits:
        columns.append("visit")
    columns += ["shape", "dtype", "norm", "grad norm"]
    rows: list[list[object]] = []
    lost = 0
    for call in captured.calls:
        for name, parameter in call.parameters.items():
            when: list[object] = [call.number] * several_calls
            when += [""] * several_visits
            kept = parameter.value or parameter.grad
            if kept is not None:
                value = parameter.value.arrive() if parameter.value else None
                grad = parameter.grad.arrive() if parameter.grad else None
                look = [_shape(kept.tensor), str(kept.tensor.dtype)[6:]]
                rows.append([name, "parameter", *when, *look, _norm(value), _norm(grad)])
            if parameter.local_grad is not None:
                local = parameter.local_grad.arrive()
                look = [_shape(local), str(local.dtype)[6:]]
                site = f"{name}:local_grad"
                rows.append([site, "parameter", *when, *look, None, _norm(local)])
        for record in call.records.values():
            for port, path in dict.fromkeys([*record.kept, *record.grads]):
                when = [call.number] * several_calls
                when += [record.visit] * several_visits
                try:
                    row = _row(record, port, path, when)
                except Overwritten:
                    lost += 1
                    row = [record.address(port, path), record.type_name, *when, "", "", "", ""]
                rows.append(row)
    notes = [f"{lost} values were overwritten in place; capture with clone=True."] if lost else []
    return Table(columns, rows, notes=notes)


def _row(record: VisitRecord, port: str, path: Path, when: list[object]) -> list[object]:
    value = record.value(port, path) if (port, path) in record.kept else None
    grad = record.gradient(port, path) if (port, path) in record.grads else None
    shown: Any = grad if value is None else value
    look = [_shape(shown), str(shown.dtype)[6:]]
    return [record.address(port, path), record.type_name, *when, *look, _norm(value), _norm(grad)]
