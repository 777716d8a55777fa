"""Traces in memory: made site by site, or by following one step of a small model.

maker = TraceMaker()
x = maker.value("", "input", torch.randn(2, 4))
maker.value("fc", "input", maker.tensors[x], same_as=x)
trace = maker.build()

trace = follow(model, x, loss=torch.Tensor.sum)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hookline._trees import Path, leaves
from hookline.addresses import format_place
from hookline.diffs.traces import Measurements, ModuleFacts, Trace, TraceFacts, TraceSite
from hookline.stats.reference import measure, sketch


class MemoryTrace(Trace):
    """A trace of tensors that are simply there."""

    def __init__(
        self,
        sites: Sequence[TraceSite],
        tensors: Mapping[int, Tensor] | Sequence[Mapping[int, Tensor]],
        *,
        facts: TraceFacts | None = None,
        keeps_tensors: bool = True,
        floors: npt.NDArray[np.float64] | None = None,
        first_step: int = 0,
    ) -> None:
        """Take the tensors by site, of one step or of each; a site without one is not measured."""
        self.facts = facts or TraceFacts(title="made")
        self.sites = list(sites)
        self.values = [tensors] if isinstance(tensors, Mapping) else list(tensors)
        self.keeps_tensors = keeps_tensors
        self._floors = floors
        self._first = first_step
        self._measured: dict[int, Measurements] = {}

    @property
    def steps(self) -> Sequence[int]:
        return range(self._first, self._first + len(self.values))

    def measurements(self, step: int) -> Measurements:
        if step not in self._measured:
            rows = np.full((len(self.sites), 8), np.nan)
            sketches = np.full((len(self.sites), 64), np.nan, dtype=np.float32)
            for site in self.sites:
                if site.same_as is not None:
                    rows[site.id] = rows[site.same_as]
                    sketches[site.id] = sketches[site.same_as]
                elif (value := self.values[step - self._first].get(site.id)) is not None:
                    rows[site.id] = measure(value.detach()).numpy()
                    sketches[site.id] = sketch(value.detach()).numpy()
            self._measured[step] = Measurements(rows, sketches)
        return self._measured[step]

    def tensor(self, site: int, step: int) -> Tensor | None:
        same = self.sites[site].same_as
        value = self.values[step - self._first].get(site if same is None else same)
        return None if value is None or not self.keeps_tensors else value.detach()

    def floors(self) -> npt.NDArray[np.float64] | None:
        return self._floors


class TraceMaker:
    """Make a trace site by site."""

    def __init__(self) -> None:
        self.sites: list[TraceSite] = []
        self.tensors: dict[int, Tensor] = {}

    def value(
        self,
        module: str,
        port: str,
        tensor: Tensor,
        *,
        leaf: Path = (),
        type: str = "Linear",
        caller: str | None = None,
        **more: Any,
    ) -> int:
        """Add a value at a port; `more` are fields of TraceSite: visit, same_as, requires_grad."""
        if caller is None and module:
            caller = module.rpartition(".")[0]
        address = format_place(module, port, leaf)
        fields = {"leaf": leaf, "type": type, "caller": caller, **more}
        return self._add("value", address, module, port, tensor, fields)

    def gradient(self, of: int, tensor: Tensor, **more: Any) -> int:
        """Add the gradient of a value; `is_part=True` for the module's own part."""
        site = self.sites[of]
        address = format_place(site.module, site.port, site.leaf, is_grad=True)
        fields = {"leaf": site.leaf, "type": site.type, "caller": site.caller, "of": of}
        fields |= {"visit": site.visit, **more}
        return self._add("gradient", address, site.module, site.port, tensor, fields)

    def parameter(
        self, module: str, name: str, tensor: Tensor, *, type: str = "Linear", **more: Any
    ) -> int:
        """Add a parameter, or with `kind="buffer"` a buffer."""
        kind = more.pop("kind", "parameter")
        address = f"{module}.{name}" if module else name
        return self._add(
            kind, address, module, kind, tensor, {"leaf": (name,), "type": type, **more}
        )

    def parameter_gradient(self, of: int, tensor: Tensor, **more: Any) -> int:
        """Add the gradient of a parameter."""
        return self._follow_parameter("parameter gradient", ":grad", of, tensor, more)

    def update(self, of: int, tensor: Tensor, **more: Any) -> int:
        """Add what the optimizer did to a parameter."""
        return self._follow_parameter("update", ":update", of, tensor, more)

    def build(self, **options: Any) -> MemoryTrace:
        """Make the trace; the options are MemoryTrace's."""
        return MemoryTrace(self.sites, self.tensors, **options)

    def _follow_parameter(
        self, kind: str, suffix: str, of: int, tensor: Tensor, more: Mapping[str, Any]
    ) -> int:
        site = self.sites[of]
        fields = {"leaf": site.leaf, "type": site.type, "of": of, **more}
        return self._add(kind, site.address + suffix, site.module, "parameter", tensor, fields)

    def _add(
        self,
        kind: str,
        address: str,
        module: str,
        port: str,
        tensor: Tensor,
        fields: Mapping[str, Any],
    ) -> int:
        dtype = str(tensor.dtype).removeprefix("torch.")
        site = TraceSite(
            len(self.sites),
            kind,
            address,
            module,
            port,
            dtype=dtype,
            shape=tuple(tensor.shape),
            **fields,
        )
        self.sites.append(site)
        if site.same_as is None:
            self.tensors[site.id] = tensor.detach().clone()
        return site.id


def follow(
    model: nn.Module,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    lr: float | None = None,
    **options: Any,
) -> MemoryTrace:
    """Run one step of a model with plain torch hooks; make its trace.

    With a loss also total gradients and those of parameters, with `lr` updates of plain descent.
    The model keeps its weights and has no gradients afterwards.
    """
    maker = TraceMaker()
    names = {module: path for path, module in model.named_modules()}
    known: dict[Any, int] = {}
    alive: list[Tensor] = []
    running: list[str] = []
    visits: dict[str, int] = {}
    handles = []

    def arrive(at: int, grad: Tensor) -> None:
        maker.gradient(at, grad)

    def show(module: nn.Module, port: str, tree: Any, caller: str | None) -> None:
        path = names[module]
        tree = tree[0] if port == "input" and len(tree) == 1 else tree
        for leaf, tensor in leaves(tree):
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version)
            same = known.get(key) if tensor.numel() else None
            at = maker.value(
                path,
                port,
                tensor,
                leaf=leaf,
                type=type(module).__name__,
                caller=caller,
                visit=visits[path],
                same_as=same,
                requires_grad=tensor.requires_grad if torch.is_grad_enabled() else None,
            )
            alive.append(tensor)
            known.setdefault(key, at)
            if same is None and tensor.requires_grad and loss is not None:
                tensor.register_hook(functools.partial(arrive, at))

    def enter(module: nn.Module, given: Any) -> None:
        path = names[module]
        visits[path] = visits.get(path, -1) + 1
        show(module, "input", given, running[-1] if running else None)
        running.append(path)

    def leave(module: nn.Module, given: Any, result: Any) -> None:
        running.pop()
        show(module, "output", result, running[-1] if running else None)

    for module in names:
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
    try:
        result = model(*args)
        if loss is not None:
            loss(result).backward()
    finally:
        for handle in handles:
            handle.remove()
    _add_parameters(maker, model, lr)
    model.zero_grad()
    facts = TraceFacts(title=type(model).__name__, modules=_describe_modules(model))
    return maker.build(facts=facts, **options)


def rename(trace: MemoryTrace, change: Callable[[str], str]) -> MemoryTrace:
    """Give the same trace under other module paths."""
    sites = []
    for site in trace.sites:
        path = change(site.module)
        rest = site.address[len(site.module) :]
        address = path + rest if path else rest.removeprefix(".")
        if path and not site.module and site.port not in ("input", "output"):
            address = f"{path}.{rest}"
        caller = None if site.caller is None else change(site.caller)
        sites.append(dataclasses.replace(site, module=path, address=address, caller=caller))
    modules = {change(path): facts for path, facts in trace.facts.modules.items()}
    facts = dataclasses.replace(trace.facts, modules=modules)
    return MemoryTrace(sites, trace.values, facts=facts, keeps_tensors=trace.keeps_tensors)


def _add_parameters(maker: TraceMaker, model: nn.Module, lr: float | None) -> None:
    """Add buffers, parameters, then their gradients and updates, in the order of the model."""
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    for name, buffer in model.named_buffers():
        path, _, last = name.rpartition(".")
        maker.parameter(path, last, buffer, type=kinds[path], kind="buffer")
    numbers = {}
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        numbers[name] = maker.parameter(path, last, parameter, type=kinds[path])
    grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    for name, grad in grads.items():
        maker.parameter_gradient(numbers[name], grad)
    for name, grad in grads.items() if lr is not None else ():
        maker.update(numbers[name], -lr * grad)


def _describe_modules(model: nn.Module) -> dict[str, ModuleFacts]:
    return {
        path: ModuleFacts(
            type=type(module).__name__,
            is_torch=type(module).__module__.startswith("torch."),
            training=module.training,
            config={
                name: repr(value)
                for name, value in vars(module).items()
                if isinstance(value, (bool, int, float, str)) and name != "training"
            },
            names=(path,),
        )
        for path, module in model.named_modules()
    }
