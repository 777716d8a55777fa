"""A capture as one safetensors file: every tensor, and a header that says what it was."""

from __future__ import annotations

import json
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline import _trees
from hookline._errors import HooklineError
from hookline.captures.captured import Captured
from hookline.captures.keeping import Kept
from hookline.captures.records import Place, VisitRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

_FORMAT = "hookline.capture"
_VERSION = 1


class _Writer:
    """Number the tensors of a capture and describe where each belongs."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> str:
        while name in self.tensors:  # keys such as `a/b` may spell the place of another tensor
            name += "'"
        # The format wants contiguous tensors that share no memory.
        self.tensors[name] = tensor.detach().contiguous().clone()
        return name

    def describe(self, tree: Any, name: str) -> Any:
        """Describe a tree in JSON: tensors by key, containers by kind."""
        if isinstance(tree, Tensor):
            return {"tensor": self.add(name, tree)}
        items = _trees.children(tuple(tree) if isinstance(tree, torch.Size) else tree)
        if items is None:
            if tree is None or isinstance(tree, (bool, int, float, str)):
                return {"value": tree}
            return {"opaque": tree.type_name if isinstance(tree, _trees.Opaque) else str(tree)}
        entries = [[key, self.describe(item, f"{name}/{key}")] for key, item in items]
        kind = "list" if isinstance(tree, list) else "tuple" if isinstance(tree, tuple) else "dict"
        if kind == "tuple" and items and isinstance(items[0][0], str):
            kind = "dict"  # a named tuple: its names matter more than its class
        return {kind: entries}


def save(captured: Captured, path: str | FilePath) -> None:
    """Write a capture to a safetensors file."""
    from safetensors.torch import save_file

    writer = _Writer()
    calls = []
    for call in captured.calls:
        visits = []
        for number, record in enumerate(call.records.values()):
            where = f"{call.number}/{number}"
            values = [
                [port, list(leaf), writer.describe(record.value(port, leaf), f"{where}/{port}{i}")]
                for i, (port, leaf) in enumerate(record.trees)
            ]
            grads = [
                [port, list(leaf), writer.add(f"{where}/grad{i}", record.gradient(port, leaf))]
                for i, (port, leaf) in enumerate(record.grads)
            ]
            visits.append(
                {
                    "names": record.names,
                    "type": record.type_name,
                    "visit": record.visit,
                    "values": values,
                    "grads": grads,
                }
            )
        parameters = []
        for i, parameter in enumerate(call.parameters.values()):
            entry: dict[str, Any] = {"names": parameter.names}
            if parameter.value is not None:
                value = parameter.read(is_grad=False)
                entry["value"] = writer.add(f"{call.number}/parameter{i}", value)
            if parameter.grad is not None:
                grad = parameter.read(is_grad=True)
                entry["grad"] = writer.add(f"{call.number}/parameter{i}.grad", grad)
            if parameter.local_grad is not None:
                local = parameter.read(is_grad=True, is_local=True)
                entry["local_grad"] = writer.add(f"{call.number}/parameter{i}.local_grad", local)
            parameters.append(entry)
        calls.append({"number": call.number, "visits": visits, "parameters": parameters})
    header = {
        "version": _VERSION,
        "names": captured.index.names,
        "last": captured.index.is_last,
        "calls": calls,
    }
    save_file(writer.tensors, str(path), metadata={_FORMAT: json.dumps(header)})


def load(path: str | FilePath) -> Captured:
    """Read a capture that `got.save(path)` wrote; it reads like the one that was saved.

    Dataclasses and named tuples come back as dicts; values that were no tensors or plain values
    come back as their text.
    """
    from safetensors import safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get(_FORMAT)
            if text is None:
                raise HooklineError(f"`{path}` holds tensors, but no hookline capture.")
            header = json.loads(text)
            if header["version"] > _VERSION:
                raise HooklineError(
                    f"`{path}` was written by a newer hookline (format {header['version']}, this "
                    f"one reads {_VERSION}). Update hookline."
                )
            return _Reader(file).read(header)
    except FileNotFoundError:
        raise
    except HooklineError:
        raise
    except Exception as error:
        raise HooklineError(f"`{path}` cannot be read as a hookline capture: {error}") from error


class _Reader:
    def __init__(self, file: Any) -> None:
        self.file = file

    def read(self, header: dict[str, Any]) -> Captured:
        captured = Captured(is_last=False)
        captured.index.names = header["names"]
        captured.index.is_open = False
        for call in header["calls"]:
            for visit in call["visits"]:
                captured.add(self._visit(visit, call["number"]))
            for entry in call["parameters"]:
                record = captured.parameter(call["number"], tuple(entry["names"]))
                if "value" in entry:
                    record.value = self._kept(entry["value"])
                if "grad" in entry:
                    record.grad = self._kept(entry["grad"])
                    if record.value is not None:
                        record.value.tensor.grad = record.grad.tensor
                if "local_grad" in entry:
                    record.local_grad = self._kept(entry["local_grad"])
        captured.index.is_last = header["last"]
        return captured

    def _kept(self, key: str) -> Kept:
        return Kept(self.file.get_tensor(key), False)

    def _visit(self, entry: dict[str, Any], call: int) -> VisitRecord:
        place = Place(tuple(entry["names"]), entry["type"], lambda: None)
        record = VisitRecord(place, call, entry["visit"])
        for port, leaf, described in entry["values"]:
            record.trees[port, tuple(leaf)] = self._tree(described, record, port, tuple(leaf))
        for port, leaf, key in entry["grads"]:
            record.add_gradient(port, tuple(leaf), 0, self._kept(key))
        return record

    def _tree(self, described: dict[str, Any], record: VisitRecord, port: str, path: Any) -> Any:
        ((kind, content),) = described.items()
        if kind == "tensor":
            kept = record.kept[port, path] = self._kept(content)
            return kept.tensor
        if kind == "value":
            return content
        if kind == "opaque":
            return _trees.Opaque(content)
        items: Iterator[tuple[Any, Any]] = (
            (key, self._tree(inner, record, port, (*path, key))) for key, inner in content
        )
        if kind == "dict":
            return dict(items)
        values = [value for _, value in items]
        return values if kind == "list" else tuple(values)
