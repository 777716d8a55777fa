"""Gradients of parameters in captures, edits and hooks: this rank's own, and those of all ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from small_models import is_clean
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

SITES = ("body.0.weight", "head.weight")


class Net(nn.Module):
    """A group of its own for `fully_shard`, and a head that belongs to the root's."""

    def __init__(self, is_reentrant: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.is_reentrant:
            x = checkpoint(self.body, x.requires_grad_(), use_reentrant=True)
        else:
            x = self.body(x)
        out: Tensor = self.head(x)
        return out


def make(**options: Any) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(**options), torch.randn(8, 4)


def capture(model: nn.Module, x: Tensor, *extra: str) -> dict[str, Tensor]:
    sites = [f"{site}:{part}" for site in SITES for part in ("local_grad", "grad")]
    with hl.capture(model, *sites, *extra) as got:
        model(x).square().mean().backward()
    found = got.tensors()
    return {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one
        for name, one in found.items()
    }


def read_why(model: nn.Module, x: Tensor) -> list[str]:
    """Give what is said where a gradient that is reduced is asked for, and there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hl.capture(model, "body.0.weight:grad", "body.0.weight:local_grad") as got:
            model(x).square().mean().backward()
    with pytest.raises(hl.NotCaptured) as error:
        got["body.0.weight:grad"]
    return [str(caught[-1].message), str(error.value), *got.tensors()]


def work(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    found: dict[str, Any] = {}
    model, x = make()
    mine = x.chunk(2)[rank]
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    found["ddp"] = capture(ddp, mine)
    found["is reduced"] = torch.equal(found["ddp"]["head.weight:grad"], model.head.weight.grad)
    ddp.zero_grad()
    with hl.capture(model, "head.weight:grad") as got:  # named by what is wrapped
        ddp(mine).square().mean().backward()
    found["inner"] = got["head.weight:grad"]
    with ddp.no_sync():
        found["no_sync"] = read_why(ddp, mine)
    ddp.zero_grad()
    found["edited"] = [edit(ddp, model, mine, part) for part in ("local_grad", "grad")]
    found["is clean"] = is_clean(model) and model.head.weight._backward_hooks is None
    again, _ = make(is_reentrant=True)
    found["reentrant"] = read_why(nn.parallel.DistributedDataParallel(again), mine)
    sharded, _ = make()
    fully_shard(sharded.body)
    fully_shard(sharded)
    found["fsdp2"] = [capture(sharded, mine), capture(sharded, mine)]
    plan = {"0": ColwiseParallel()}
    parallel, _ = make()
    parallelize_module(parallel.body, init_device_mesh("cpu", (2,)), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with hl.capture(parallel.body, "0.weight:local_grad") as got:
            parallel.body(x).square().mean().backward()
    (found["tensor parallel"],) = got.report().problems
    return found


def edit(ddp: nn.Module, model: Net, x: Tensor, part: str) -> Tensor:
    """Add the number of this rank to a gradient before or after it is reduced."""
    rank = torch.distributed.get_rank()
    ddp.zero_grad()
    with hl.edit(ddp, {f"head.weight:{part}": hl.add(float(rank + 1))}):
        ddp(x).square().mean().backward()
    assert model.head.weight.grad is not None
    return model.head.weight.grad.clone()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_on_ranks(work, Path(tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def own() -> list[dict[str, Tensor]]:
    """Give what each rank computes, by one process alone."""
    found = []
    for rank in range(2):
        model, x = make()
        model(x.chunk(2)[rank]).square().mean().backward()
        found.append({name: one.grad for name, one in model.named_parameters()})
    return found


def check(got: dict[str, Tensor], own: list[dict[str, Tensor]], rank: int, times: int = 1) -> None:
    assert sorted(got) == sorted(
        f"{site}:{part}" for site in SITES for part in ("grad", "local_grad")
    )
    for site in SITES:
        torch.testing.assert_close(got[f"{site}:local_grad"], own[rank][site])
        mean = (own[0][site] + own[1][site]) / 2
        torch.testing.assert_close(got[f"{site}:grad"], mean * times)


def test_ddp_names_this_ranks_gradient_apart_from_the_reduced_one(ranks: Any, own: Any) -> None:
    for rank, found in enumerate(ranks):
        check(found["ddp"], own, rank)
        assert found["is reduced"]
        assert found["is clean"]
        mean = (own[0]["head.weight"] + own[1]["head.weight"]) / 2
        torch.testing.assert_close(found["inner"], mean)


def test_fully_sharded_names_them_apart_in_every_group(ranks: Any, own: Any) -> None:
    for rank, found in enumerate(ranks):
        first, second = found["fsdp2"]
        check(first, own, rank)
        check(
            second, own, rank, times=2
        )  # `.grad` goes on from call to call, what is local does not


@pytest.mark.parametrize(
    ("case", "why"), [("no_sync", "called in no_sync()"), ("reentrant", "use_reentrant=True makes")]
)
def test_a_gradient_that_is_not_reduced_is_not_called_so(case: str, why: str, ranks: Any) -> None:
    for found in ranks:
        warned, raised, *kept = found[case]
        assert "body.0.weight:grad: no gradient" in warned
        assert why in warned
        assert raised.startswith("`body.0.weight:grad` has no gradient: it ")
        assert why in raised
        assert kept == ["body.0.weight:local_grad"]


def test_edits_come_before_or_after_the_reduction(ranks: Any, own: Any) -> None:
    mean = (own[0]["head.weight"] + own[1]["head.weight"]) / 2
    for rank, found in enumerate(ranks):
        before, after = found["edited"]
        torch.testing.assert_close(before, mean + 1.5)  # the mean of what both have added
        torch.testing.assert_close(after, mean + rank + 1)


def test_a_spread_parameter_has_no_gradient_of_its_own(ranks: Any) -> None:
    for found in ranks:
        problem = found["tensor parallel"]
        assert (problem.address, problem.status) == ("0.weight:local_grad", "no gradient")
        assert problem.reason.startswith("it is a DTensor")


def test_alone_it_is_what_one_backward_gives() -> None:
    model, x = make()
    model(x).sum().backward()
    before = model.head.weight.grad.clone()
    seen = []
    with (
        hl.capture(model, "head.weight:local_grad", "head.weight:grad") as got,
        hl.hook(model, "head.weight:local_grad", lambda grad, at: seen.append((at.address, grad))),
    ):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    total = model.head.weight.grad
    torch.testing.assert_close(got["head.weight:grad"], total)
    torch.testing.assert_close(got["head.weight:local_grad"], total - before)
    assert [name for name, _ in seen] == ["head.weight:local_grad"] * 2
    assert [row["site"] for row in got.table()] == ["head.weight", "head.weight:local_grad"]
    assert is_clean(model)
    assert model.head.weight._backward_hooks is None


def test_it_is_saved_and_read_back(tmp_path: Path) -> None:
    model, x = make()
    with hl.capture(model, "head.weight:local_grad") as got:
        model(x).sum().backward()
    got.save(tmp_path / "got.safetensors")
    back = hl.load(tmp_path / "got.safetensors")
    assert torch.equal(back["head.weight:local_grad"], got["head.weight:local_grad"])
    with pytest.raises(hl.NotCaptured, match=r"`head\.weight:grad` was not captured"):
        back["head.weight:grad"]
