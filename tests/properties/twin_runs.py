"""Run one random model twice, watched and plain, and what plain torch says of every value.

Nothing here uses hookline: the oracles are torch's own hooks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from random_models import Spec, build
from random_modules import SIZE
from torch import Tensor, nn

Watch = Callable[[nn.Module], AbstractContextManager[Any]]
Place = tuple[str, int, str]
"""A module's first name, its visit, and `input` or `output`."""


@dataclass
class Run:
    """What one run left behind."""

    error: Exception | None = None
    output: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    random_state: Tensor | None = None
    got: Any = None
    model: nn.Module | None = None
    tap_would_regroup: bool = False
    """Whether a module hands back an input or a parameter, so that its gradient is a part of it."""
    changed_alias: bool = False
    """Whether what a module returned as a view or an unchanged input was changed in place."""
    changed_argument: bool = False
    """Whether an argument that a module gave back, changed or not, was changed in place later."""
    changed_inputs: set[Place] = field(default_factory=set)
    """The visits whose arguments were changed in place, by the module itself or later."""
    values: dict[Place, list[Tensor | None]] = field(default_factory=dict)
    probes: dict[Place, list[Tensor | None]] = field(default_factory=dict)


def flatten(tree: Any) -> list[Tensor | None]:
    """List the tensors of a nested value in order, and None where there is None."""
    if tree is None or isinstance(tree, Tensor):
        return [tree]
    if is_dataclass(tree):
        tree = [getattr(tree, one.name) for one in fields(tree)]
    elif isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in flatten(item)]
    return []


def rebuild(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Make the same nested value with other tensors."""
    if isinstance(tree, Tensor):
        return change(tree)
    if is_dataclass(tree):
        return type(tree)(*[rebuild(getattr(tree, one.name), change) for one in fields(tree)])
    if isinstance(tree, dict):
        return {key: rebuild(item, change) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[rebuild(item, change) for item in tree])
    if isinstance(tree, (list, tuple)):
        return type(tree)([rebuild(item, change) for item in tree])
    return tree


def make_loss(output: Any) -> Tensor:
    tensors = [leaf for leaf in flatten(output) if leaf is not None]
    generator = torch.Generator().manual_seed(3)
    terms = [(t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in tensors]
    return torch.stack(terms).sum()


def run(
    spec: Spec,
    watch: Watch | None = None,
    *,
    prepare: Callable[[Run], None] | None = None,
    checkpoints: bool = True,
    more: list[Tensor] | None = None,
) -> Run:
    """Build the model, run it forward and backward inside `watch`, and keep everything."""
    done = Run()
    model = done.model = build(spec, checkpoints=checkpoints)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, SIZE, SIZE, generator=generator, dtype=torch.float64).requires_grad_()
    gain = torch.randn(SIZE, generator=generator, dtype=torch.float64) if spec.variant % 2 else None
    if prepare is not None:
        prepare(done)
    torch.manual_seed(2)
    with warnings.catch_warnings():
        # Sessions say which sites never ran or got no gradient; random models have many.
        warnings.filterwarnings("ignore", message="hookline: (not everything|some edits)")
        try:
            with watch(model) if watch is not None else nullcontext() as done.got:
                output = model(x, gain=gain)
                done.output = [
                    leaf.detach().clone() for leaf in flatten(output) if leaf is not None
                ]
                loss = torch.stack([make_loss(output), *(more or [])]).sum()
                if loss.requires_grad:
                    loss.backward()
        except (RuntimeError, ValueError, TypeError) as error:
            done.error = error.with_traceback(None)
    done.grads = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    done.buffers = dict(model.named_buffers())
    done.random_state = torch.get_rng_state()
    return done


def is_recompute() -> bool:
    return torch._C._current_graph_task_id() != -1


def run_plain(spec: Spec) -> Run:
    """Run under torch's own hooks that copy every value, and look for outputs that are aliases."""
    aliases: list[tuple[Tensor, int, bool]] = []
    inputs: list[tuple[Place, Tensor, int]] = []

    def prepare(done: Run) -> None:
        assert done.model is not None
        for name, module in done.model.named_modules():
            _copy_values(done, name, module, aliases, inputs)

    done = run(spec, prepare=prepare)
    done.changed_alias = any(
        one._version != version for one, version, is_own in aliases if not is_own
    )
    done.changed_argument = any(one._version != version for one, version, _ in aliases)
    done.changed_inputs = {place for place, one, version in inputs if one._version != version}
    return done


def run_touched(spec: Spec) -> Run:
    """Run with every output of every module in the loss, times zero: backward runs behind all."""
    zeros: list[Tensor] = []

    def touch(module: nn.Module, args: Any, output: Any) -> None:
        if not is_recompute():
            zeros.extend(t.sum() * 0 for t in flatten(output) if t is not None and t.requires_grad)

    def prepare(done: Run) -> None:
        assert done.model is not None
        for module in done.model.modules():
            module.register_forward_hook(touch)

    return run(spec, prepare=prepare, more=zeros)


def _copy_values(
    done: Run,
    name: str,
    module: nn.Module,
    aliases: list[tuple[Tensor, int, bool]],
    inputs: list[tuple[Place, Tensor, int]],
) -> None:
    visits = iter(range(1000))
    received: list[dict[int, int]] = []

    def copies(tree: Any) -> list[Tensor | None]:
        return [None if t is None else t.detach().clone() for t in flatten(tree)]

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = flatten((args, kwargs))
        received.append({id(t): t._version for t in leaves if t is not None})
        if not is_recompute():
            place = (name, next(visits), "input")
            done.values[place] = copies((args, kwargs))
            inputs.extend((place, t, t._version) for t in leaves if t is not None)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        came = received.pop()
        for tensor in flatten(output):
            if tensor is None or not tensor.requires_grad:
                continue
            own = is_own(tensor, came)
            done.tap_would_regroup |= not own and (tensor.is_leaf or id(tensor) in came)
            if not own or id(tensor) in came:
                aliases.append((tensor, tensor._version, own))
        if not is_recompute():
            visit = max(v for n, v, _ in done.values if n == name)
            done.values[name, visit, "output"] = copies(output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True)


def run_probed(spec: Spec, port: str) -> Run:
    """Run so that torch itself tells the gradient of every value at one port of every module.

    What a module gives as its own gets a tensor hook. An input, an output that is a view, or one
    that is an input or a parameter handed back, has a part in the gradient of another tensor: there
    a zero is added, and the zero's gradient is the one. Checkpoints are off: they change no
    gradient, and a probe in a recompute would get none.
    """

    def prepare(done: Run) -> None:
        assert done.model is not None
        for name, module in done.model.named_modules():
            _probe(done, name, module, port)

    return run(spec, prepare=prepare, checkpoints=False)


def _probe(done: Run, name: str, module: nn.Module, port: str) -> None:
    visits = iter(range(1000))
    received: list[dict[int, int]] = []

    def add(tree: Any, came: dict[int, int] | None) -> Any:
        added: dict[int, tuple[Tensor, Tensor]] = {}

        def change(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            if id(tensor) not in added:
                probe = torch.zeros_like(tensor).requires_grad_()
                if came is not None and is_own(tensor, came):
                    tensor.register_hook(lambda grad: setattr(probe, "grad", grad.clone()))
                    added[id(tensor)] = (probe, tensor)
                else:
                    added[id(tensor)] = (probe, tensor + probe)
            return added[id(tensor)][1]

        new = rebuild(tree, change)
        done.probes[name, next(visits), port] = [
            added[id(t)][0] if t is not None and id(t) in added else None for t in flatten(tree)
        ]
        return new

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        received.append({id(t): t._version for t in flatten((args, kwargs)) if t is not None})
        return add((args, kwargs), None) if port == "input" else None

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        came = received.pop()
        return add(output, came) if port == "output" else None

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def is_own(tensor: Tensor, came: dict[int, int]) -> bool:
    """Tell whether an output is no view, no leaf and no input handed back unchanged."""
    return not (tensor.is_leaf or tensor._is_view() or came.get(id(tensor)) == tensor._version)
