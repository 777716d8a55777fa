"""Graft: two modules on the same input; which differs itself, and which only inherits."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from planted_gpt import (
    Gpt,
    detached,
    dropout_on,
    epsilon,
    exchange_forward,
    loss_of,
    make_gpt,
    make_words,
    missing_bias,
    missing_residual,
    softmax_dim,
    tanh_gelu,
    wrong_backward,
)
from torch import Tensor, nn

from hookline.comparisons.calling import StepCall
from hookline.comparisons.catching import NotCaught, catch_call
from hookline.comparisons.grafting import Graft, make_graft


def graft(
    a: nn.Module, b: nn.Module, path: str, *, backward: bool = False, visit: int = 0
) -> Graft:
    call = StepCall((make_words(),), {}, loss_of)
    return make_graft((a, b), (path, path), (call, call), backward=backward, visit=visit)


@pytest.mark.parametrize(
    ("plant", "path"),
    [
        (tanh_gelu, "blocks.1.mlp.act"),
        (epsilon, "blocks.1.ln2"),
        (missing_residual, "blocks.1"),
        (softmax_dim, "blocks.1.attn"),
        (dropout_on, "blocks.1.mlp.drop"),
        (missing_bias, "blocks.1.mlp.fc2"),
    ],
)
def test_graft_tells_the_module_that_differs_from_what_inherits(
    plant: Callable[[Gpt], None], path: str
) -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    plant(b)
    assert graft(a, b, path).error("forward") > 1e-6
    assert graft(a, b, "blocks.2").error("forward") == 0
    assert graft(a, b, "head").error("forward") == 0


@pytest.mark.parametrize(
    ("plant", "path"), [(detached, "blocks.1"), (wrong_backward, "blocks.1.mlp.act")]
)
def test_graft_in_backward_sends_the_gradient_of_a(plant: Callable[[Gpt], None], path: str) -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    plant(b)
    assert graft(a, b, path, backward=True).error("backward") > 0.1
    assert graft(a, b, path, backward=True).error("forward") < 1e-6
    assert graft(a, b, "blocks.0", backward=True).error("backward") == 0


class Renamed(nn.Module):
    """A linear layer whose argument has another name, with one more that is not a tensor."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor]:
        return (nn.functional.linear(hidden, self.weight, self.bias) * scale,)


class First(nn.Module):
    """Take the first of what a module gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return out[0] if isinstance(out, tuple) else out


def test_graft_binds_other_signatures_by_shape() -> None:
    linear = nn.Linear(4, 3)
    a, b = First(linear), First(Renamed(linear))
    call = StepCall((torch.randn(2, 4),))
    made = make_graft((a, b), ("inner", "inner"), (call, call))
    assert made.outputs == {"": 0.0}


def test_graft_of_modules_that_take_nothing_alike_says_so() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = Renamed(nn.Linear(2, 2))

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return self.fc(x @ x.T)

    a, b = nn.Sequential(nn.Linear(4, 4)), Square()
    call = StepCall((torch.randn(2, 4),))
    with pytest.raises(NotCaught, match="no argument of the same shape"):
        make_graft((a, b), ("0", "fc"), (call, call))


def test_catch_says_when_a_module_was_not_called() -> None:
    model = make_gpt()
    exchange_forward(model.blocks[0], lambda self, x: x)
    call = StepCall((make_words(),))
    with pytest.raises(NotCaught, match=r"`blocks\.0\.attn` was called not at all"):
        catch_call(model, "blocks.0.attn", call)
    with pytest.raises(NotCaught, match=r"`blocks\.1` was called only 1 times"):
        catch_call(model, "blocks.1", call, visit=1)
    with pytest.raises(NotCaught, match="`nowhere` is no module of `Gpt`"):
        catch_call(model, "nowhere", call)


def test_graft_takes_the_visit_that_is_meant() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x))

    model, x = Twice(), torch.randn(2, 3)
    first, second = (catch_call(model, "fc", StepCall((x,)), visit=visit) for visit in (0, 1))
    assert torch.equal(first.args[0], x)
    assert torch.equal(second.args[0], model.fc(x))


def test_graft_has_the_random_numbers_of_the_call() -> None:
    """Dropout in training: the second of two draws what it drew in the step."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)).train()
    call = StepCall((torch.ones(1000),))
    made = make_graft((model, copy.deepcopy(model)), ("1", "1"), (call, call))
    assert made.error("forward") == 0


def test_graft_leaves_models_as_they_were() -> None:
    a = make_gpt(training=True)
    b = copy.deepcopy(a)
    tanh_gelu(b)
    loss_of(a(make_words())).backward()
    before = copy.deepcopy(a.state_dict())
    grads = [one.grad for one in a.parameters()]
    values = [one.clone() for one in grads]
    state = torch.get_rng_state()
    graft(a, b, "blocks.1.mlp", backward=True)
    assert all(torch.equal(before[name], one) for name, one in a.state_dict().items())
    assert all(one.grad is old for one, old in zip(a.parameters(), grads, strict=True))
    assert all(torch.equal(old, one) for old, one in zip(grads, values, strict=True))
    assert all(one.grad is None for one in b.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in [*a.modules(), *b.modules()])
