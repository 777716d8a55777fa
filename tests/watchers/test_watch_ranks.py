"""A watch on several ranks: the training is the same, and their statistics are read as one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import run_on_ranks
from small_models import Net, is_clean
from torch.nn.parallel import DistributedDataParallel

import hookline as hl

STEPS = 5


def train_on_rank(folder: str, rank: int) -> dict[str, Any]:
    """Train twice, plainly and watched, each rank on its own batches."""
    found: dict[str, Any] = {}
    for name in ("plain", "watched"):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        watched = hl.watch(model, folder) if name == "watched" else None
        generator = torch.Generator().manual_seed(rank)
        losses, outputs = [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            for micro in range(2):
                batch = torch.randn(4 + rank, 3, generator=generator)
                if micro == 0 and step % 2:
                    with model.no_sync():
                        loss = model(batch).square().mean()
                        loss.backward()
                else:
                    output = model(batch)
                    outputs.append(output.detach())
                    loss = output.square().mean()
                    loss.backward()
                losses.append(loss.detach())
            optimizer.step()
        if watched is not None:
            watched.close()
            assert is_clean(model)
            found["notes"] = watched.notes
            found["gradient"] = model.module.fc1.weight.grad
        found[name] = [*losses, *(one.detach() for one in model.parameters())]
        found["outputs"] = outputs
    return found


def test_ranks_train_as_before_and_are_read_as_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ranks = run_on_ranks(partial(train_on_rank, str(folder)), tmp_path)
    for one in ranks:
        for plain, watched in zip(one["plain"], one["watched"], strict=True):
            assert torch.equal(plain, watched)
        assert one["notes"] == []
    assert sorted(path.name for path in folder.glob("rank-*.sqlite")) == [
        "rank-00000.sqlite",
        "rank-00001.sqlite",
    ]
    run = hl.open_run(folder)
    assert run.ranks == (0, 1)
    assert run.status == "finished"
    assert run.steps.tolist() == list(range(STEPS))
    assert run.series("fc1", "count", rank=0).values.tolist() == [32.0] * STEPS
    assert run.series("fc1", "count").values.tolist() == [72.0] * STEPS
    last = torch.cat([output for one in ranks for output in one["outputs"][-2:]]).double()
    assert run.series("fc2", "rms").values[-1] == np.float64(run.series("", "rms").values[-1])
    assert abs(run.series("fc2", "rms").values[-1] / last.square().mean().sqrt() - 1) < 1e-6
    # The optimizer of every rank is given the mean over ranks.
    for rank, one in enumerate(ranks):
        size = run.series("fc1.weight:grad", "l2", rank=rank).values[-1]
        assert abs(size / one["gradient"].double().norm() - 1) < 1e-6
