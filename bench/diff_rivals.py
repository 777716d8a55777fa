"""What rules that others use would have said of a case: the first module that each of them flags.

They look at what modules give, in the order in which they give it, then at the gradients of that
in the order in which they come, then at those of parameters, then at the updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from diff_cases import Side
from torch import Tensor, nn

WRAPPERS = ("module.", "_orig_mod.")


class Value(NamedTuple):
    """One tensor that was seen: what it is, and of which module."""

    key: tuple[Any, ...]
    module: str
    tensor: Tensor


def follow(side: Side) -> list[Value]:
    """Run one step, and list what its modules gave, the gradients, and the updates."""
    values: list[Value] = []
    gradients: list[Value] = []
    visits: dict[str, int] = {}
    handles = []

    def listen(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            visit = visits[path] = visits.get(path, -1) + 1
            for leaf, tensor in enumerate(_leaves(output)):
                values.append(Value((path, visit, leaf), path, tensor.detach().clone()))
                if tensor.requires_grad:
                    tensor.register_hook(_keep((path, visit, leaf, "grad"), path, gradients))

        return hook

    model = side.model
    for name, module in model.named_modules():
        if not name.startswith("_orig_mod"):
            handles.append(module.register_forward_hook(listen(_strip(name))))
    model.zero_grad()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    buffers = {name: one.detach().clone() for name, one in model.named_buffers()}
    torch.manual_seed(0)
    try:
        inputs = side.inputs
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        if side.loss is not None:
            side.loss(output).backward()
        rest = list(_end(side, before))
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
        with torch.no_grad():
            for name, one in [*model.named_parameters(), *model.named_buffers()]:
                one.copy_(before[name] if name in before else buffers[name])
    return [*values, *gradients, *rest]


def _keep(key: tuple[Any, ...], path: str, into: list[Value]) -> Callable[[Tensor], None]:
    return lambda grad: into.append(Value(key, path, grad.detach().clone()))


def _end(side: Side, before: dict[str, Tensor]) -> Iterator[Value]:
    """List the gradients of parameters, then what an optimizer did to them."""
    for name, one in side.model.named_parameters():
        if one.grad is not None:
            name = _strip(name)
            yield Value((name, "grad"), name.rpartition(".")[0], one.grad.detach().clone())
    if side.optimizer is None:
        return
    side.optimizer(side.model.parameters()).step()
    for name, one in side.model.named_parameters():
        moved = one.detach() - before[name]
        yield Value((_strip(name), "update"), _strip(name).rpartition(".")[0], moved)


def _strip(name: str) -> str:
    for wrapper in WRAPPERS:
        if f"{name}." == wrapper:
            return ""
        name = name.removeprefix(wrapper)
    return name


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _leaves(one)


def _cosine(x: Tensor, y: Tensor) -> bool:
    norms = float(x.norm() * y.norm())
    return norms > 0 and float((x * y).sum()) / norms < 0.99


def _allclose(x: Tensor, y: Tensor) -> bool:
    return not torch.allclose(x, y, equal_nan=True)


def _largest(x: Tensor, y: Tensor) -> bool:
    return x.numel() > 0 and float((x - y).abs().max()) >= 1e-3


def _statistics(x: Tensor, y: Tensor) -> bool:
    if not x.numel():
        return False
    for measure in (Tensor.max, Tensor.min, Tensor.mean, Tensor.norm):
        of_x, of_y = float(measure(x)), float(measure(y))
        if abs(of_x - of_y) > 0.5 * abs(of_x):
            return True
    return False


RULES: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "cosine below 0.99": _cosine,
    "torch.allclose": _allclose,
    "largest error 1e-3": _largest,
    "statistics off by 50%": _statistics,
}
"""What says of two tensors that they differ."""


def ask_rivals(a: list[Value], b: list[Value]) -> dict[str, str | None]:
    """Give for each rule the module of the first value that it flags; None: it flags none.

    Values are paired by name, visit and place in the output; another shape is a difference to all.
    """
    others = {value.key: value.tensor for value in b}
    answers: dict[str, str | None] = dict.fromkeys(RULES)
    waiting = dict(RULES)
    for value in a:
        other = others.get(value.key)
        if other is None:
            continue
        if value.tensor.shape != other.shape:
            flagged = list(waiting)
        else:
            pair = (value.tensor.double(), other.double())
            flagged = [name for name, rule in waiting.items() if rule(*pair)]
        for name in flagged:
            answers[name] = value.module
            del waiting[name]
        if not waiting:
            break
    return answers
