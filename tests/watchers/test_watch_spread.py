"""A watch of models that are spread over ranks: read as one run, it is that of the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from torch import Tensor, nn

import hookline as hl

STEPS = 3
ROWS = 8
"""Samples of a step, over all ranks."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(x)))
        return out


class Net(nn.Module):
    """Blocks by name, so that a stage of a pipeline can lack some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(4)})
        self.head: nn.Module | None = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def make_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 8, generator=generator) for _ in range(STEPS)]


def train(model: nn.Module, batches: list[Tensor], folder: Path | str | None) -> Any:
    """Train with or without a watch; give the losses and what is left of it."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    watched = None if folder is None else hl.watch(model, folder)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if watched is not None:
        watched.close()
    return losses, [] if watched is None else watched.notes


def shard(model: Net) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks.values():
        fully_shard(block)
    fully_shard(model)


def parallelize(model: Net, world: int, *, is_local: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks.values():
        up = ColwiseParallel(use_local_output=is_local)
        plan: Any = {"up": up, "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)


KINDS = ["fsdp2", "local outputs", "DTensor outputs"]


def train_spread(kind: str, folder: str, world: int, rank: int) -> Any:
    """Train a model spread over the ranks, plainly and watched."""
    found = {}
    for name, where in (("plain", None), ("watched", folder)):
        model, batches = make_net(), make_batches()
        if kind == "fsdp2":
            shard(model)
            batches = [one.chunk(world)[rank] for one in batches]
        else:
            parallelize(model, world, is_local=kind == "local outputs")
        found[name], notes = train(model, batches, where)
        found["notes"] = notes
    return found


def train_all(folder: str, world: int, rank: int) -> Any:
    """Train every kind of model; starting processes takes longer than that."""
    found = {kind: train_spread(kind, f"{folder}/{kind}", world, rank) for kind in KINDS}
    found["pipeline"] = train_stage(f"{folder}/pipeline", world, rank)
    return found


@pytest.fixture(scope="module", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Any], Path, int]:
    """Give what each rank found, where the runs are, and how many ranks there are."""
    folder, world = tmp_path_factory.mktemp("ranks"), request.param
    return run_on_ranks(partial(train_all, str(folder), world), folder, world), folder, world


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> hl.Run:
    """Give the run of the whole model in one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(make_net(), make_batches(), folder)
    return hl.open_run(folder)


SITES = [
    *("blocks.0.up", "blocks.0.act", "blocks.0.down", "blocks.3", "head", "blocks.0:output.grad"),
    *("blocks.0.up:output.grad", "blocks.0.up.weight", "blocks.0.up.weight:grad"),
    *("blocks.0.down.weight:grad", "blocks.0.down.bias", "blocks.2.up.bias:update"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_measure_the_whole_model(kind: str, ranks: Any, expected: hl.Run) -> None:
    found, folder, world = ranks
    for one in (each[kind] for each in found):
        assert one["notes"] == []
        assert all(map(torch.equal, one["plain"], one["watched"]))
    run = hl.open_run(folder / kind)
    assert run.ranks == tuple(range(world))
    assert run.steps.tolist() == list(range(STEPS))
    names = {str(row["site"]) for row in run.sites()}
    assert names == {str(row["site"]) for row in expected.sites()}
    for site in SITES:
        # Each rank's loss is the mean over its own samples: gradients of values are larger by that.
        factor = world if kind == "fsdp2" and site.endswith("output.grad") else 1
        for stat in ("mean", "rms", "min", "max"):
            mine, theirs = (one.series(site, stat).values for one in (run, expected))
            assert mine == pytest.approx(theirs * factor, rel=2e-3, abs=2e-6), (site, stat)


def test_what_is_sharded_is_counted_once(ranks: Any, expected: hl.Run) -> None:
    run = hl.open_run(ranks[1] / "fsdp2")
    for site in ("blocks.0.up", "blocks.0.up.weight", "blocks.0.up.weight:grad"):
        counts = [one.series(site, "count").values.tolist() for one in (run, expected)]
        assert counts[0] == counts[1]


def train_stage(folder: str, world: int, rank: int) -> Any:
    """Train one stage of a pipeline."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = make_net()
    mine = range(rank * 4 // world, (rank + 1) * 4 // world)
    for number in [one for one in range(4) if one not in mine]:
        del model.blocks[str(number)]
    if rank < world - 1:
        model.head = None
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, n_microbatches=4, loss_fn=lambda output, _: output.square().mean()
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with hl.watch(model, folder) as watched:
        for batch in make_batches():
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(batch)
            elif rank == world - 1:
                schedule.step(target=torch.zeros(ROWS))
            else:
                schedule.step()
            optimizer.step()
    return watched.notes


def test_stages_of_a_pipeline_are_one_run(ranks: Any, expected: hl.Run) -> None:
    found, folder, world = ranks
    assert [one["pipeline"] for one in found] == [[]] * world
    run = hl.open_run(folder / "pipeline")
    assert run.ranks == tuple(range(world))
    names = {str(row["site"]) for row in run.sites()}
    assert {f"blocks.{number}.up:output" for number in range(4)} <= names
    # In the first step a stage runs once more, to find out shapes.
    for site in ("blocks.0.up", "blocks.3", "head", "blocks.0.up.weight", "head.weight:grad"):
        for stat in ("mean", "rms"):
            mine, theirs = (one.series(site, stat).values[1:] for one in (run, expected))
            assert mine == pytest.approx(theirs, rel=2e-3, abs=2e-6), (site, stat)
