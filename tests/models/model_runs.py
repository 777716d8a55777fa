"""Run a real model once, watched or plain, and keep what matters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_models import Example
from torch import Tensor, nn
from torch.utils import _pytree

import hookline as hl


@dataclass
class Run:
    """The output, the loss, all gradients and the random state after one training step."""

    output: list[Tensor]
    loss: Tensor
    grads: dict[str, Tensor | None]
    random_state: Tensor
    got: Any = None
    seen: dict[str, list[list[Tensor]]] = field(default_factory=dict)


def tensors_of(tree: Any) -> list[Tensor]:
    """List the tensors of an output in order, as torch's own pytree finds them."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def step(example: Example, watch: AbstractContextManager[Any] | None = None) -> Run:
    """Run forward and backward from the same seed."""
    example.model.zero_grad(set_to_none=True)
    given = [tensor for tensor in tensors_of((example.args, example.kwargs)) if tensor.is_leaf]
    for tensor in given:
        tensor.grad = None
    torch.manual_seed(3)
    with warnings.catch_warnings():
        # The report of sites that were never called has tests of its own.
        warnings.filterwarnings("ignore", category=hl.HooklineWarning)
        with watch or nullcontext() as got:
            output = example.model(*example.args, **example.kwargs)
            loss = example.loss_of(output)
            loss.backward()
    grads = {name: p.grad for name, p in example.model.named_parameters()}
    grads |= {f"argument {i}": tensor.grad for i, tensor in enumerate(given)}
    values = [tensor.detach() for tensor in tensors_of(output)]
    return Run(values, loss.detach(), grads, torch.get_rng_state(), got)


@contextmanager
def plain_hooks(model: nn.Module) -> Iterator[dict[str, list[list[Tensor]]]]:
    """Copy every module's outputs with torch's own hooks; one entry for each visit."""
    seen: dict[str, list[list[Tensor]]] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() == -1:  # not in a recompute
                copies = [tensor.detach().clone() for tensor in tensors_of(output)]
                seen.setdefault(name, []).append(copies)

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    yield seen
    for handle in handles:
        handle.remove()


def assert_same_tensors(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.equal(b)


def assert_same_run(watched: Run, plain: Run) -> None:
    """Check that two steps agree to the bit."""
    assert_same_tensors(watched.output, plain.output)
    assert watched.loss.equal(plain.loss)
    assert watched.random_state.equal(plain.random_state)
    assert watched.grads.keys() == plain.grads.keys()
    for name, grad in plain.grads.items():
        found = watched.grads[name]
        assert (found is None) is (grad is None), name
        assert grad is None or found is None or found.equal(grad), name


def assert_no_trace(model: nn.Module) -> None:
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def checkpoint_layers(model: Any, *, use_reentrant: bool) -> None:
    """Have a model of transformers recompute its layers, by either name that this has there."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})


def keep_layers(model: Any) -> None:
    """Undo `checkpoint_layers`."""
    newer = getattr(model, "activation_checkpointing_disable", None)
    (newer or model.gradient_checkpointing_disable)()
