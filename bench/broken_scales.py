"""Trainings in which something is wrong: numbers of the wrong size, rates that end too early."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from healthy_trainings import classify
from rule_networks import CLASSES, VOCABULARY, images, mlp, next_token_loss, points, texts
from rule_trainings import Training, broken, fit
from torch import Tensor, nn


class _Lookup(nn.Module):
    """A table, and a perceptron for what is found in it."""

    def __init__(self, width: int = 32, *, std: float = 1.0, divisor: float = 1.0) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.head = mlp(32, 2, inputs=width, outputs=VOCABULARY)
        self.divisor = divisor
        nn.init.normal_(self.table.weight, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids) / self.divisor)


@broken("init-scale", site="table")
def huge_table() -> Training:
    """A table that begins with a spread of 2000"""
    model = _Lookup(std=2e3)
    return fit(model, lambda n: next_token_loss(model, texts()), steps=30)


@broken("init-scale", site="0")
def raw_features() -> Training:
    """Features of a hundred thousand, as they are"""
    model = mlp(32, 4)

    def loss(number: int) -> Tensor:
        x, y = points()
        return F.cross_entropy(model(x * 1e5), y)

    return fit(model, loss, steps=30)


@broken("init-scale")
def raw_features_of_linear() -> Training:
    """The same in a linear model"""
    model = nn.Sequential(nn.Linear(16, CLASSES))

    def loss(number: int) -> Tensor:
        x, y = points()
        return F.cross_entropy(model(x * 1e5), y)

    return fit(model, loss, steps=30)


@broken("lost-updates", site="table")
def lost_in_large_weights() -> Training:
    """Weights of 50000 in float32, of which the model makes small numbers, Adam at 1e-4"""
    model = _Lookup(std=5e4, divisor=5e4)
    return fit(model, lambda n: next_token_loss(model, texts()), lr=1e-4, steps=40)


@broken("update-ratio")
def rate_decays_with_every_batch() -> Training:
    """A schedule for epochs that steps with every batch"""
    model = mlp(32, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.2)

    def step(number: int) -> None:
        optimizer.zero_grad()
        classify(model, points()).backward()
        optimizer.step()
        rates.step()

    return Training(model, step, 80)


@broken("update-ratio")
def schedule_of_fewer_steps() -> Training:
    """A schedule that is at zero after a quarter of the training"""
    model = mlp(32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / 20))

    def step(number: int) -> None:
        optimizer.zero_grad()
        classify(model, points()).backward()
        optimizer.step()
        rates.step()

    return Training(model, step, 80)


@broken("outlier-channels", site="0")
def one_large_filter() -> Training:
    """A filter of a convolution whose weights are 200 times as large"""
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 3, padding=1), nn.GELU()]
    layers += [nn.Conv2d(32, 16, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(16, CLASSES))
    with torch.no_grad():
        model[0].weight[5] *= 200
        model[2].weight[:, 5] *= 0.005
    return fit(model, lambda n: classify(model, images()), lr=1e-4, steps=45)


@broken("outlier-channels", site="table")
def one_large_dimension() -> Training:
    """A dimension of a table in other units, 150 times as large"""
    model = _Lookup(48)
    with torch.no_grad():
        model.table.weight[:, 9] *= 150
    return fit(model, lambda n: next_token_loss(model, texts()), steps=45)


@broken("vanishing", site="encoder")
def factor_that_takes_the_gradient() -> Training:
    """A factor of 1e-8 between an encoder and what follows, SGD with momentum"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = mlp(32, 3, outputs=32)
            self.body = mlp(32, 3, inputs=32)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(1e-8 * self.encoder(x))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return fit(model, lambda n: classify(model, points()), optimizer, steps=40)


@broken("saturation", "exploding", site="3")
def tanh_for_large_targets() -> Training:
    """A tanh at the end of a model whose targets are around 50"""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 24), nn.Tanh())

    def loss(number: int) -> Tensor:
        x = torch.randn(32, 16)
        return F.mse_loss(model(x), 50 + x[:, :1].expand(-1, 24))

    return fit(model, loss, lr=2e-2, steps=100)


@broken("update-ratio", "dead-units", "exploding")
def step_of_a_bad_batch() -> Training:
    """Targets that are wrong once, and one step that throws the weights far away"""
    model = mlp(32, 3, outputs=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(number: int) -> Tensor:
        x = torch.rand(32, 16)
        return F.mse_loss(model(x), x[:, :1] + (-500 if number == 12 else 2))

    return fit(model, loss, optimizer, steps=50)
