"""Trainings in which nothing is wrong, beside a threshold: large numbers, one large step, ends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from healthy_trainings import classify
from rule_networks import CLASSES, VOCABULARY, mlp, points, texts
from rule_trainings import Training, fit, healthy
from torch import Tensor, nn


@healthy
def bert_classifier() -> Training:
    """A BERT with pooler and head, whose small weights make the gradient small once"""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)

    def loss(number: int) -> Tensor:
        ids = texts(8, 10)
        return model(input_ids=ids, labels=ids[:, 0] % 2).loss

    return fit(model, loss, torch.optim.AdamW(model.parameters(), lr=3e-5), steps=30)


@healthy
def small_head_of_three() -> Training:
    """A head of three layers with small weights after a body that is as usual"""
    model = mlp(32, 10)
    for layer in model[:-5:2]:
        nn.init.kaiming_normal_(layer.weight)
    for layer in model[-5::2]:
        nn.init.normal_(layer.weight, std=0.01)
    return fit(model, lambda n: classify(model, points()), steps=40)


@healthy
def solved_linear_double() -> Training:
    """A linear model in float64 that its first step makes many times larger, until it is exact"""
    model = nn.Sequential(nn.Linear(6, 1)).double()
    x = torch.randn(80, 6, dtype=torch.float64)
    y = x @ torch.arange(2.0, 8.0, dtype=torch.float64)[:, None] - 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    return fit(model, lambda n: F.mse_loss(model(x), y), optimizer, steps=120)


@healthy
def logistic_from_zero() -> Training:
    """Weights that begin at zero, Adam at 0.1, labels that are half noise"""
    model = nn.Sequential(nn.Linear(64, 1))
    nn.init.zeros_(model[0].weight)

    def loss(number: int) -> Tensor:
        x = torch.randn(32, 64)
        y = (x[:, :1] + 2 * torch.randn(32, 1) > 0).float()
        return F.binary_cross_entropy_with_logits(model(x), y)

    return fit(model, loss, lr=0.1, steps=80)


@healthy
def restarts() -> Training:
    """A learning rate that falls to 0 again and again"""
    model = mlp(32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rates = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 15)

    def step(number: int) -> None:
        optimizer.zero_grad()
        classify(model, points()).backward()
        optimizer.step()
        rates.step()

    return Training(model, step, 90)


@healthy
def steep_decay() -> Training:
    """A learning rate that ends at a thousandth of a thousandth"""
    model = mlp(32, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 10 ** (-6 / 80))

    def step(number: int) -> None:
        optimizer.zero_grad()
        classify(model, points()).backward()
        optimizer.step()
        rates.step()

    return Training(model, step, 80)


@healthy
def raw_features_normalised() -> Training:
    """Features of a million, which a normalisation after the first layer brings down"""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), *mlp(32, 2, inputs=32))

    def loss(number: int) -> Tensor:
        x, y = points()
        return F.cross_entropy(model(x * 1e6), y)

    return fit(model, loss)


@healthy
def raw_features_rescaled() -> Training:
    """Features of a million, which the model itself divides before its first layer"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x / 1e6)

    model = Net()

    def loss(number: int) -> Tensor:
        x, y = points()
        return F.cross_entropy(model(x * 1e6), y)

    return fit(model, loss)


@healthy
def loud_audio() -> Training:
    """Samples of 16 bits into convolutions with normalisation"""
    layers: list[nn.Module] = [nn.Conv1d(1, 16, 9, stride=4), nn.BatchNorm1d(16), nn.ReLU()]
    layers += [nn.Conv1d(16, 32, 5, stride=2), nn.BatchNorm1d(32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, CLASSES))

    def loss(number: int) -> Tensor:
        y = torch.randint(0, CLASSES, (16,))
        time = torch.arange(128) / 128
        wave = torch.sin(6.28 * (2.0 + 4 * y[:, None]) * time) + 0.1 * torch.randn(16, 128)
        return F.cross_entropy(model((wave * 12000).round()[:, None]), y)

    return fit(model, loss, lr=3e-3, steps=50)


@healthy
def large_targets_again() -> Training:
    """A trained model whose last layer was made to give tens of thousands, and that goes on"""
    model = mlp(32, 3, outputs=1)

    def loss(number: int, scale: float = 1.0) -> Tensor:
        x, _ = points()
        return F.mse_loss(model(x), scale * x[:, :1])

    earlier = fit(model, loss, lr=5e-3)
    for number in range(100):
        earlier.step(number)
    with torch.no_grad():
        for one in model[-1].parameters():
            one.mul_(3e4)
    return fit(model, lambda n: loss(n, 3e4), lr=1e-3, steps=60)


@healthy
def black_and_white() -> Training:
    """Pictures of -1 and 1 that a tanh at the end learns to give exactly"""
    model = nn.Sequential(*mlp(64, 3, inputs=CLASSES, outputs=36), nn.Tanh())
    pictures = torch.randn(CLASSES, 36, generator=torch.Generator().manual_seed(3)).sign()

    def loss(number: int) -> Tensor:
        y = torch.randint(0, CLASSES, (32,))
        return F.mse_loss(model(F.one_hot(y, CLASSES).float()), pictures[y])

    return fit(model, loss, lr=2e-2, steps=120)


@healthy
def black_and_white_again() -> Training:
    """The same with a model that has learned it before"""
    training = black_and_white()
    for number in range(200):
        training.step(number)
    return training


@healthy
def rare_labels() -> Training:
    """Twenty labels that hardly ever hold, each with a sigmoid of its own"""
    model = nn.Sequential(*mlp(64, 3, outputs=20), nn.Sigmoid())
    ways = torch.randn(16, 20, generator=torch.Generator().manual_seed(3))

    def loss(number: int) -> Tensor:
        x = torch.randn(64, 16)
        return F.binary_cross_entropy(model(x), (x @ ways > 9).float())

    return fit(model, loss, lr=1e-2, steps=120)


@healthy
def table_of_units() -> Training:
    """A table with channels ten times as large as others, and a normalisation after it"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(VOCABULARY, 32), nn.LayerNorm(32)
            self.head = mlp(32, 2, inputs=32, outputs=VOCABULARY)
            with torch.no_grad():
                self.table.weight[:, :3] *= 10

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.norm(self.table(ids)))

    model = Net()

    def loss(number: int) -> Tensor:
        ids = texts()
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return fit(model, loss, lr=3e-3, steps=50)


@healthy
def encoder_of_small_scale() -> Training:
    """An encoder whose output is made very small, under an optimizer that makes up for it"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.norm = mlp(32, 3, outputs=32), nn.LayerNorm(32, eps=1e-20)
            self.head = mlp(32, 2, inputs=32)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(1e-7 * self.encoder(x)))

    model = Net()
    return fit(model, lambda n: classify(model, points()), steps=60)
