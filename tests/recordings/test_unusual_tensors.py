"""Tensors that cannot be measured, or not as they are: a note, and never a crash."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline._errors import UnsupportedModel
from hookline.recordings import record, trace_step


def nest(x: Tensor) -> Tensor:
    """Make a nested tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are a prototype, says torch
        return torch.nested.nested_tensor([x.detach()[:1], x.detach()])


def quantize(x: Tensor) -> Tensor:
    """Make a quantized tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.quint8)


UNMEASURED = {"nested": nest, "quantized": quantize, "meta": lambda x: x.detach().to("meta")}
MEASURED = {
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "sparse": lambda x: x.detach().to_sparse(),
}


class Odd(nn.Module):
    """Pass an unusual tensor through a module, and hold another."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.same = nn.Identity()
        self.make = make
        self.register_buffer("held", make(torch.ones(2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        self.same(self.make(x))
        out: Tensor = self.linear(x)
        return out


def square(out: Tensor) -> Tensor:
    return out.square().sum()


def record_both_ways(model: nn.Module, folder: Path) -> list[list[str]]:
    """Record a step that is run here and a training, both with whole tensors; give the notes."""
    x = torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR")
        once = record(model, folder / "once", (x,), loss=square, tensors=True)
        with record(model, folder / "training", tensors=True, strict=True) as training:
            square(model(x)).backward()
            training.step()
        for one in ("once", "training"):
            assert hl.diff(folder / one, folder / one).same
    return [once.notes, training.notes]


@pytest.mark.parametrize("name", UNMEASURED)
def test_what_cannot_be_measured_is_noted(name: str, tmp_path: Path) -> None:
    for notes in record_both_ways(Odd(UNMEASURED[name]), tmp_path):
        for address in ("same:input.input", "held"):
            assert any(f"`{address}`" in one and name in one for one in notes), notes
        assert not any("linear" in one for one in notes)


@pytest.mark.parametrize("name", MEASURED)
def test_what_can_be_measured_is(name: str, tmp_path: Path) -> None:
    assert record_both_ways(Odd(MEASURED[name]), tmp_path) == [[], []]
    run = hl.open_run(tmp_path / "once")
    for address in ("same:input.input", "held"):
        assert run.series(address).values[0] > 0


def test_buffers_of_torchscript_are_taken(tmp_path: Path) -> None:
    scripted = torch.jit.script(nn.BatchNorm1d(3))
    model = nn.Sequential(nn.Linear(3, 3), scripted)
    trace = trace_step(model, (torch.randn(4, 3),), loss=square)
    own = {(one.address, one.visit) for one in trace.sites if one.kind == "buffer"}
    assert {("1.running_mean", 0), ("1.running_mean", 1)} <= own
    assert all("not traced inside" in one for one in trace.notes)


def test_a_model_without_values_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 3, device="meta")
    x = torch.ones(2, 3)
    for run in (
        lambda: trace_step(model, (x,)),
        lambda: record(model, tmp_path / "a", (x,)),
        lambda: record(model, tmp_path / "a"),
    ):
        with pytest.raises(UnsupportedModel, match="meta device"):
            run()
    assert list(tmp_path.iterdir()) == []
