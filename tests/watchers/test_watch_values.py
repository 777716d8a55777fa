"""What a watch measures is what flowed, what the optimizer was given and what it did."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import Net, Twice
from torch import Tensor, nn
from torch.amp import GradScaler
from trainings import batches

import hookline as hl

STATS = ("count", "mean", "std", "rms", "absmax", "min", "max", "l2")


def statistics_of(value: Tensor) -> dict[str, float]:
    """Compute what a watch measures, in float64 and by torch."""
    value = value.detach().double().flatten()
    return {
        "count": float(value.numel()),
        "mean": value.mean().item(),
        "std": value.std(correction=0).item(),
        "rms": value.square().mean().sqrt().item(),
        "absmax": value.abs().max().item(),
        "min": value.min().item(),
        "max": value.max().item(),
        "l2": value.norm().item(),
    }


def assert_measured(watched: hl.Watch, site: str, value: Tensor, step: int = -1) -> None:
    """Compare a site at a step with a tensor."""
    for stat, wanted in statistics_of(value).items():
        found = watched.series(site, stat).values[step]
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-12), (site, stat)


def test_values_and_gradients_are_those_that_capture_sees() -> None:
    model, (batch,) = Net(), batches(5, 3, count=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model) as watched, hl.capture(model, "**", grads=True) as got:
        model(batch).square().sum().backward()
        optimizer.step()
    for site in ("fc1", "act", "fc2", ""):
        assert_measured(watched, f"{site}:output", got[site].output)
        assert_measured(watched, f"{site}:output.grad", got[site].output.grad)


def test_weights_gradients_and_updates_are_those_of_the_optimizer() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    watched = hl.watch(model, moments_every=1)
    for step, batch in enumerate(batches(5, 3)):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        optimizer.step()
        for name, one in model.named_parameters():
            assert one.grad is not None
            update = one.detach() - before[name]
            assert_measured(watched, name, before[name], step)
            assert_measured(watched, f"{name}:grad", one.grad, step)
            assert_measured(watched, f"{name}:update", update, step)
            ratio = watched.series(f"{name}:update", "ratio").values[step]
            assert ratio == pytest.approx((update.norm() / before[name].norm()).item(), rel=1e-5)
            assert watched.series(f"{name}:update", "lost").values[step] == 0
            for moment in ("exp_avg", "exp_avg_sq"):
                assert_measured(watched, f"{name}:{moment}", optimizer.state[one][moment], step)
    watched.close()
    assert watched.scalar("lr").values.tolist() == [0.01] * 4


def test_updates_that_rounding_loses_are_counted() -> None:
    """In bfloat16 a weight of 1 has a spacing of 2**-8; a step of 1e-4 is lost on it."""
    model = nn.Linear(8, 4, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight[:1] = 1e-4
        model.weight[1:] = 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with hl.watch(model) as watched:
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        before = model.weight.detach().clone()
        optimizer.step()
    assert model.weight.grad is not None
    lost = ((model.weight.detach() == before) & (model.weight.grad != 0)).float().mean().item()
    assert lost == 0.75
    assert watched.series("weight:update", "lost").values.tolist() == [lost]


def test_micro_batches_merge_to_the_statistics_of_all_of_them() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts = batches(5, 3, count=3) + batches(2, 3, count=1)
    with hl.capture(model, "**", grads=True) as got, hl.watch(model) as watched:
        for part in parts:
            model(part).square().sum().backward()
        gradient = model.fc1.weight.grad
        optimizer.step()
    assert watched.series("fc1", "count").steps.tolist() == [0]
    for site in ("fc1", "fc2"):
        values = [call[site].output for call in got.calls]
        assert_measured(watched, site, torch.cat(values))
        assert_measured(watched, f"{site}:output.grad", torch.cat([one.grad for one in values]))
    assert gradient is not None
    assert_measured(watched, "fc1.weight:grad", gradient)


def test_visits_of_one_module_merge() -> None:
    model, (batch,) = Twice(), batches(5, 3, count=1)
    with hl.watch(model) as watched, hl.capture(model, "fc") as got:
        model(batch).sum().backward()
        watched.step()
    both = torch.cat([got["fc", 0].output, got["fc", 1].output])
    assert_measured(watched, "fc", both)


def test_tied_weights_are_measured_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model) as watched:
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    names = [row["site"] for row in watched.table() if "weight" in str(row["site"])]
    assert names == ["0.weight", "0.weight:grad", "0.weight:update"]
    assert model[0].weight.grad is not None
    assert_measured(watched, "0.weight:grad", model[0].weight.grad)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_under_a_scaler_are_the_unscaled_ones(fused: bool, unscales: bool) -> None:
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    (batch,) = batches(5, 3, count=1)
    with hl.capture(plain, "**", grads=True) as got:
        plain(batch).square().sum().backward()
    if unscales:
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
    scaler = GradScaler("cpu", init_scale=1024.0)
    with hl.watch(model) as watched:
        scaler.scale(model(batch).square().sum()).backward()
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    for name, one in plain.named_parameters():
        assert one.grad is not None
        assert_measured(watched, f"{name}:grad", one.grad)
    for site in ("fc1", "act", "fc2", ""):
        gradient = got[site].output.grad
        assert_measured(watched, f"{site}:output.grad", gradient)
    assert watched.scalar("grad_scale").values.tolist() == [1024.0]
    assert watched.series("fc1.weight:update", "ratio").values[0] > 0


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_a_step_without_an_update(fused: bool) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
    scaler = GradScaler("cpu", init_scale=1024.0)
    with hl.watch(model) as watched:
        for step, batch in enumerate(batches(5, 3)):
            optimizer.zero_grad()
            loss = model(batch).square().sum()
            scaler.scale(loss * (float("nan") if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert watched.series("fc1.weight:grad", "nan").values.tolist() == [0, 0, 12, 0]
    skipped = np.nan_to_num(watched.scalar("skipped").values)
    assert skipped.tolist() == [0, 0, 1, 0]
    sizes = np.nan_to_num(watched.series("fc1.weight:update", "l2").values)
    assert (sizes > 0).tolist() == [True, True, False, True]


def test_not_finite_values_are_counted() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.ones(2, 3)
    x[0, 0] = float("nan")
    with torch.no_grad():
        model[0].bias[0] = float("inf")
    with hl.watch(model) as watched:
        model(x)
        watched.step()
    out = model(x)
    row = next(iter(watched.table(where="1")))
    assert row["nan"] == int(out.isnan().sum())
    assert row["inf"] == int(out.isinf().sum())


def test_variables_and_operations_are_sites() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.qk(x).chunk(2, dim=-1)
            scores = q @ k.transpose(-1, -2)
            return torch.softmax(scores, dim=-1) @ x

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attn(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model, (batch,) = Model(), batches(2, 5, 4, count=1)
    sites = ["blocks.*.attn@scores", "blocks.*.attn/softmax"]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, sites=sites) as watched:
        with hl.capture(model, sites, grads=True) as got:
            model(batch).square().sum().backward()
        optimizer.step()
    for number in (0, 1):
        for part in ("@scores", "/softmax"):
            value = got[f"blocks.{number}.attn{part}"]
            assert_measured(watched, f"blocks.{number}.attn{part}[0]", value)
            assert_measured(watched, f"blocks.{number}.attn{part}[0]:grad", value.grad)
