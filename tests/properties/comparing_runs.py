"""When two runs of one model are the same, and when a model is as it was."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import torch
from torch import Tensor, nn
from twin_runs import Run

_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Tell whether two tensors are equal bit by bit, or both missing."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and a.detach().equal(b.detach())


def is_close(a: Tensor | None, b: Tensor | None) -> bool:
    """Tell whether two gradients differ by rounding only; none is as good as zeros."""
    if a is None or b is None:
        return a is b or not bool((a if b is None else b).any())  # type: ignore[union-attr]
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def assert_same_run(
    watched: Run,
    plain: Run,
    same_grad: Callable[[Tensor | None, Tensor | None], bool] = same_bits,
) -> None:
    """Check that watching changed nothing: values, buffers and random state to the bit."""
    assert watched.error is None
    assert len(watched.output) == len(plain.output)
    assert all(map(same_bits, watched.output, plain.output))
    for name, buffer in plain.buffers.items():
        assert same_bits(watched.buffers[name], buffer), name
    assert same_bits(watched.random_state, plain.random_state)
    assert watched.grads.keys() == plain.grads.keys()
    for name, grad in plain.grads.items():
        assert same_grad(watched.grads[name], grad), f"gradient of {name}"


def assert_no_trace(watched: Run, plain: Run) -> None:
    """Check that a model is as it was: no hooks, no attributes, a pickle that loads."""
    assert watched.model is not None
    assert plain.model is not None
    for module, twin in zip(watched.model.modules(), plain.model.modules(), strict=True):
        assert vars(module).keys() == vars(twin).keys()
        assert not any(getattr(module, name) for name in _HOOKS)
        for parameter in module.parameters(recurse=False):
            assert not parameter._backward_hooks
            assert not parameter._post_accumulate_grad_hooks
    states = watched.model.state_dict(), plain.model.state_dict()
    assert list(states[0]) == list(states[1])
    for name in states[0]:
        assert same_bits(states[0][name], states[1][name]), name
    copy = pickle.loads(pickle.dumps(watched.model))
    assert [type(module) for module in copy.modules()] == [
        type(module) for module in watched.model.modules()
    ]
