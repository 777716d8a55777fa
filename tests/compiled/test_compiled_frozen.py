"""Inference with inductor's freezing, which makes constants of weights, and of keys with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

import hookline as hl


@pytest.fixture(autouse=True)
def freeze() -> Iterator[None]:
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        yield


def make_linear() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4)
    return nn.Sequential(*layers).eval(), torch.randn(2, 8)


def make_convolution() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)
    return nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8)


both = pytest.mark.parametrize("make", [make_linear, make_convolution])


def capture(model: nn.Module, run: nn.Module, x: Tensor) -> list[Tensor]:
    with hl.capture(model, "*") as got:
        run(x)
    return [got[name].output for name in "0123"]


@both
def test_each_capture_has_the_values_of_its_call(make: type) -> None:
    net, x = make()
    compiled = torch.compile(net)
    plain = compiled(x)
    for factor in (1, 2, 3):
        heard = capture(compiled, compiled, factor * x)
        torch.testing.assert_close(heard, capture(net, net, factor * x))
    assert torch.equal(compiled(x), plain)


@both
def test_an_edit_changes_what_comes_after_it(make: type) -> None:
    net, x = make()
    compiled = torch.compile(net)
    for factor in (0.0, 2.0):
        with hl.edit(compiled, {"0": hl.scale(factor)}) as edited:
            new = compiled(x)
        with hl.edit(net, {"0": hl.scale(factor)}):
            torch.testing.assert_close(new, net(x))
        assert [row["applied"] for row in edited.report()] == [1]


@both
def test_a_watch_measures_every_step(make: type) -> None:
    net, x = make()
    compiled = torch.compile(net)
    with hl.watch(compiled, with_inference=True, rules=False) as w:
        for _ in range(3):
            compiled(x)
            w.step()
    for number in range(3):
        rows = {row["site"] for row in w.table(step=number)}
        assert {f"{name}:output" for name in ("0", "1", "2", "3", "")} <= rows
