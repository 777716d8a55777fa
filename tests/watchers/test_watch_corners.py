"""Corners of torch that a watched training may turn into, each the same to the last bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Net
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations
from torch.optim import Optimizer
from trainings import addresses, batches, compare, plain_loop

import hookline as hl


class Lookup(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed((x.abs() * 7).long() % 20)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "sparse adam": lambda params: torch.optim.SparseAdam(list(params), 0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sparse_gradients(optimizer: str) -> None:
    watched = compare(Lookup, plain_loop(3, 5), OPTIMIZERS[optimizer])
    assert (watched.series("embed.weight:update", "l2").values > 0).all()


def test_a_penalty_on_gradients() -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for batch in batches(5, 3):
            optimizer.zero_grad()
            batch.requires_grad_()
            output = model(batch)
            (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
            loss = output.square().mean() + slope.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    compare(Net, train)


def test_two_backwards_through_one_graph() -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for batch in batches(5, 3):
            optimizer.zero_grad()
            output = model(batch)
            output[:, 0].sum().backward(retain_graph=True)
            output[:, 1].square().sum().backward()
            optimizer.step()
            losses.append(output.sum())
        return losses

    watched = compare(Net, train)
    assert watched.series("fc1:output.grad", "count").values.tolist() == [40.0] * 4


def make_normalised() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 2)),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lazy": lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2)),
    "parametrized": make_normalised,
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_made_late_or_anew(name: str) -> None:
    compare(MODELS[name], plain_loop(5, 3), lambda params: torch.optim.SGD(list(params), 0.1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_weights_of_other_types(dtype: torch.dtype) -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for batch in batches(5, 3):
            optimizer.zero_grad()
            loss = model(batch.to(dtype)).abs().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    watched = compare(lambda: nn.Linear(3, 3, dtype=dtype), train)
    assert (watched.series("weight:update", "l2").values > 0).all()


def test_a_batch_without_rows() -> None:
    watched = compare(Net, plain_loop(0, 3, loss_of=lambda output: output.sum()))
    assert watched.series("fc1", "count").values.tolist() == [0.0] * 4


def test_functional_transforms_become_notes() -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        def loss(weights: dict[str, Tensor], batch: Tensor) -> Tensor:
            return functional_call(model, weights, (batch,)).square().mean()

        losses = []
        for batch in batches(5, 3):
            weights = {name: one.detach() for name, one in model.named_parameters()}
            all_at_once = grad(loss)(weights, batch)
            one_by_one = vmap(grad(loss), in_dims=(None, 0))(weights, batch[:, None])
            for name, one in model.named_parameters():
                one.grad = all_at_once[name] + one_by_one[name].mean(0)
            optimizer.step()
            losses.append(loss(weights, batch))
        return losses

    watched = compare(Net, train)
    assert any("torch.func" in note for note in watched.notes)


def test_a_model_that_is_compiled_later_runs_as_before() -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        return plain_loop(5, 3)(torch.compile(model, backend="eager"), optimizer)

    watched = compare(Net, train)
    assert watched.failure is None
    assert watched.notes == []
    assert watched.series("fc1:output.grad", "count").values.tolist() == [20.0] * 4
    torch._dynamo.reset()


def test_calls_from_several_threads() -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        parts: dict[int, Tensor] = {}

        def run(number: int, batch: Tensor) -> None:
            parts[number] = model(batch).square().mean()

        losses = []
        for batch in batches(4, 3):
            optimizer.zero_grad()
            threads = [
                threading.Thread(target=run, args=(number, part))
                for number, part in enumerate(batch.split(2))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            loss = parts[0] + parts[1]
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    watched = compare(Net, train)
    assert watched.series("fc1", "count").values.tolist() == [16.0] * 4


def test_a_schedule_of_learning_rates() -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        losses = []
        for batch in batches(5, 3):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss)
        return losses

    watched = compare(Net, train)
    assert watched.scalar("lr").values.tolist() == [0.01, 0.005, 0.0025, 0.00125]


class Given(nn.Module):
    """A module that returns its parameter, which is used elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self) -> Tensor:
        return self.shift


class UsesGiven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given = Given()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.given()
        return self.fc(x + shift * shift.sin() + self.given.shift.cos())


def test_a_parameter_that_a_module_returns() -> None:
    watched = compare(UsesGiven, plain_loop(5, 3))
    assert [note.split(":")[0] for note in watched.notes] == ["`given"]


class Activated(nn.Module):
    """What image models do: an identity, then an activation in place, and the value is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Linear(8, 8)
        self.drop = nn.Identity()
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        y = self.act(self.drop(h))
        y = self.act(self.drop(y) + x)
        return self.head(y) + h


@pytest.mark.parametrize("shape", [(3, 5, 8), (5, 8)])
def test_an_identity_before_a_change_in_place(shape: tuple[int, ...]) -> None:
    compare(Activated, plain_loop(*shape))


class Keeps(nn.Module):
    """A module that keeps the view that it returns; it is changed in place, and used again."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.kept = torch.empty(0)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.fc(x).transpose(0, 1)
            return self.kept

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y.mul_(2).sin_()
        out = y + self.inner.kept.exp()
        self.inner.kept = torch.empty(0)
        return out


def test_a_view_that_its_module_keeps() -> None:
    compare(Keeps, plain_loop(3, 5, 8))


def test_a_module_that_is_exchanged_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with hl.watch(model) as watched:
        model(torch.randn(2, 4)).sum().backward()
        model[1] = nn.Linear(4, 2)
        assert watched.notes == ["another module is there now, which is not watched: `1`"]


def test_parameters_of_a_compiled_model_can_be_watched_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(compiled, sites=None) as watched:
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    assert watched.history.steps.tolist() == [0, 1, 2]
    assert (watched.series("0.weight:update", "l2").values > 0).all()
    assert not any(":output" in name for name in addresses(watched))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_training_on_nested_tensors_is_measured_and_judged(layout: torch.layout) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model, strict=True) as watch:
        for _ in range(3):
            batch = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
            optimizer.zero_grad()
            torch.nested.to_padded_tensor(model(batch), 0.0).sum().backward()
            optimizer.step()
    found = {row["site"]: row["count"] for row in watch.table(stats=("count",))}
    assert found["1:output"] == 9
    assert watch.notes == []
