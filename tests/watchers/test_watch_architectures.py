"""A training that is watched computes what it computes unwatched, to the last bit: the models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import tiny_models
from small_models import Branches, Twice
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from trainings import STEPS, addresses, compare, plain_loop

import hookline as hl


class InPlaceRelu(nn.Module):
    """A linear layer's output, a view for a 3-D input, that is changed in place right away."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.relu(self.first(x)))


class AddedInPlace(nn.Module):
    """`x += residual` on the output of a linear layer, and on that of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y += x
        z = self.norm(y.tanh())
        z += y
        out = self.second(z)
        out *= 0.5
        return out


class HandedBack(nn.Module):
    """An identity and a dropout that does nothing, in residual branches: outputs that are inputs.

    The gradient of `h` has four parts. In which order they are added shows in its last bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.same = nn.Identity()
        self.drop = nn.Dropout(0.5).eval()
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h.tanh() * 1.7 + h.sin()
        same, left = self.same(h), h * 0.3
        out = left + same * 1.1 + same.sigmoid()
        kept = self.drop(h)
        out = out + kept.exp() + h.cos() * 0.7 + kept.square()
        return self.last(self.norm(out)) + h


class Chunked(nn.Module):
    """Views that one operation made several of, handed out by a module."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.both(x).chunk(2, dim=-1)

    class First(nn.Module):
        def forward(self, pair: Any) -> Tensor:
            return pair[0]

    class Rows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.split(1)[0]

    def __init__(self) -> None:
        super().__init__()
        self.halves = self.Halves()
        self.first = self.First()
        self.rows = self.Rows()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.halves(x)
        mixed = self.first((gate, value)).sigmoid() * value
        return self.head(mixed) + self.rows(mixed).sum()


class Views(nn.Module):
    """Transposed, sliced and reshaped outputs, one of them changed in place by its user."""

    class Turn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(1, 2)

    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 1:]

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.turn = self.Turn()
        self.flat = nn.Flatten(0, 1)
        self.cut = self.Cut()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        turned = self.turn(h) * 1.5
        part = self.cut(turned)
        part.mul_(2).add_(1)
        return self.flat(turned) + turned.sum() * 0.01


class Convolutions(nn.Module):
    """Batch norm, in-place activations and a shortcut, as image models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(6)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(x))
        y += x
        return self.head(self.pool(self.relu(y)).flatten(1))


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 7).long() % 20
        return self.head(self.mix(self.embed(ids)).tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, dropout=0.2, bidirectional=True)
        self.gru = nn.GRU(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        output, (hidden, _) = self.lstm(x)
        again, last = self.gru(output)
        return again.sum(0) + last[0] + hidden.mean()


class ByName(nn.Module):
    """A dict goes out, and arguments come in by keyword."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = Branches()
            self.fc = nn.Linear(8, 8)

        def forward(self, *, hidden: Tensor, scale: float = 1.0) -> dict[str, Any]:
            return {**self.branches(self.fc(hidden)), "scaled": hidden * scale}

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: Tensor) -> dict[str, Any]:
        return self.inner(hidden=x, scale=0.5)


class Frozen(nn.Module):
    """A part without gradients, and a module whose output nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        with torch.no_grad():
            x = self.frozen(x)
        return self.head(functional.relu(x))


class TwiceOfEight(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)


def sum_leaves(output: dict[str, Any]) -> Tensor:
    return output["a"].square().mean() + output["b"][1][0].sum() * 0.1 + output["scaled"].sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "in-place relu": (InPlaceRelu, (3, 5, 8)),
    "in-place relu, flat": (InPlaceRelu, (5, 8)),
    "added in place": (AddedInPlace, (3, 5, 8)),
    "handed back": (HandedBack, (3, 5, 8)),
    "handed back, flat": (HandedBack, (5, 8)),
    "chunked": (Chunked, (3, 5, 8)),
    "views": (Views, (3, 5, 8)),
    "convolutions": (Convolutions, (4, 3, 6, 6)),
    "tied": (Tied, (3, 5)),
    "recurrent": (Recurrent, (5, 3, 8)),
    "frozen": (Frozen, (5, 8)),
    "twice": (TwiceOfEight, (5, 8)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True),
        (3, 5, 8),
    ),
    "decoder as encoder": (tiny_models.make_encoder, (3, 5, 8)),
    "attention": (tiny_models.Attention, (3, 5, 8)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_training_of_a_model_is_the_same(name: str, optimizer: str) -> None:
    make, shape = MODELS[name]
    kinds: dict[str, Any] = {
        "sgd": lambda params: torch.optim.SGD(params, 0.05),
        "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    }
    watched = compare(make, plain_loop(*shape), kinds[optimizer])
    assert len(watched.table()) > 4


def test_dicts_and_keywords_are_the_same() -> None:
    watched = compare(ByName, plain_loop(5, 8, loss_of=sum_leaves))
    assert {"inner.branches:output.b[1][0]", "inner:output.a.grad"} <= set(addresses(watched))


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("in-place relu", "first:output.grad"),
        ("added in place", "first:output.grad"),
        ("added in place", "second:output.grad"),
        ("handed back", "same:output.grad"),
        ("chunked", "halves:output[0].grad"),
        ("chunked", "rows:output.grad"),
    ],
)
def test_gradients_that_are_hard_to_reach_are_measured(name: str, site: str) -> None:
    make, shape = MODELS[name]
    watched = compare(make, plain_loop(*shape), sketch_every=0)
    values = watched.series(site, "rms").values
    # The first step may be needed to find out that a view is changed in place.
    assert (values[1:] > 0).all(), values


def test_outputs_stay_the_views_that_they_are() -> None:
    """Also after a step without a backward: that no gradient came is no reason for a tap."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(-1, (2, 4)), nn.Flatten(-2))
    with hl.watch(model) as watched:
        for _ in range(3):
            assert model(torch.randn(3, 5, 8))._is_view()
            watched.step()
        model(torch.randn(3, 5, 8)).sum().backward()
        watched.step()
    assert watched.series("0:output.grad", "count").values[3] == 120


@pytest.mark.parametrize("name", tiny_models.EXAMPLES)
def test_training_of_a_real_architecture_is_the_same(name: str) -> None:
    example = tiny_models.EXAMPLES[name]

    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        _, args, kwargs, loss_of = example()
        torch.manual_seed(7)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model(*args, **kwargs))
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    compare(lambda: example().model, train)


class ChangedViews(nn.Module):
    """A linear layer whose output is a view, of which another view is made and which is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        part = y[..., :4]
        y.relu_()
        return (part * 2).sum() + y.pow(2).sum() + y.mean()


def test_views_of_a_view_that_is_changed_are_the_same() -> None:
    watched = compare(ChangedViews, plain_loop(2, 5, 8, loss_of=lambda out: out))
    assert watched.series("layer:output.grad", "count").values.tolist() == [80] * 4
