"""Watching compiled trainings, whatever loops do: accumulation, scalers, checkpoints, strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compiled_trainings import (
    Compile,
    Stack,
    as_function,
    assert_same_rows,
    in_parts,
    in_place,
    train_twins,
    wrap,
)
from small_models import Weighing
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from trainings import batches, plain_loop

# The compiler asks inputs that are no leaves for their gradients.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]


def test_inductor_gives_the_same_rows_and_bits() -> None:
    twins = train_twins(lambda: Stack(inplace=True), plain_loop(5, 3), backend="inductor")
    assert_same_rows(twins.eager, twins.compiled, rel=1e-4)
    assert twins.graphs == 1


@pytest.mark.parametrize("way", [wrap, in_place])
def test_every_few_steps_two_graphs_take_turns(way: Compile) -> None:
    """One graph with the hooks and one without, each compiled once."""

    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for batch in batches(5, 3, count=9):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    twins = train_twins(Stack, train, way, every=3)
    assert_same_rows(twins.eager, twins.compiled)
    assert twins.compiled.history.steps.tolist() == [0, 3, 6]
    assert (twins.plain_graphs, twins.graphs) == (1, 2)


def test_blocks_compiled_by_themselves_share_a_graph() -> None:
    twins = train_twins(lambda: Stack(9), plain_loop(5, 3), in_parts)
    assert_same_rows(twins.eager, twins.compiled)
    assert twins.graphs == twins.plain_graphs


def test_activations_in_place() -> None:
    twins = train_twins(lambda: Stack(inplace=True), plain_loop(5, 3))
    assert_same_rows(twins.eager, twins.compiled)


def test_micro_batches_are_merged() -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for start in range(0, 6, 3):
            optimizer.zero_grad()
            parts = [model(batch).square().mean() for batch in batches(5, 3, count=6)[start:][:3]]
            for part in parts:  # all forwards before the first backward
                part.backward()
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
            optimizer.step()
            losses += parts
        return losses

    twins = train_twins(Stack, train, as_function)
    assert_same_rows(twins.eager, twins.compiled)
    assert twins.compiled.series("head", "count").values.tolist() == [30, 30]
    assert twins.graphs == 1


def test_a_gradient_scaler_is_taken_out() -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        losses = []
        for number, batch in enumerate(batches(5, 3)):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            scaled = scaler.scale(loss)
            scaled = scaled * float("inf") if number == 2 else scaled
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss)
        return losses

    twins = train_twins(Stack, train)
    assert_same_rows(twins.eager, twins.compiled)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner = Stack(2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.start(x)
        for block in self.inner.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.inner.head(x)

    @property
    def blocks(self) -> Any:
        return self.inner.blocks


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_checkpoints_inside_of_a_graph(backend: str) -> None:
    twins = train_twins(lambda: Checkpointed(reentrant=False), plain_loop(5, 3), backend=backend)
    assert_same_rows(twins.eager, twins.compiled, rel=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_compiled_blocks(reentrant: bool) -> None:
    twins = train_twins(lambda: Checkpointed(reentrant=reentrant), plain_loop(5, 3), in_parts)
    assert_same_rows(twins.eager, twins.compiled)


class Nested(nn.Module):
    """Return a dict with a tuple in it, and run one part without grad."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(1)
        self.pair = Pair()

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            target = self.stack.start(x)
        return {"loss": self.pair(self.stack(x) * scale), "target": target.mean()}


class Pair(nn.Module):
    """Return a tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()


def test_nested_values_have_a_site_for_each_tensor() -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for batch in batches(5, 3):
            optimizer.zero_grad()
            out = model(batch, torch.ones(2))
            loss = out["loss"][0].square().mean() + out["loss"][1].mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    twins = train_twins(Nested, train, as_function)
    assert_same_rows(twins.eager, twins.compiled)
    found = {str(row["site"]) for row in twins.compiled.history.sites()}
    assert {"pair:output[1].grad", ":output.loss[0]", ":output.target"} <= found


def test_inputs_are_watched() -> None:
    twins = train_twins(Stack, plain_loop(5, 3), sites=["blocks.*:input", "head", "head:input"])
    assert_same_rows(twins.eager, twins.compiled)
    assert np.isfinite(twins.compiled.series("blocks.0:input.x").values).all()


def test_variables_and_operations_are_watched() -> None:
    twins = train_twins(Weighing, plain_loop(5, 3), sites=["@scores", "/softmax", "inner"])
    assert_same_rows(twins.eager, twins.compiled)
    assert twins.graphs == twins.plain_graphs == 1


@pytest.mark.parametrize("with_inference", [False, True])
def test_calls_without_grad(with_inference: bool) -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for batch in batches(5, 3):
            with torch.no_grad():
                model(batch)
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    way = wrap if with_inference else as_function
    twins = train_twins(Stack, train, way, with_inference=with_inference)
    assert_same_rows(twins.eager, twins.compiled)
    counts = twins.compiled.series("head", "count").values
    # A call without grad begins no step.
    assert counts.tolist() == ([30, 20, 20, 10] if with_inference else [10] * 4)


def test_shapes_that_change_need_one_graph_more() -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for rows in (5, 6, 7, 8):
            for batch in batches(rows, 3, count=2):
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss)
        return losses

    twins = train_twins(Stack, train)
    assert_same_rows(twins.eager, twins.compiled)
    assert twins.graphs == twins.plain_graphs == 2
