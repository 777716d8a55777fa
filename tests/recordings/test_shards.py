"""Values that are spread over ranks: sketches of parts add up to that of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardOf

from hookline.diffs.reading import open_trace
from hookline.recordings import record
from hookline.recordings.shards import Shard, find_shard, sketch_shard
from hookline.stats.reference import sketch


@pytest.mark.parametrize("parts", [(2, 1, 1), (3, 2, 1), (1, 1, 4), (7, 1, 1)], ids=str)
def test_sketches_of_parts_add_up_to_that_of_the_whole(parts: tuple[int, ...]) -> None:
    whole = torch.randn(7, 10, 9, dtype=torch.float64)
    total = torch.zeros(64, dtype=torch.float64)
    cuts = [np.array_split(np.arange(size), n) for size, n in zip(whole.shape, parts, strict=True)]
    for ranges in itertools.product(*cuts):
        own = tuple(slice(int(one[0]), int(one[-1]) + 1) for one in ranges)
        offset = tuple(int(one[0]) for one in ranges)
        total += sketch_shard(Shard(whole[own], tuple(whole.shape), offset))
    assert torch.allclose(total, sketch(whole))


def test_a_part_without_elements_and_a_single_number_are_sketched() -> None:
    empty = Shard(torch.empty(0, 3), (4, 3), (4, 0))
    assert sketch_shard(empty).abs().sum() == 0
    assert torch.equal(sketch_shard(Shard(torch.tensor(2.0), (), ())), sketch(torch.tensor(2.0)))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_a_sharded_parameter_is_recorded_as_the_part_it_is(tmp_path: Path, one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(6, 4)
    plain = model.weight.detach().clone()
    model.weight = nn.Parameter(distribute_tensor(plain, mesh, [ShardOf(0)]))
    model.bias = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    assert find_shard(model.bias) is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = distribute_tensor(torch.ones(2, 6), mesh, [Replicate()])
    with record(model, tmp_path / "run"):
        model(x).sum().backward()
        optimizer.step()
    trace = open_trace(tmp_path / "run")
    sites = {site.address: site for site in trace.sites}
    assert sites["weight"].more["shard"] == {"offset": [0, 0], "shape": [4, 6]}
    assert "shard" not in sites["bias"].more
    made = trace.measurements(0).sketches
    assert np.allclose(made[sites["weight"].id], sketch(plain).numpy(), atol=1e-6)
    assert sites["weight:update"].more["shard"]["shape"] == [4, 6]
    assert not np.isnan(made[sites["weight:update"].id]).any()
    assert not np.isnan(made[sites[":output"].id]).any()
