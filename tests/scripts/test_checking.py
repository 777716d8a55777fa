"""`hl.check`: a model judged by one batch, and untouched by it."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookline.rules import Rule, register_rule, rule
from hookline.scripts.checking import check


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
    )


X = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (32,), generator=torch.Generator().manual_seed(2))


def rules_of(found: Any) -> set[str]:
    return {one.rule for one in found.findings}


def test_healthy_model_is_ok() -> None:
    found = check(make(), X, loss=lambda output: F.cross_entropy(output, Y))
    assert found.ok
    assert found.findings == ()
    assert found.verdict.startswith("No findings in 1 step of ")
    assert found.loss == "the given loss"
    assert "non-finite" in found.judged
    assert "spike" in found.not_judged


def test_model_and_random_states_stay_as_they_are() -> None:
    model = make()
    model(X).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [one.grad for one in model.parameters()]
    values = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    versions = [one._version for one in model.parameters()]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    check(model, X, steps=3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.grad is old for one, old in zip(model.parameters(), gradients, strict=True))
    assert all(
        torch.equal(one.grad, old)
        for one, old in zip(model.parameters(), values, strict=True)
        if one.grad is not None
    )
    assert [one._version for one in model.parameters()] == versions
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def clear(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.zero_()


def test_optimizer_inside_the_backward_changes_nothing() -> None:
    model = make()
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(clear)
    before = copy.deepcopy(model.state_dict())
    check(model, X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.inner(x).relu() - 1e6)


def test_nan_is_found_with_its_operation() -> None:
    found = check(Logarithm(), X)
    assert not found.ok
    (finding,) = [one for one in found.findings if one.rule == "non-finite"]
    assert finding.site == "/log"
    assert "test_checking.py:" in finding.source
    assert finding.message in str(found)


def test_missing_gradient_is_found() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).detach())

    found = check(Detached(), X)
    assert "no-gradient" in rules_of(found)
    assert any(one.site.startswith("first") for one in found.findings)


def test_dead_layer_and_bad_start_are_found() -> None:
    dead = make()
    nn.init.constant_(dead[1].bias, -100.0)
    assert "dead-units" in rules_of(check(dead, X))
    deep = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
    for layer in deep:
        nn.init.normal_(layer.weight, std=20.0)
    assert rules_of(check(deep, X)) & {"init-scale", "exploding"}


def test_default_loss_is_named() -> None:
    model = make()
    assert check(model, X).loss == "the mean square of the output (no loss was given)"

    class OwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def forward(self, x: Tensor, labels: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            logits = self.inner(x)
            return {"loss": F.cross_entropy(logits, labels) * scale, "logits": logits}

    assert check(OwnLoss(), (X, Y)).loss == "the output's own `loss`"
    assert check(OwnLoss(), {"x": X, "labels": Y, "scale": 2.0}).loss == "the output's own `loss`"
    one = nn.Sequential(make(), nn.Flatten(0), nn.Linear(128, 1))
    assert check(one, X).loss == "the output, which is one number"


def test_loss_may_take_the_batch_too() -> None:
    def distance(output: Tensor, batch: Tensor) -> Tensor:
        return (output.sum() - batch.sum()).square()

    assert check(make(), X, loss=distance).loss == "the loss `distance`"


def test_wrong_arguments_are_explained() -> None:
    with pytest.raises(TypeError, match=r"hl\.check takes a model, not list"):
        check([], X)
    with pytest.raises(ValueError, match="steps=0: give how often"):
        check(make(), X, steps=0)
    with pytest.raises(TypeError, match="gave float, not a tensor"):
        check(make(), X, loss=lambda output: 1.0)
    with pytest.raises(TypeError, match="has no floating tensor to run backward"):
        check(nn.Sequential(make(), Argmax()), X)


class Argmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


def test_error_in_the_model_leaves_it_as_it_was() -> None:
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        check(model, torch.ones(2, 99))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())


def test_frozen_model_is_judged_forward_only() -> None:
    found = check(make().requires_grad_(False), X)
    assert found.ok
    assert any("forward only" in note for note in found.notes)


def test_registered_rules_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "_registered", dict(rule._registered))

    @register_rule
    class Own(Rule):
        name = "own"

        def see(self, step: Any) -> Any:
            yield self.find(step, "0", message="seen.")

    found = check(make(), torch.randn(16, 8))
    assert "own" in rules_of(found)
    assert "own" in found.judged
    assert "own" not in found.not_judged


def test_result_reads_well() -> None:
    found = check(Logarithm(), X)
    text = str(found)
    assert text.startswith(found.verdict)
    assert "judged from 1 step of" in text
    assert "not judged, for want of a training: " in text
    page = found._repr_html_()
    assert "<strong>" in page
    hostile = found.__class__("<script>", (), "x", 1, 1, (), ())
    assert "<script>" not in hostile._repr_html_()
    assert found.to_dict()["findings"][0]["rule"] == "non-finite"
