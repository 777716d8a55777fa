"""What a run says about the model that was watched: its modules, its parameters, its source."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from hookline.addresses import ModuleTree, is_inside, parse_port
from hookline.addresses.variables import forward_of, has_forward
from hookline.sources import NoSource, Reading, read, unwrap
from hookline.surveys.naming import is_of_torch, show_file


def source_of(module: nn.Module, port: str) -> str:
    """Give file and line of the forward that makes a value; of its first assignment inside one."""
    if not has_forward(module):
        return ""
    if is_inside(port):
        reading = _read(module)
        points = [] if reading is None else reading.names.get(parse_port(port).name, [])
        if reading is not None and points:
            number = parse_port(port).number or 0
            return f"{show_file(reading.file)}:{points[min(number, len(points) - 1)].line}"
    code = getattr(unwrap(forward_of(module))[-1], "__code__", None)
    return "" if code is None else f"{show_file(code.co_filename)}:{code.co_firstlineno}"


class Descriptions:
    """What a run says about its models, as they come."""

    def __init__(self) -> None:
        self._models: dict[str, Any] = {}
        self._sources: dict[str, Any] = {}

    def add(self, prefix: str, model: nn.Module) -> None:
        """Describe a model under its prefix."""
        self._models[prefix.rstrip(".")] = describe_model(model)
        self._sources.update(describe_sources(model))

    def documents(self) -> list[tuple[str, dict[str, Any]]]:
        """Give the documents of the run: name and facts."""
        models = self._models
        alone = models.get("") if len(models) == 1 else None
        return [("model", dict(alone or models)), ("sources", dict(self._sources))]


def describe_model(model: nn.Module) -> dict[str, Any]:
    """List the modules with their parameters, as JSON can hold them."""
    tree = ModuleTree(model)
    counted: dict[int, int] = {}
    modules = []
    for entry in tree.entries:
        own = {name: one for name, one in entry.module._parameters.items() if one is not None}
        total = trainable = 0
        for one in entry.module.parameters():
            counted.setdefault(id(one), _size(one))
            total += counted[id(one)]
            trainable += counted[id(one)] if one.requires_grad else 0
        modules.append(
            {
                "path": entry.names[0],
                "names": list(entry.names),
                "type": type(entry.module).__qualname__,
                "extra": _extra(entry.module),
                "training": entry.module.training,
                "source": source_of(entry.module, "output"),
                "parameters": total,
                "trainable": trainable,
                "own": {
                    name: {
                        "shape": list(one.shape) if _size(one) else None,
                        "dtype": str(one.dtype).removeprefix("torch."),
                        "requires_grad": one.requires_grad,
                    }
                    for name, one in own.items()
                },
            }
        )
    return {
        "type": type(tree.entries[0].module).__qualname__,
        "parameters": modules[0]["parameters"] if modules else 0,
        "trainable": modules[0]["trainable"] if modules else 0,
        "modules": modules,
    }


def describe_sources(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Give the source of each forward that is not torch's own, by file and line."""
    found: dict[str, dict[str, Any]] = {}
    for entry in ModuleTree(model).entries:
        where = source_of(entry.module, "output")
        if not where or where in found or is_of_torch(forward_of(entry.module)):
            continue
        reading = _read(entry.module)
        if reading is not None:
            found[where] = {"first_line": reading.first_line, "lines": list(reading.lines)}
    return found


def _read(module: nn.Module) -> Reading | None:
    try:
        return read(forward_of(module))
    except NoSource:
        return None


def _size(parameter: nn.Parameter) -> int:
    try:
        return parameter.numel()
    except (RuntimeError, ValueError):  # a lazy parameter has no shape yet
        return 0


def _extra(module: nn.Module) -> str:
    try:
        return module.extra_repr()
    except Exception:  # a user's own text may fail; the run goes on without it
        return ""


def read_rank() -> tuple[int, int]:
    """Tell which rank of how many this process is."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
