"""Watching on a GPU: the same bits, no wait, and values that may wait are never the wrong ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from trainings import Loop, batches, compare

import hookline as hl
from hookline.stats import open_log

pytestmark = pytest.mark.gpu


class Blocks(nn.Module):
    """Residual blocks on the GPU, one of them changing values in place, maybe checkpointed."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(16),
                nn.Linear(16, 32),
                nn.ReLU(inplace=True),
                nn.Dropout(0.3),
                nn.Linear(32, 16),
            )
            for _ in range(4)
        )
        self.head = nn.Linear(16, 2)
        self.reentrant = reentrant
        self.cuda()

    def forward(self, x: Tensor) -> Tensor:
        x = x.cuda().requires_grad_(self.reentrant is True)
        for block in self.blocks:
            if self.reentrant is None:
                branch = block(x)
                branch += x
                x = branch
            else:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def make_loop(
    *,
    autocast: torch.dtype | None = None,
    scaler: bool = False,
    parts: int = 1,
    clip: bool = False,
) -> Loop:
    """Make a loop as people write it."""

    def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        scaling = GradScaler("cuda", init_scale=2.0**14, enabled=scaler)
        losses = []
        for batch in batches(8, 6, 16, count=6):
            optimizer.zero_grad()
            for part in batch.chunk(parts):
                with torch.autocast("cuda", autocast, enabled=autocast is not None):
                    loss = model(part).float().square().mean() / parts
                scaling.scale(loss).backward()
            if clip:
                scaling.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaling.step(optimizer)
            scaling.update()
            losses.append(loss)
        return losses

    return train


@pytest.mark.parametrize(
    "make",
    [
        lambda params: AdamW(params, lr=0.01, fused=True),
        lambda params: AdamW(params, lr=0.01, foreach=True),
        lambda params: SGD(params, lr=0.01, momentum=0.9, foreach=False),
    ],
    ids=["fused", "foreach", "loop"],
)
@pytest.mark.parametrize(
    "loop",
    [
        make_loop(),
        make_loop(autocast=torch.bfloat16),
        make_loop(autocast=torch.float16, scaler=True),
        make_loop(autocast=torch.float16, scaler=True, clip=True, parts=4),
        make_loop(parts=2, clip=True),
    ],
    ids=["plain", "bf16", "scaled", "scaled, clipped, in parts", "in parts"],
)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_on_a_gpu_is_the_same(
    make: Callable[..., Optimizer], loop: Loop, reentrant: bool | None
) -> None:
    compare(lambda: Blocks(reentrant=reentrant), loop, make, sketch_every=4, counts_every=4)


def test_values_that_wait_are_those_that_flowed() -> None:
    """Some are changed in place right after; the captured copies say what they were."""
    torch.manual_seed(0)
    model = Blocks().eval()
    optimizer = SGD(model.parameters(), lr=0.0)
    x = torch.randn(4, 6, 16)
    with hl.capture(model, "**", clone=True, grads=True) as got:
        model(x).square().mean().backward()
    optimizer.zero_grad()
    with hl.watch(model, sketch_every=0, counts_every=0) as watched:
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for step in range(4):
        rows = {
            row["site"]: row for row in watched.table(step=step, stats=("mean", "rms", "count"))
        }
        for place in ("blocks.0.0", "blocks.1.1", "blocks.1.2", "blocks.2.4", "blocks.3", "head"):
            value = got[place].output.double()
            row = rows[f"{place}:output"]
            assert row["count"] == value.numel(), (step, place)
            np.testing.assert_allclose(row["mean"], value.mean().item(), rtol=1e-5, atol=1e-9)
            np.testing.assert_allclose(row["rms"], value.square().mean().sqrt().item(), rtol=1e-6)
        grad = got["head"].output.grad.double()
        np.testing.assert_allclose(
            rows["head:output.grad"]["rms"], grad.square().mean().sqrt().item(), rtol=1e-6
        )


@pytest.mark.parametrize("replay", [False, True])
def test_a_watched_step_does_not_wait_for_the_device(replay: bool) -> None:
    """With replay it does, where it means to: to learn whether all is finite."""
    model = Blocks()
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    x = torch.randn(8, 6, 16, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    with hl.watch(model, sketch_every=2, counts_every=2, moments_every=2, replay=replay) as watched:
        for _ in range(5):
            step()
        watched.flush()
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says once that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(watched.history.steps) == 9


def test_values_of_several_streams_are_measured() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)]).cuda()
    optimizer = SGD(model.parameters(), lr=0.0)
    x = torch.randn(512, 64, device="cuda")
    side = torch.cuda.Stream()
    with hl.watch(model, sketch_every=0, counts_every=0) as watched:
        for number in range(6):
            optimizer.zero_grad()
            if number % 2:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    model(x).sum().backward()
                torch.cuda.current_stream().wait_stream(side)
            else:
                model(x).sum().backward()
            optimizer.step()
    for place in ("0", "5", "11"):
        values = watched.series(place, "rms").values
        np.testing.assert_allclose(values, values[0], rtol=1e-6)
        values = watched.series(f"{place}:output.grad", "rms").values
        np.testing.assert_allclose(values, values[0], rtol=1e-6)


def test_updates_on_a_gpu_are_what_the_optimizer_did() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7)).cuda().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    before, after, grads = [], [], []
    with hl.watch(model) as watched:
        for _ in range(3):
            optimizer.zero_grad()
            model(
                torch.randn(16, 40, device="cuda", dtype=torch.bfloat16)
            ).square().mean().backward()
            before.append(model[0].weight.detach().double().cpu())
            grads.append(model[0].weight.grad.double().cpu())
            optimizer.step()
            after.append(model[0].weight.detach().double().cpu())
    l2 = watched.series("0.weight:update", "l2").values
    lost = watched.series("0.weight:update", "lost").values
    ratio = watched.series("0.weight:update", "ratio").values
    for number, (old, new, grad) in enumerate(zip(before, after, grads, strict=True)):
        np.testing.assert_allclose(l2[number], (new - old).norm().item(), rtol=1e-6)
        expected = ((new == old) & (grad != 0)).sum() / (grad != 0).sum()
        np.testing.assert_allclose(lost[number], expected.item(), rtol=1e-6)
        np.testing.assert_allclose(ratio[number], (new - old).norm() / old.norm(), rtol=1e-6)


class Rooting(nn.Module):
    """A model on the GPU whose third call takes the root of numbers below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)
        self.calls = 0
        self.cuda()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.act(self.fc1(x.cuda()))
        if self.calls == 3:
            h = torch.sqrt(-1 - h)
        out: Tensor = self.fc2(h)
        return out


def step_through(model: nn.Module, count: int = 5) -> None:
    """Train for some steps."""
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    for batch in batches(4, 8, count=count):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def test_a_nan_on_the_device_is_traced_to_its_operation() -> None:
    model = Rooting()
    with hl.watch(model) as watched:
        step_through(model)
    assert (watched.findings[0].site, watched.findings[0].step) == ("/sqrt", 2)


def test_a_nan_on_the_device_is_raised_before_the_weights_have_it() -> None:
    model = Rooting()
    with pytest.raises(RuntimeError, match="/sqrt"), hl.watch(model, on_finding="raise"):
        step_through(model)
    assert all(one.isfinite().all() for one in model.parameters())


def test_units_and_losses_on_the_device_are_those_on_the_host() -> None:
    found = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2), nn.Tanh())
        with torch.no_grad():
            model[0].weight[:3] = 0
            model[0].bias[:3] = -1
        model.to(device)
        optimizer = SGD(model.parameters(), lr=0.0)
        with hl.watch(model, counts_every=1) as watched:
            for batch in batches(4, 8):
                optimizer.zero_grad()
                model(20 * batch.to(device)).square().mean().backward()
                optimizer.step()
        stats = [("1", "dead"), ("0.weight:grad", "dead"), ("0", "outlier"), ("3", "saturated")]
        numbers = [watched.series(site, stat).values for site, stat in stats]
        found.append([*numbers, watched.scalar("loss").values])
    for left, right in zip(*found, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4)
    assert (found[0][0] >= 3).all()


def test_a_log_finds_the_rows_that_are_not_finite() -> None:
    log = open_log("cuda")
    values = torch.ones(8, 1000, device="cuda")
    values[2, 7], values[4, 1], values[5, 0] = torch.nan, torch.inf, -torch.inf
    rows = [log.add(one) for one in values]
    rows += log.add_together(list(values))
    assert log.find_bad() == {2: True, 4: False, 10: True, 12: False}
    assert rows == list(range(16))
    later = log.add(values[2])
    assert log.find_bad() == {2: True, 4: False, 10: True, 12: False, later: True}
    measured = log.take().wait()
    assert measured.rows[:, 1].tolist() == [0, 0, 1, 0, 0, 0, 0, 0] * 2 + [1]
    assert log.find_bad() == {}
