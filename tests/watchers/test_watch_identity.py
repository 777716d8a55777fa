"""A training that is watched computes what it computes unwatched, to the last bit: the loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from small_models import Net
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from trainings import STEPS, Loop, addresses, batches, compare, plain_loop

import hookline as hl


class Blocks(nn.Module):
    """Residual blocks with a norm and dropout, run plainly or in checkpoints."""

    def __init__(self, *, checkpointed: tuple[int, ...] = (), reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8)
            )
            for _ in range(3)
        )
        self.head = nn.Linear(8, 2)
        self.checkpointed = checkpointed
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if self.reentrant else x
        for number, block in enumerate(self.blocks):
            if number in self.checkpointed:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = x + block(x)
        return self.head(x)


def test_loss_curve_with_dropout_is_the_same() -> None:
    watched = compare(Blocks, plain_loop(3, 5, 8))
    assert len(watched.series("blocks.1.3", "rms").values) == STEPS
    assert "blocks.1.4:output.grad" in addresses(watched)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("checkpointed", [(0, 1, 2), (1,)])
def test_checkpointed_blocks_are_the_same(checkpointed: tuple[int, ...], reentrant: bool) -> None:
    make = partial(Blocks, checkpointed=checkpointed, reentrant=reentrant)
    watched = compare(make, plain_loop(3, 5, 8))
    plain = compare(Blocks, plain_loop(3, 5, 8))
    for site in ("blocks.1.1:output", "blocks.1.1:output.grad", "head:output"):
        left, right = watched.series(site, "count").values, plain.series(site, "count").values
        assert left.tolist() == right.tolist(), site
        assert (left == left[0]).all()


def test_whole_model_in_a_checkpoint_is_the_same() -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for batch in batches(3, 5, 8):
            optimizer.zero_grad()
            loss = checkpoint(model, batch, use_reentrant=False).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    watched = compare(Blocks, train)
    assert watched.series("head", "count").values.tolist() == [30.0] * STEPS
    assert watched.series("blocks.0.1:output.grad", "count").values.tolist() == [240.0] * STEPS


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "sgd loop": lambda params: SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda params: SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda params: SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adam loop": lambda params: Adam(params, lr=0.01, foreach=False),
    "adamw foreach": lambda params: AdamW(params, lr=0.01, foreach=True),
    "adamw fused": lambda params: AdamW(params, lr=0.01, fused=True),
    "adam tensor rate": lambda params: Adam(params, lr=torch.tensor(0.01), amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_kind_of_optimizer_does_the_same(name: str) -> None:
    watched = compare(Blocks, plain_loop(3, 5, 8), OPTIMIZERS[name])
    assert watched.series("head.weight:update", "ratio").values.min() > 0


def autocast_loop(dtype: torch.dtype) -> Loop:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for batch in batches(3, 5, 8):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = model(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    return train


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_the_same(dtype: torch.dtype) -> None:
    watched = compare(Blocks, autocast_loop(dtype))
    assert watched._delivery.recent.site("head").dtype == str(dtype).removeprefix("torch.")


def scaled_loop(dtype: torch.dtype, *, clips: bool, bad_step: int = 1) -> Loop:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        losses = []
        for step, batch in enumerate(batches(3, 5, 8)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = model(batch).float().square().mean()
            if step == bad_step:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            losses += [loss, torch.tensor(scaler.get_scale())]
        return losses

    return train


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_scaler_with_a_skipped_step_is_the_same(
    dtype: torch.dtype, clips: bool, fused: bool
) -> None:
    watched = compare(
        Blocks, scaled_loop(dtype, clips=clips), lambda params: AdamW(params, 0.01, fused=fused)
    )
    assert watched.series("head", "count").steps.tolist() == [0, 1, 2, 3]
    assert watched.scalar("skipped").values[1] == 1
    assert watched.series("head.weight:grad", "finite").values.tolist() == [16, 0, 16, 16]


@pytest.mark.parametrize("clips", [False, True])
def test_accumulation_is_the_same(clips: bool) -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for number, batch in enumerate(batches(3, 5, 8, count=9)):
            loss = model(batch).square().mean() / 3
            loss.backward()
            losses.append(loss)
            if number % 3 == 2:
                if clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        return losses

    watched = compare(Blocks, train)
    assert watched.series("head", "count").values.tolist() == [90.0] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"every": 2},
        {"every": {"**": 3, "head": 1}},
        {"sites": None},
        {"parameters": None},
        {"gradients": False},
        {"gradients": False, "parameters": None},
        {"updates": False, "sketch_every": 0, "counts_every": 0, "moments_every": 0},
        {"sketch_every": 1, "counts_every": 1, "moments_every": 1},
        {"sites": "**:input"},
        {"sites": ["**", "**:input", "**:input.grad"]},
        {"budget": 0.5},
    ],
    ids=str,
)
def test_every_option_leaves_the_training_alone(options: dict[str, Any]) -> None:
    compare(Blocks, plain_loop(3, 5, 8), **options)


def test_two_watches_and_a_capture_at_once_leave_the_training_alone() -> None:
    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        if not hl.inventory(model):
            return plain_loop(5, 3)(model, optimizer)
        with hl.watch(model, sites="fc*") as inner, hl.capture(model, "act", grads=True) as got:
            losses = plain_loop(5, 3)(model, optimizer)
        assert addresses(inner)[0] == "fc1:output"
        assert got.table()
        return losses

    watched = compare(Net, train)
    assert watched.series("fc1", "count").values.tolist() == [20.0] * STEPS
