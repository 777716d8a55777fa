"""The private corners of torch's ranks that hookline stands on behave as it relies on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hookline import _ranks


@pytest.fixture
def alone() -> Iterator[None]:
    """Be a process group of one."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_there_are_no_ranks_without_a_process_group() -> None:
    assert _ranks.count_ranks() == 0
    assert _ranks.active_ddp() is None


def test_ddp_tells_whether_it_reduces(alone: None) -> None:
    assert _ranks.count_ranks() == 1
    model = nn.Linear(2, 2)
    ddp = nn.parallel.DistributedDataParallel(model)
    active = []
    model.register_forward_hook(lambda *given: active.append(_ranks.active_ddp()))
    assert _ranks.is_ddp(ddp)
    assert _ranks.is_of_ddp(ddp, model.weight)
    assert not _ranks.is_of_ddp(ddp, nn.Linear(2, 2).weight)
    with ddp.no_sync():
        ddp(torch.ones(1, 2)).sum().backward()
    assert not _ranks.will_reduce(ddp)
    ddp(torch.ones(1, 2)).sum().backward()
    assert _ranks.will_reduce(ddp)
    assert active == [ddp, ddp]


def test_fully_sharded_parameter_has_a_part_and_a_whole(alone: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    assert list(_ranks.fsdp_parameters(model)) == []
    fully_shard(model)
    ((place, name, manager),) = _ranks.fsdp_parameters(model)
    assert (place, name) == (model[0], "weight")
    assert _ranks.sharded_of(manager) is model[0].weight
    assert _ranks.is_spread(model[0].weight)
    assert _ranks.whole_of(manager) is None
    seen = []
    model[0].register_forward_hook(lambda module, *given: seen.append(module.weight))
    model(torch.ones(1, 2))
    assert _ranks.whole_of(manager) is seen[0]
    assert not _ranks.is_spread(seen[0])
