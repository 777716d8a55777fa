"""Trainings in which nothing is wrong: ways of training, precisions, scales, schedules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from healthy_trainings import classify
from rule_networks import (
    CLASSES,
    GPT,
    VOCABULARY,
    LowRank,
    convnet,
    images,
    mlp,
    next_token_loss,
    points,
    texts,
)
from rule_trainings import Training, fit, healthy
from torch import Tensor, nn


@healthy
def tiny_loss() -> Training:
    """The loss times 1e-5"""
    model = GPT(blocks=2)
    return fit(model, lambda n: next_token_loss(model, texts()) * 1e-5, lr=3e-3)


@healthy
def huge_loss() -> Training:
    """The loss times 65536"""
    model = mlp(32, 4)
    return fit(model, lambda n: classify(model, points()) * 65536)


@healthy
def half_with_scaler() -> Training:
    """float16 autocast with a GradScaler"""
    model = mlp(32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def step(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = classify(model, points())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Training(model, step, 60)


@healthy
def half_with_overflows() -> Training:
    """A scaler that begins far too high, and finds its scale by leaving out steps"""
    model = GPT(blocks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=10)

    def step(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = next_token_loss(model, texts(4))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Training(model, step, 40)


@healthy
def brain_autocast() -> Training:
    """bfloat16 autocast"""
    model = GPT(blocks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(model, texts())
        loss.backward()
        optimizer.step()

    return Training(model, step, 40)


@healthy
def pure_brain_float() -> Training:
    """Weights in bfloat16 with a learning rate that they can hold"""
    model = mlp(32, 4).bfloat16()

    def loss(number: int) -> Tensor:
        x, y = points()
        return F.cross_entropy(model(x.bfloat16()).float(), y)

    return fit(model, loss, lr=3e-3)


@healthy
def double_precision() -> Training:
    """float64"""
    model = mlp().double()

    def loss(number: int) -> Tensor:
        x, y = points()
        return F.cross_entropy(model(x.double()), y)

    return fit(model, loss)


@healthy
def accumulation() -> Training:
    """Four small batches for each step"""
    model = convnet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for _ in range(4):
            (classify(model, images(8)) / 4).backward()
        optimizer.step()

    return Training(model, step, 40)


def _trained(model: nn.Module, steps: int = 60) -> nn.Module:
    """Train a classifier of points before it is watched."""
    training = fit(model, lambda n: classify(model, points()), lr=5e-3)
    for number in range(steps):
        training.step(number)
    return model


@healthy
def fine_tuning() -> Training:
    """A trained model at a learning rate of 1e-6"""
    model = _trained(mlp(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    return fit(model, lambda n: classify(model, points()), optimizer)


@healthy
def fine_tuning_new_head() -> Training:
    """A head that begins at zero, all at 2e-5"""
    model = _trained(mlp(32, 4))
    assert isinstance(model[-1], nn.Linear)
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    return fit(model, lambda n: classify(model, points()), optimizer)


@healthy
def frozen_part() -> Training:
    """The first half is frozen, and still given to the optimizer"""
    model = _trained(mlp(32, 5))
    for layer in model[:4]:
        layer.requires_grad_(False)
    return fit(model, lambda n: classify(model, points()))


@healthy
def frozen_rate() -> Training:
    """The first half has a learning rate of zero"""
    model = _trained(mlp(32, 4))
    groups = [{"params": model[:4].parameters(), "lr": 0.0}, {"params": model[4:].parameters()}]
    return fit(model, lambda n: classify(model, points()), torch.optim.Adam(groups, lr=1e-3))


@healthy
def low_rank() -> Training:
    """Low-rank changes of frozen layers, which begin at zero"""
    model = _trained(mlp(32, 4))
    for number in (0, 2, 4):
        model[number] = LowRank(model[number])
    chosen = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=1e-3)
    return fit(model, lambda n: classify(model, points()), optimizer)


@healthy
def zero_head() -> Training:
    """A last layer that begins at zero, with SGD"""
    model = mlp(32, 4)
    nn.init.zeros_(model[-1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return fit(model, lambda n: classify(model, points()), optimizer)


@healthy
def much_dropout() -> Training:
    """Dropout of 0.8"""
    layers: list[nn.Module] = [nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.8)]
    layers += [nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.8), nn.Linear(64, CLASSES)]
    model = nn.Sequential(*layers)
    return fit(model, lambda n: classify(model, points()))


@healthy
def warmup_and_cosine() -> Training:
    """A learning rate that rises from 0 and falls to 0"""
    model = mlp(32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rates = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 20),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60),
        ],
        milestones=[20],
    )

    def step(number: int) -> None:
        optimizer.zero_grad()
        classify(model, points()).backward()
        optimizer.step()
        rates.step()

    return Training(model, step, 80)


@healthy
def rate_at_zero_in_the_end() -> Training:
    """A schedule that ends at 0 some steps before the training"""
    model = mlp(32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / 65))

    def step(number: int) -> None:
        optimizer.zero_grad()
        classify(model, points()).backward()
        optimizer.step()
        rates.step()

    return Training(model, step, 80)


@healthy
def converged() -> Training:
    """One batch again and again, until the loss is nothing"""
    model = mlp(64, 3)
    batch = points(16)
    return fit(model, lambda n: classify(model, batch), lr=1e-2, steps=120)


@healthy
def converged_squares() -> Training:
    """A regression that ends exact, with gradients that become noise"""
    model = mlp(64, 3, outputs=1)
    x, y = torch.randn(8, 16), torch.randn(8, 1)
    return fit(model, lambda n: F.mse_loss(model(x), y), lr=5e-3, steps=120)


@healthy
def one_sample() -> Training:
    """A single input, seen at every step"""
    model = mlp(32, 4)
    batch = points(1)
    return fit(model, lambda n: classify(model, batch), steps=60)


@healthy
def batches_of_two() -> Training:
    """Two points a step, a regression"""
    model = mlp(32, 3, outputs=1)

    def loss(number: int) -> Tensor:
        x, _ = points(2)
        return F.mse_loss(model(x), x[:, :1] * x[:, 1:2])

    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
    return fit(model, loss, optimizer, steps=100)


@healthy
def large_targets() -> Training:
    """Targets of ten thousand"""
    model = mlp(32, 3, outputs=1)

    def loss(number: int) -> Tensor:
        x, _ = points()
        return F.mse_loss(model(x), 1e4 * x[:, :1] + 5e3)

    return fit(model, loss, lr=1e-2, steps=100)


@healthy
def pixels() -> Training:
    """Inputs from 0 to 255 as they are"""
    model = convnet()

    def loss(number: int) -> Tensor:
        x, y = images()
        return F.cross_entropy(model((x * 60 + 100).clamp(0, 255).round()), y)

    return fit(model, loss, lr=1e-3, steps=50)


@healthy
def pixels_without_norm() -> Training:
    """Inputs from 0 to 255 into a perceptron without any normalisation"""
    model = mlp(32, 4, inputs=144)

    def loss(number: int) -> Tensor:
        x, y = images(32)
        return F.cross_entropy(model((x * 60 + 100).clamp(0, 255).round().flatten(1)), y)

    return fit(model, loss, lr=1e-4, steps=80)


@healthy
def hinge() -> Training:
    """A margin loss that becomes exactly zero"""
    model = mlp(64, 3)
    batch = points(24, spread=4.0)
    return fit(model, lambda n: F.multi_margin_loss(model(batch[0]), batch[1]), lr=1e-2, steps=120)


@healthy
def two_losses() -> Training:
    """A second head whose loss counts 1e-4"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.main, self.side = (
                mlp(32, 3, outputs=32),
                nn.Linear(32, 5),
                mlp(8, 2, inputs=32),
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x).relu()
            return self.main(h), self.side(h)

    model = Net()

    def loss(number: int) -> Tensor:
        x, y = points()
        main, side = model(x)
        return F.cross_entropy(main, y) + 1e-4 * F.cross_entropy(side, y)

    return fit(model, loss)


@healthy
def two_optimizers() -> Training:
    """Body and head have an optimizer each, that step together"""
    model = mlp(32, 4)
    body = torch.optim.SGD(model[:4].parameters(), lr=0.02)
    head = torch.optim.Adam(model[4:].parameters(), lr=2e-3)

    def step(number: int) -> None:
        body.zero_grad()
        head.zero_grad()
        classify(model, points()).backward()
        body.step()
        head.step()

    return Training(model, step, 60)


@healthy
def relative_rates() -> Training:
    """Adafactor"""
    model = mlp(32, 4)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    return fit(model, lambda n: classify(model, points()), optimizer)


@healthy
def sparse_table() -> Training:
    """A table with sparse gradients and an optimizer for them"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, 16, sparse=True)
            self.head = mlp(32, 2, outputs=VOCABULARY)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids))

    model = Net()
    sparse = torch.optim.SparseAdam(model.table.parameters(), lr=1e-2)
    dense = torch.optim.Adam(model.head.parameters(), lr=3e-3)

    def step(number: int) -> None:
        sparse.zero_grad()
        dense.zero_grad()
        next_token_loss(model, texts()).backward()
        sparse.step()
        dense.step()

    return Training(model, step, 50)


@healthy
def layers_left_out() -> Training:
    """Residual layers that are left out by chance"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(16, 32), nn.Linear(32, CLASSES)
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                if torch.rand(()) < 0.6:
                    x = x + layer(x).relu()
            return self.head(x)

    model = Net()
    return fit(model, lambda n: classify(model, points()))


@healthy
def masked_classes() -> Training:
    """Outputs of -inf for classes that are not allowed"""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(32, 3, outputs=8)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).masked_fill(torch.arange(8) >= CLASSES, float("-inf"))

    model = Net()
    return fit(model, lambda n: classify(model, points()))


@healthy
def late_start() -> Training:
    """A deep network that learns nothing for a while, then quickly"""
    model = mlp(32, 5, act=nn.Tanh)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.08)
            nn.init.zeros_(layer.bias)
    return fit(model, lambda n: classify(model, points()), lr=3e-3, steps=120)


@healthy
def exact_curve() -> Training:
    """A quasi-Newton optimizer, which calls a closure"""
    model = mlp(16, 2, inputs=1, outputs=1, act=nn.Tanh)
    x = torch.linspace(-2, 2, 40)[:, None]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4)

    def step(number: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x.sin())
            loss.backward()
            return loss

        optimizer.step(closure)

    return Training(model, step, 25)
