"""Trainings in which something is wrong: weights, rates, activations, gradients that go missing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from healthy_trainings import classify
from rule_networks import (
    CLASSES,
    GPT,
    VOCABULARY,
    convnet,
    images,
    mlp,
    next_token_loss,
    points,
    texts,
)
from rule_trainings import Training, broken, fit
from torch import Tensor, nn


def _scale(model: nn.Module, factor: float, *, only: type = nn.Linear) -> None:
    """Multiply the weights of all layers."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, only):
                for one in module.parameters(recurse=False):
                    one.mul_(factor)


@broken("vanishing")
def deep_sigmoid() -> Training:
    """Twelve layers with sigmoid"""
    model = mlp(32, 12, act=nn.Sigmoid)
    return fit(model, lambda n: classify(model, points()), steps=40)


@broken("vanishing")
def eight_sigmoids() -> Training:
    """Eight layers with sigmoid, SGD"""
    model = mlp(64, 8, act=nn.Sigmoid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fit(model, lambda n: classify(model, points()), optimizer, steps=40)


@broken("vanishing")
def deep_tanh_small() -> Training:
    """Ten layers with tanh and weights of 0.03"""
    model = mlp(32, 10, act=nn.Tanh)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.03)
    return fit(model, lambda n: classify(model, points()), steps=40, lr=1e-4)


@broken("vanishing", "init-scale", "dead-units")
def small_initialisation() -> Training:
    """Twelve layers, all weights times 0.01"""
    model = mlp(32, 12)
    _scale(model, 0.01)
    return fit(model, lambda n: classify(model, points()), steps=40)


@broken("init-scale", "exploding")
def large_initialisation() -> Training:
    """Eight layers, all weights times 20"""
    model = mlp(32, 8)
    _scale(model, 20)
    return fit(model, lambda n: classify(model, points()), steps=40)


@broken("init-scale", "exploding")
def large_initialisation_of_gpt() -> Training:
    """A GPT whose linear layers are 20 times as large"""
    model = GPT(blocks=4)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=20 * module.in_features**-0.5)
    return fit(model, lambda n: next_token_loss(model, texts()), steps=40)


@broken("update-ratio", "exploding", "non-finite")
def rate_times_thousand() -> Training:
    """SGD at 20 instead of 0.02"""
    model = mlp(32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    return fit(model, lambda n: classify(model, points()), optimizer)


@broken("update-ratio", "exploding", "non-finite")
def rate_times_thousand_of_gpt() -> Training:
    """AdamW at 1 instead of 1e-3"""
    model = GPT(blocks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    return fit(model, lambda n: next_token_loss(model, texts()), optimizer, steps=40)


@broken("update-ratio", "exploding")
def adam_at_three() -> Training:
    """Adam with a learning rate of 3"""
    model = mlp(32, 4)
    return fit(model, lambda n: classify(model, points()), lr=3.0)


@broken("update-ratio", "exploding")
def adam_at_three_with_norm() -> Training:
    """The same in a network that normalises its values"""
    model = convnet()
    return fit(model, lambda n: classify(model, images()), lr=3.0, steps=40)


@broken("exploding", "non-finite", "update-ratio")
def diverging_regression() -> Training:
    """A rate at which every step makes the error larger"""
    model = mlp(32, 2, outputs=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss(number: int) -> Tensor:
        x, _ = points()
        return F.mse_loss(model(x), x.sum(1, keepdim=True))

    return fit(model, loss, optimizer)


@broken("exploding")
def diverging_slowly() -> Training:
    """A linear model just above the rate that it can bear"""
    model = nn.Sequential(nn.Linear(16, 1))
    x = torch.randn(64, 16)
    y = x[:, :1]
    largest = torch.linalg.eigvalsh(x.T @ x / 64)[-1]
    optimizer = torch.optim.SGD(model.parameters(), lr=float(1.08 / largest))
    return fit(model, lambda n: F.mse_loss(model(x), y), optimizer, steps=100)


@broken("exploding", "non-finite", "update-ratio")
def rising_rate() -> Training:
    """A schedule that grows where it should fall"""
    model = mlp(32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 * 1.25**number
        optimizer.zero_grad()
        classify(model, points()).backward()
        optimizer.step()

    return Training(model, step, 80)


@broken("update-ratio")
def rate_of_zero() -> Training:
    """A learning rate of 0"""
    model = mlp()
    return fit(model, lambda n: classify(model, points()), lr=0.0)


@broken("update-ratio")
def rate_of_nothing() -> Training:
    """A learning rate of 1e-12"""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    return fit(model, lambda n: classify(model, images()), optimizer, steps=30)


@broken("dead-units", site="3")
def dead_layer() -> Training:
    """A layer of ReLUs with biases of -10"""
    model = mlp(32, 4)
    nn.init.constant_(model[2].bias, -10.0)
    return fit(model, lambda n: classify(model, points()), steps=40)


@broken("dead-units", site="two")
def dead_layer_functional() -> Training:
    """The same with F.relu, which is no module"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 5)
            nn.init.constant_(self.two.bias, -10.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.three(F.relu(self.two(F.relu(self.one(x)))))

    model = Net()
    return fit(model, lambda n: classify(model, points()), steps=40)


@broken("dead-units", "update-ratio", "exploding")
def killed_units() -> Training:
    """One step that is far too large"""
    model = mlp(32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(number: int) -> None:
        optimizer.param_groups[0]["lr"] = 50.0 if number == 5 else 0.05
        optimizer.zero_grad()
        classify(model, points()).backward()
        optimizer.step()

    return Training(model, step, 60)


@broken("no-gradient", site="branch")
def detached_branch() -> Training:
    """A branch whose output is detached"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.branch = nn.Linear(16, 32), nn.Linear(32, 32)
            self.head = nn.Linear(32, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x).relu()
            return self.head(h + self.branch(h).detach())

    model = Net()
    return fit(model, lambda n: classify(model, points()), steps=40)


@broken("no-gradient", site="features")
def detached_features() -> Training:
    """Features that are computed without grad, in an optimizer that should train them"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = mlp(32, 3, outputs=32), nn.Linear(32, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(x).detach())

    model = Net()
    return fit(model, lambda n: classify(model, points()), steps=40)


@broken("no-gradient", site="scale")
def value_of_parameter() -> Training:
    """A parameter that is used by its .data"""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(32))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor.data

    model = nn.Sequential()
    model.add_module("stem", nn.Linear(16, 32))
    model.add_module("scale", Scaled())
    model.add_module("head", nn.Linear(32, CLASSES))
    return fit(model, lambda n: classify(model, points()), steps=40)


@broken("saturation", "vanishing", "init-scale", "exploding", site="1")
def saturated_tanh() -> Training:
    """Weights before tanh that are 20 times too large"""
    model = mlp(32, 4, act=nn.Tanh)
    _scale(model, 20)
    return fit(model, lambda n: classify(model, points()), steps=40)


@broken("exploding", "non-finite", "init-scale")
def exploding_recurrence() -> Training:
    """A recurrence without bounds whose weights are too large"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.within = nn.Embedding(VOCABULARY, 24), nn.Linear(24, 24)
            self.head = nn.Linear(24, VOCABULARY)
            nn.init.normal_(self.within.weight, std=0.5)

        def forward(self, ids: Tensor) -> Tensor:
            state, out = torch.zeros(len(ids), 24), []
            for place in range(ids.shape[1]):
                state = F.relu(self.within(state) + self.embed(ids[:, place]))
                out.append(self.head(state))
            return torch.stack(out, 1)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return fit(model, lambda n: next_token_loss(model, texts(8, 24)), optimizer, steps=40)


@broken("exploding", "spike")
def growing_outputs() -> Training:
    """Weights that something multiplies by 1.15 after every step"""
    model = mlp(32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step(number: int) -> None:
        optimizer.zero_grad()
        classify(model, points()).backward()
        optimizer.step()
        _scale(model, 1.15)

    return Training(model, step, 60)


@broken("outlier-channels", site="2")
def one_large_channel() -> Training:
    """A channel whose weights are 100 times as large"""
    model = mlp(64, 4, act=nn.GELU)
    with torch.no_grad():
        model[2].weight[7] *= 100
        model[4].weight[:, 7] *= 0.01
    return fit(model, lambda n: classify(model, points()), lr=1e-4, steps=60)


@broken("spike", site="0")
def bad_batch() -> Training:
    """One batch in another unit"""
    model = mlp(32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(number: int) -> Tensor:
        x, y = points()
        return F.cross_entropy(model(x * (1000 if number == 40 else 1)), y).clamp(max=20)

    return fit(model, loss, optimizer)
