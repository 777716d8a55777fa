"""Trainings in which something is wrong: numbers that are not finite, or too narrow types."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from healthy_trainings import classify
from rule_networks import CLASSES, GPT, convnet, images, mlp, next_token_loss, points, texts
from rule_trainings import Training, broken, fit
from torch import Tensor, nn


class Poison(nn.Module):
    """Lets values pass until a step comes in which it breaks them."""

    def __init__(self, at: int, value: float = float("nan")) -> None:
        super().__init__()
        self.at, self.value, self.calls = at, value, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.value if self.calls > self.at else x * 1.0


@broken("non-finite", site="blocks.1.mlp.1")
def nan_in_forward() -> Training:
    """A module in the middle of a GPT that returns NaN from step 20 on"""
    model = GPT(blocks=3)
    model.blocks[1].mlp[1] = nn.Sequential(nn.GELU(), Poison(20))
    return fit(model, lambda n: next_token_loss(model, texts()), steps=30)


@broken("non-finite", site="2")
def infinity_in_forward() -> Training:
    """A module that returns infinity from step 10 on"""
    model = mlp(32, 3)
    model[1] = nn.Sequential(nn.ReLU(), Poison(10, float("inf")))
    model = nn.Sequential(model[0], model[1][0], model[1][1], *model[2:])
    return fit(model, lambda n: classify(model, points()), steps=20)


@broken("non-finite", site=":input")
def nan_in_data() -> Training:
    """A batch with a NaN at step 15"""
    model = convnet()

    def loss(number: int) -> Tensor:
        x, y = images()
        if number == 15:
            x[3, 0, 2, 2] = float("nan")
        return F.cross_entropy(model(x), y)

    return fit(model, loss, steps=25)


@broken("non-finite", site="4.weight")
def nan_in_parameter() -> Training:
    """A parameter that is NaN from the start"""
    model = mlp(32, 3)
    with torch.no_grad():
        model[4].weight[1, 2] = float("nan")
    return fit(model, lambda n: classify(model, points()), steps=8)


@broken("non-finite")
def nan_in_loss() -> Training:
    """A loss that divides by a count of zero at step 12"""
    model = mlp(32, 3)

    def loss(number: int) -> Tensor:
        x, y = points()
        losses = F.cross_entropy(model(x), y, reduction="none")
        weights = torch.zeros(32) if number == 12 else torch.ones(32)
        return (losses * weights).sum() / weights.sum()

    return fit(model, loss, steps=20)


@broken("non-finite")
def log_of_zero() -> Training:
    """A loss with log(0) at step 12"""
    model = nn.Sequential(*mlp(32, 3), nn.Softmax(-1))

    def loss(number: int) -> Tensor:
        x, y = points()
        chances = model(x).gather(1, y[:, None])
        return -(chances * (0.0 if number == 12 else 1.0)).log().mean()

    return fit(model, loss, steps=20)


class Distances(nn.Module):
    """Classify points by their distances to all others, each one's own included, which is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head((h[:, None] - h).square().sum(-1).sqrt())


@broken("non-finite")
def root_of_zero() -> Training:
    """A root whose derivative is infinite at zero; forward everything is finite"""
    model = Distances()
    return fit(model, lambda n: classify(model, points()), steps=8)


@broken("non-finite", site="blocks.0")
def nan_at_once() -> Training:
    """NaN in the very first step"""
    model = GPT(blocks=2)
    model.blocks[0].mlp[1] = Poison(0)
    return fit(model, lambda n: next_token_loss(model, texts()), steps=4)


@broken("non-finite")
def masked_row() -> Training:
    """Attention in which a row is masked as a whole at step 9"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
            self.head = nn.Linear(16, CLASSES)
            self.hidden = torch.zeros(8, dtype=torch.bool)

        def forward(self, x: Tensor) -> Tensor:
            x = x.view(-1, 8, 16)
            scores = self.query(x) @ self.key(x).transpose(1, 2)
            scores = scores.masked_fill(self.hidden, float("-inf"))
            return self.head(scores.softmax(-1) @ x).flatten(0, 1)

    model = Net()

    def loss(number: int) -> Tensor:
        model.hidden = torch.arange(8) < (8 if number == 9 else 3)
        return classify(model, points())

    return fit(model, loss, steps=15)


@broken("non-finite")
def infinite_update() -> Training:
    """An optimizer that divides by the root of nothing"""
    model = mlp(32, 3)
    nn.init.constant_(model[0].bias, -50.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0)
    return fit(model, lambda n: classify(model, points()), optimizer, steps=10)


@broken("non-finite", "headroom")
def overflow_in_half() -> Training:
    """Values that grow past the end of float16"""
    model = mlp(32, 4)
    with torch.no_grad():
        model[0].weight.mul_(400)
        model[2].weight.mul_(400)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = classify(model, points())
        loss.backward()
        optimizer.step()

    return Training(model, step, 10)


@broken("headroom", site="2")
def little_headroom() -> Training:
    """Values near the end of float16"""
    model = mlp(32, 4)
    with torch.no_grad():
        model[2].weight.mul_(30000 / 2)
        model[4].weight.mul_(1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)

    def step(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = classify(model, points())
        loss.backward()
        optimizer.step()

    return Training(model, step, 10)


@broken("underflow")
def half_without_scaler() -> Training:
    """float16 autocast without a scaler, and a loss that is small"""
    model = mlp(64, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = classify(model, points(64)) * 1e-3
        loss.backward()
        optimizer.step()

    return Training(model, step, 40)


@broken("non-finite")
def scaler_without_end() -> Training:
    """A gradient that is NaN at any scale, step after step, under a GradScaler"""
    model = Distances()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")

    def step(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = classify(model, points())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Training(model, step, 30)


@broken("lost-updates")
def lost_in_brain_float() -> Training:
    """Weights in bfloat16 and a learning rate that is too small for them"""
    model = mlp(32, 4).bfloat16()

    def loss(number: int) -> Tensor:
        x, y = points()
        return F.cross_entropy(model(x.bfloat16()).float(), y)

    return fit(model, loss, lr=2e-5, steps=40)
