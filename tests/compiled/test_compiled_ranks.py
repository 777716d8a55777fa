"""Compiled models that are spread over ranks: whole, or block by block, sharded or replicated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import WORLD, run_on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline as hl

pytestmark = pytest.mark.slow

KINDS = ("sharded", "sharded blocks", "replicated")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.widen(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _make() -> Net:
    torch.manual_seed(0)
    return Net()


def _input(rank: int) -> Tensor:
    return torch.full((3, 4), float(rank + 1))


def _spread(kind: str) -> nn.Module:
    torch._dynamo.reset()
    model = _make()
    if kind == "replicated":
        return torch.compile(DistributedDataParallel(model), backend="aot_eager")
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if kind == "sharded":
        return torch.compile(model, backend="aot_eager")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def _capture(model: nn.Module, rank: int) -> dict[str, tuple[Tensor, Tensor | None]]:
    with hl.capture(model, "**", grads=True) as got:
        model(_input(rank)).square().mean().backward()
    return {one.path: (one.output.detach(), one.output.grad) for one in got}


def _train(kind: str, rank: int, *, is_watched: bool) -> tuple[list[Tensor], Any]:
    model = _spread(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = hl.watch(model, None, strict=True, rules=False) if is_watched else None
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(_input(rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if watched is None:
        return losses, None
    watched.close()
    rows = {str(row["site"]) for row in watched.history.sites()}
    return losses, (watched.history.steps.tolist(), watched.notes, rows)


def _work(rank: int) -> dict[str, Any]:
    return {
        kind: (
            _capture(_spread(kind), rank),
            _train(kind, rank, is_watched=False),
            _train(kind, rank, is_watched=True),
        )
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(_work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_rank(found: list[Any], kind: str) -> None:
    for rank in range(WORLD):
        wanted, got = _capture(_make(), rank), found[rank][kind][0]
        assert got.keys() == wanted.keys()
        for path, (value, grad) in wanted.items():
            torch.testing.assert_close(got[path], (value, grad), msg=f"{kind} {rank} {path}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_watch_changes_no_bit_and_hears_all(found: list[Any], kind: str) -> None:
    for rank in range(WORLD):
        _, (plain, _), (losses, (steps, notes, rows)) = found[rank][kind]
        assert all(map(torch.equal, plain, losses))
        assert steps == [0, 1, 2]
        # DistributedDataParallel breaks the graph around the model by itself.
        assert [note for note in notes if "broke its graph" not in note] == []
        sites = {f"blocks.{number}.widen:output" for number in range(2)}
        assert sites | {f"{one}.grad" for one in sites} | {"head.weight:update"} <= rows
