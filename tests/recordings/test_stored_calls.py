"""A call that is kept in a run can be made again."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookline.recordings import read_call, record
from hookline.recordings.calls import write_call
from hookline.replays.randomness import put_states, take_states
from hookline.runs import RunWriter


def keep(folder: Path, *args: Any, **kwargs: Any) -> Any:
    """Write a call into a run and read it."""
    with RunWriter(folder) as writer:
        tensors, facts = write_call(args, kwargs, take_states(in_full=True))
        writer.dump("inputs", tensors, {"step": 0, **facts})
    return read_call(folder)


def test_a_nested_call_comes_back(tmp_path: Path) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    given = {"y": [x, (torch.arange(3), None)], "f": math.inf, "n": 1.5}
    args, kwargs, _ = keep(
        tmp_path,
        x,
        "text",
        True,
        given,
        kind=torch.bfloat16,
        where=torch.device("cpu"),
        nan=math.nan,
    )
    assert args[0].equal(x)
    assert args[0].requires_grad
    assert args[1:3] == ("text", True)
    assert args[3]["y"][0].equal(x)
    assert isinstance(args[3]["y"][1], tuple)
    assert args[3]["y"][1][0].tolist() == [0, 1, 2]
    assert (args[3]["f"], args[3]["n"]) == (math.inf, 1.5)
    assert (kwargs["kind"], kwargs["where"]) == (torch.bfloat16, torch.device("cpu"))
    assert math.isnan(kwargs["nan"])


def test_random_states_come_back(tmp_path: Path) -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    _, _, states = keep(tmp_path, torch.ones(1))
    drawn = torch.rand(3), random.random(), np.random.rand()
    put_states(states)
    assert torch.equal(torch.rand(3), drawn[0])
    assert (random.random(), np.random.rand()) == drawn[1:]


def test_what_cannot_be_kept_gives_no_call(tmp_path: Path) -> None:
    assert keep(tmp_path, torch.ones(1), object()) is None


def test_a_run_without_inputs_gives_none(tmp_path: Path) -> None:
    RunWriter(tmp_path).close()
    assert read_call(tmp_path) is None


def test_a_step_is_found_by_its_number(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path / "run", tensors="weight"):
        for number in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 3), float(number))).sum().backward()
            optimizer.step()
    for step in (0, 1, 2):
        stored = read_call(tmp_path / "run", step=step)
        assert stored is not None
        assert stored[0][0][0, 0] == step
    assert read_call(tmp_path / "run", step=9) is None


@pytest.mark.parametrize("inputs", [(torch.ones(2, 3),), {"input": torch.ones(2, 3)}])
def test_a_recorded_step_keeps_its_inputs(tmp_path: Path, inputs: Any) -> None:
    record(nn.Linear(3, 3), tmp_path / "run", inputs, calibrate=False)
    stored = read_call(tmp_path / "run")
    assert stored is not None
    args, kwargs, _ = stored
    found: Tensor = args[0] if args else kwargs["input"]
    assert bool(args) == isinstance(inputs, tuple)
    assert found.equal(torch.ones(2, 3))
