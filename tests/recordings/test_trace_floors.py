"""How far rounding alone moves each site."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from traced_models import Small, assert_same, find, snapshot, square, tokens

from hookline.recordings import calibrate_floors, perturb, trace_step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_perturbation_is_a_few_units_of_round_off(dtype: torch.dtype) -> None:
    x = torch.randn(1000).to(dtype)
    moved = perturb(x, torch.Generator().manual_seed(0))
    assert moved.dtype == dtype
    apart = ((moved.double() - x.double()) / x.double()).abs() / torch.finfo(dtype).eps
    assert 0.2 < apart.mean() < 3
    assert apart.max() <= 4
    assert not torch.equal(moved, perturb(x, torch.Generator().manual_seed(1)))


def test_floors_are_small_and_there_for_every_site() -> None:
    model = Small()
    before = snapshot(model)
    trace = trace_step(model, (tokens(),), loss=square)
    floors = calibrate_floors(model, (tokens(),), loss=square, trace=trace)
    assert_same(before, snapshot(model))
    assert not np.isnan(floors).any()
    assert floors[find(trace, ":input.tokens").id] == 0
    assert floors[find(trace, "embed.weight").id] == 0
    for address in ("blocks.1:output", "blocks.0:output.grad", "embed.weight:grad"):
        assert 1e-8 < floors[find(trace, address).id] < 1e-4, address


def test_floors_follow_the_depth_and_the_dtype() -> None:
    torch.manual_seed(0)
    deep = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.Tanh())))
    x = torch.randn(8, 16)
    found = {}
    for dtype in (torch.float32, torch.float64):
        trace = trace_step(deep.to(dtype), (x.to(dtype),))
        floors = calibrate_floors(deep, (x.to(dtype),), trace=trace)
        found[dtype] = floors[find(trace, "23:output").id]
        assert floors[find(trace, "0:output").id] > 0
    assert found[torch.float64] < 1e-5 * found[torch.float32]


def test_a_perturbed_model_keeps_the_sites_of_the_plain_one() -> None:
    model = Small()
    plain = trace_step(model, (tokens(),), loss=square)
    moved = trace_step(model, (tokens(),), loss=square, perturb=perturb)
    assert [site.same_as for site in plain.sites] == [site.same_as for site in moved.sites]
    assert plain.index() == moved.index()
    rows = [one.measurements(0).rows for one in (plain, moved)]
    assert not np.array_equal(*rows, equal_nan=True)
    assert plain.loss == pytest.approx(moved.loss, rel=1e-4)
