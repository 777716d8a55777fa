"""Gradients of parameters as each rank computes them, named apart from those that ranks reduce."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from small_models import is_clean
from torch import Tensor, nn

import hookline as hl
from hookline._ranks import fsdp_parameters, whole_of
from hookline.views.report import read_report

STEPS = 3
ROWS = 8
"""Samples of a step, over all ranks."""

SITES = ("body.0.weight", "body.0.bias", "head.weight")
STATS = ("mean", "rms", "min", "max")


class Net(nn.Module):
    """A group of its own for `fully_shard`, and a head that belongs to the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def make_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 4, generator=generator) for _ in range(STEPS)]


def train(
    model: nn.Module,
    batches: list[Tensor],
    folder: str | None = None,
    *,
    micro: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Train with a watch of local gradients, or without a watch where there is no folder."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watched = hl.watch(model, folder, local_gradients=True, **options) if folder else None
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        for part in batch.chunk(micro):
            loss = model(part).square().mean() / micro
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    if watched is not None:
        watched.close()
    whole = [whole_of(manager) for _, _, manager in fsdp_parameters(model)]
    left = [one for one in (*model.parameters(), *whole) if one._backward_hooks is not None]
    return {
        "losses": losses,
        "notes": watched.notes if watched is not None else [],
        "is clean": not left and (bool(whole) or is_clean(model)),
    }


def spread(kind: str, world: int) -> nn.Module:
    model = make_net()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.body)
        fully_shard(model)
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(model.body, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    return model


def work(folder: str, world: int, rank: int) -> dict[str, Any]:
    found = {}
    for kind in ("ddp", "fsdp2"):
        mine = [one.chunk(world)[rank] for one in make_batches()]
        plain = train(spread(kind, world), mine)["losses"]
        found[kind] = train(spread(kind, world), mine, f"{folder}/{kind}")
        found[kind]["is same"] = all(map(torch.equal, plain, found[kind]["losses"]))
    found["tensor parallel"] = train(
        spread("tensor parallel", world), make_batches(), f"{folder}/tensor parallel"
    )
    found["bad"] = go_bad(f"{folder}/bad", rank)
    return found


class Steep(torch.autograd.Function):
    """Give a weight through, and a gradient that is no number for some samples."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, is_bad: bool) -> Tensor:
        ctx.is_bad = is_bad
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * float("nan") if ctx.is_bad else grad, None


class Fragile(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, Steep.apply(self.weight, bool(x.max() > 50)), self.bias)


def go_bad(folder: str, rank: int) -> list[str]:
    """Train a model of which one rank has a sample that spoils the gradient of a weight."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(Fragile(4, 3)))
    batches = [one.chunk(2)[rank].clone() for one in make_batches()]
    if rank == 1:
        batches[1][0, 0] = 100.0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, folder, local_gradients=True, replay=False) as watched:
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return [one.message for one in watched.findings]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_on_ranks(partial(work, str(folder), 2), folder), folder


def follow(world: int) -> list[list[dict[str, Tensor]]]:
    """Give the gradients that each rank computes in each step, by one process alone."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for batch in make_batches():
        own = []
        for part in batch.chunk(world):
            model.zero_grad()
            model(part).square().mean().backward()
            own.append({name: one.grad.clone() for name, one in model.named_parameters()})
        found.append(own)
        for name, one in model.named_parameters():
            one.grad = torch.stack([grads[name] for grads in own]).mean(0)
        optimizer.step()
    return found


def measure(value: Tensor) -> dict[str, float]:
    rms = value.square().mean().sqrt()
    found = {"mean": value.mean(), "rms": rms, "min": value.min(), "max": value.max()}
    return {name: float(one) for name, one in found.items()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_each_ranks_own_gradient_is_a_site_beside_the_reduced_one(kind: str, ranks: Any) -> None:
    found, folder = ranks
    for one in found:
        assert one[kind]["notes"] == []
        assert one[kind]["is same"]
        assert one[kind]["is clean"]
    run = hl.open_run(folder / kind)
    steps = follow(2)
    for site in SITES:
        for stat in STATS:
            local, reduced = f"{site}:local_grad", f"{site}:grad"
            for rank in range(2):
                expected = [measure(own[rank][site])[stat] for own in steps]
                got = run.series(local, stat, rank=rank).values
                assert got == pytest.approx(expected, rel=1e-4, abs=1e-7), (site, stat, rank)
            both = [measure(torch.stack([own[0][site], own[1][site]]))[stat] for own in steps]
            assert run.series(local, stat).values == pytest.approx(both, rel=1e-4, abs=1e-7)
            mean = [measure((own[0][site] + own[1][site]) / 2)[stat] for own in steps]
            assert run.series(reduced, stat).values == pytest.approx(mean, rel=1e-4, abs=1e-7)
        # The ranks differ, and what is reduced is neither's.
        rms = [run.series(f"{site}:local_grad", "rms", rank=rank).values[0] for rank in range(2)]
        assert len({*rms, run.series(f"{site}:grad", "rms").values[0]}) == 3
    kinds = {row["site"]: row["kind"] for row in run.sites()}
    assert kinds["head.weight:local_grad"] == "local gradient"
    assert kinds["head.weight:grad"] == "parameter gradient"
    shown = run.table(step=0, where="head.weight", rank=1)
    assert "head.weight:local_grad" in [row["site"] for row in shown]


def test_a_part_of_a_spread_tensor_is_left_out_and_said(ranks: Any) -> None:
    found, folder = ranks
    (note,) = found[0]["tensor parallel"]["notes"]
    assert note.startswith("what this rank computes of the gradient of `body.0.bias`, `body.0.wei")
    run = hl.open_run(folder / "tensor parallel")
    local = [row["site"] for row in run.sites() if row["kind"] == "local gradient"]
    assert sorted(local) == ["head.bias:local_grad", "head.weight:local_grad"]


def test_the_rank_that_made_a_nan_is_told(ranks: Any) -> None:
    found, folder = ranks
    assert "0.weight:local_grad became nan at step 1 on this rank" in found[1]["bad"][0]
    assert found[0]["bad"][0].startswith("0.weight:grad became nan at step 1")
    run = hl.open_run(folder / "bad")
    counts = [run.series("0.weight:local_grad", "nan", rank=rank).values[1] for rank in range(2)]
    assert counts == [0, 12]
    report = read_report(run)
    assert report.verdict.startswith("0.weight:local_grad became nan at step 1")
    assert "seen by rank 1 alone" in report.findings[0].evidence


def test_alone_it_is_the_gradient_of_each_backward(tmp_path: Path) -> None:
    found = train(make_net(), make_batches(), str(tmp_path / "run"), micro=2, parameters="head.*")
    assert found["is clean"]
    run = hl.open_run(tmp_path / "run")
    names = {row["site"] for row in run.sites()}
    assert {"head.weight:local_grad", "head.weight:grad"} <= names
    assert not any(name.startswith("body.0.weight") for name in names)
    # Two halves, each with half of the loss, are merged; the optimizer is given their sum.
    own = follow(2)[0]
    halves = torch.stack([one["head.weight"] for one in own]) / 2
    assert run.series("head.weight:local_grad", "rms").values[0] == pytest.approx(
        measure(halves)["rms"], rel=1e-4
    )
    assert run.series("head.weight:local_grad", "count").values[0] == 2 * 18
    assert run.series("head.weight:grad", "rms").values[0] == pytest.approx(
        measure(halves.sum(0))["rms"], rel=1e-4
    )


def test_nothing_is_hooked_unless_asked_for_or_between_watched_steps() -> None:
    for options in ({}, {"local_gradients": True, "every": 2}):
        model = make_net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        hooked = []
        with hl.watch(model, every=options.pop("every", 1), **options) as watched:
            for batch in make_batches():
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                hooked.append(bool(model.head.weight._backward_hooks))
                optimizer.step()
        assert hooked == ([True, False, True] if options else [False] * 3)
        names = {row["site"] for row in watched.history.sites()}
        assert any("local_grad" in name for name in names) == bool(options)


def test_the_factor_of_a_scaler_is_taken_out() -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hl.watch(model, local_gradients=True) as watched:
        for batch in make_batches():
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    local, given = (watched.series(f"head.weight:{part}", "rms") for part in ("local_grad", "grad"))
    assert local.values == pytest.approx(given.values, rel=1e-4)


def test_a_gradient_that_is_part_of_a_loss_is_not_measured() -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, local_gradients=True) as watched:
        for batch in make_batches():
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            (slope,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)
            (loss + slope.square().sum()).backward()
            optimizer.step()
    assert watched.series("head.weight:local_grad", "count").values.tolist() == [18] * STEPS
