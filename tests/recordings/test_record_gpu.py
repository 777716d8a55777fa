"""Recording on a GPU: the same bits, numbers as on the CPU, a call that is made again there."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from traced_models import Small, assert_same, find, square, tokens, train

from hookline.comparisons import diff
from hookline.diffs.measuring import relative_error
from hookline.diffs.reading import open_trace
from hookline.recordings import read_call, record, trace_step

pytestmark = pytest.mark.gpu


def make(way: str = "plain", dropout: float = 0.3) -> nn.Module:
    return Small(way=way, dropout=dropout).cuda()


def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=step > 1):
            loss = square(model(tokens(step).cuda()).float())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("way", ["plain", "reentrant", "not reentrant"])
@pytest.mark.parametrize("options", [{}, {"tensors": True}], ids=str)
def test_a_recorded_training_is_the_same_to_the_last_bit(
    tmp_path: Path, way: str, options: dict[str, Any]
) -> None:
    one = functools.partial(make, way)
    assert_same(train(one, loop), train(one, loop, tmp_path / "run", **options))
    assert list(open_trace(tmp_path / "run").steps) == [0, 1, 2, 3]


def test_a_trace_has_the_numbers_of_the_cpu() -> None:
    torch.manual_seed(0)
    model = Small()
    here = trace_step(model, (tokens(),), loss=square)
    there = trace_step(copy.deepcopy(model).cuda(), (tokens().cuda(),), loss=square)
    for site in here.sites:
        same = find(there, site.address, visit=site.visit, is_part=site.is_part)
        kept = there.tensor(same.id)
        assert kept is not None
        assert relative_error(here.tensor(site.id), kept) < 1e-4, site.address
    ours, theirs = here.measurements(0), there.measurements(0)
    output = find(here, "head:output").id
    assert np.allclose(ours.rows[output], theirs.rows[output], rtol=1e-4, atol=1e-5)


def test_a_bug_is_found_and_a_kept_call_goes_back_to_the_device(tmp_path: Path) -> None:
    model = make(dropout=0.0)
    broken: Any = copy.deepcopy(model)
    broken.blocks[1].mlp[1].approximate = "tanh"
    record(model, tmp_path / "run", (tokens().cuda(),), loss=square)
    stored = read_call(tmp_path / "run")
    assert stored is not None
    assert stored[0][0].is_cuda
    assert diff(tmp_path / "run", model, loss=square).same
    assert diff(tmp_path / "run", broken, loss=square).first == "blocks.1.mlp.1"
    assert diff(model, broken, (tokens().cuda(),), loss=square).first == "blocks.1.mlp.1"
