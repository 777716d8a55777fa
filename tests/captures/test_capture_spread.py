"""Captures of values that are spread over ranks: this rank's part, or the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from torch import Tensor, nn

import hookline as hl


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(4, 6)


def describe(got: hl.Captured) -> dict[str, tuple[str, Tensor]]:
    """Give the type of each tensor, and its numbers as far as this rank has them."""
    return {
        name: (type(one).__name__, getattr(one, "_local_tensor", one).detach().clone())
        for name, one in got.tensors().items()
    }


def capture_on_rank(rank: int) -> dict[str, Any]:
    """Capture the same with a plan of tensor parallelism, local and whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, x = make()
    plan: Any = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    found = {}
    for full in (False, True):
        with hl.capture(model, "**", grads=True, full=full) as got:
            model(x).square().sum().backward()
        found[full] = describe(got)
    with hl.capture(model, "up", full=True, reduce="mean") as got:
        model(x)
    found["mean"] = got["up"].output
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_on_ranks(capture_on_rank, Path(tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    model, x = make()
    with hl.capture(model, "**", grads=True) as got:
        model(x).square().sum().backward()
    return got.tensors()


def test_a_spread_value_is_this_ranks_part(ranks: Any, expected: dict[str, Tensor]) -> None:
    for rank, found in enumerate(ranks):
        for name in ("up:output", "act:output", "up:output.grad"):
            kind, local = found[False][name]
            assert kind == "DTensor"
            torch.testing.assert_close(local, expected[name][:, 4 * rank : 4 * rank + 4])


def test_full_gives_every_rank_the_whole(ranks: Any, expected: dict[str, Tensor]) -> None:
    for found in ranks:
        for name, value in expected.items():
            kind, whole = found[True][name]
            assert kind == "Tensor"
            torch.testing.assert_close(whole, value.detach())
        torch.testing.assert_close(found["mean"], expected["up:output"].mean())


def test_what_is_on_its_way_is_waited_for(ranks: Any, expected: dict[str, Tensor]) -> None:
    for found in ranks:
        kind, value = found[False]["down:output"]
        assert kind == "Tensor"  # RowwiseParallel gives something that arrives later
        torch.testing.assert_close(value, expected["down:output"])
