"""A loss that is not finite is looked into when backward is called on it, whoever steps later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import is_clean
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trainings import batches

import hookline as hl
from hookline._errors import BadTraining
from hookline.replays import Origin
from hookline.watchers.recording import Recorder
from hookline.watchers.seeking import Seeker


class Dividing(nn.Module):
    """Divides by the sum of what it is given besides."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        h = self.fc(x).square().sum(-1)
        return (weights * h).sum() / weights.sum()


def step_by_hand(model: nn.Module, loss: Tensor) -> None:
    """Change the weights as a script would that has no optimizer."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for one, gradient in zip(parameters, gradients, strict=True):
            one.sub_(0.01 * gradient)


def train_by_hand(model: Dividing, steps: int, bad: int) -> None:
    for number, batch in enumerate(batches(5, 3, count=steps)):
        step_by_hand(model, model(batch, torch.full((5,), float(number != bad))))


def test_gradients_asked_for_by_hand_make_steps_and_the_first_nan_is_named() -> None:
    model = Dividing()
    own = torch.autograd.grad
    with hl.watch(model) as watched:
        train_by_hand(model, 30, bad=20)
    assert torch.autograd.grad is own
    assert is_clean(model)
    assert 20 <= len(watched.history.steps) <= 30
    (found,) = [one for one in watched.findings if one.rule == "non-finite"]
    assert found.site == "/div"
    assert "division by zero" in found.message
    assert found.more["origin"]["cause"] == "operation"


def test_bad_loss_without_any_step_is_raised_after_its_backward() -> None:
    model = Dividing()
    with hl.watch(model, on_finding="raise"), pytest.raises(BadTraining, match="/div made the"):
        train_by_hand(model, 3, bad=1)
    assert all(one.isfinite().all() for one in model.parameters())


def test_step_that_is_left_out_still_tells_where_it_came_from() -> None:
    model = Dividing()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with hl.watch(model) as watched:
        for number, batch in enumerate(batches(5, 3, count=6)):
            optimizer.zero_grad()
            loss = model(batch, torch.full((5,), float(number != 3)))
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()
    (found,) = [one for one in watched.findings if one.rule == "non-finite"]
    assert found.site == "/div"


def test_gradients_for_a_penalty_are_no_backward() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with hl.watch(model) as watched:
        for batch in batches(5, 3, count=12):
            batch.requires_grad_()
            (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
            optimizer.zero_grad()
            (model(batch).square().mean() + slope.square().sum()).backward()
            optimizer.step()
    assert len(watched.history.steps) == 12
    assert len(watched.scalar("loss").values) == 12


class Checkpointed(nn.Module):
    """Runs a layer again inside of the backward, which is a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.is_bad = False

    def inside(self, h: Tensor) -> Any:
        return self.second(h).sqrt() if self.is_bad else self.second(h)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inside, self.first(x) * (not self.is_bad), use_reentrant=True)


def test_backward_inside_of_a_backward_is_no_loss_of_its_own() -> None:
    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    expected = []
    with hl.watch(model) as watched:
        for batch in batches(5, 3, count=12):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    assert watched.scalar("loss").values.tolist() == pytest.approx(expected)


def test_backward_inside_of_a_backward_is_replayed_unheard() -> None:
    model = Checkpointed()
    with torch.no_grad():
        model.second.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with hl.watch(model) as watched:
        for number, batch in enumerate(batches(5, 3, count=4)):
            model.is_bad = number == 2
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    (found,) = [one for one in watched.findings if one.rule == "non-finite"]
    assert found.step == 2
    assert found.more["origin"]["operation"] == "SqrtBackward0"
    assert len(watched.history.steps) == 4


@pytest.mark.parametrize("cause", ["operation", "parameter", "input"])
def test_nobody_else_is_asked_where_a_call_shows_it(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    seeker = Seeker(Recorder(), is_wanted=True)
    seeker.others.append(lambda: asked.append(1))
    seeker.keep(nn.Linear(2, 2), (torch.zeros(1, 2),), {}, "")
    shown = Origin("fc.weight", cause=cause)
    monkeypatch.setattr("hookline.watchers.seeking.find_origin_apart", lambda *_, **__: shown)
    assert seeker.seek({"value"}) is shown
    assert not asked


def test_others_are_asked_where_no_call_could_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    seeker = Seeker(Recorder(), is_wanted=True)
    other = Origin("train.py:3/log")
    seeker.others.append(lambda: other)
    seeker.keep(nn.Linear(2, 2), (torch.zeros(1, 2),), {}, "")
    hidden = Origin("", cause="not reproduced")
    monkeypatch.setattr("hookline.watchers.seeking.find_origin_apart", lambda *_, **__: hidden)
    assert seeker.seek({"value"}) is other


def test_loss_that_a_scaler_makes_infinite_is_not_looked_into() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    with hl.watch(model) as watched:
        for batch in batches(5, 3, count=3):
            optimizer.zero_grad()
            scaler.scale(model(batch * 1e6).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not watched._steps._was_bad
    assert not watched.findings
