"""Programs of torch.export: their modules, their operations, and exporting what is hooked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_modules_of_an_exported_model_are_heard_and_edited(model: nn.Module, x: Tensor) -> None:
    exported = torch.export.unflatten(torch.export.export(model, (x,)))
    with hl.capture(exported, "0", grads=True) as got:
        exported(x).sum().backward()
    assert torch.equal(got["0"].output, model[0](x))  # type: ignore[index,operator]
    assert got["0"].output.grad is not None
    with hl.edit(exported, {"0": hl.zero()}):
        assert not exported(x).any()


def test_operations_of_an_exported_model_are_heard(model: nn.Module, x: Tensor) -> None:
    exported = torch.export.export(model, (x,)).module()
    with hl.capture(exported, "/linear") as got:
        exported(x)
    assert torch.equal(got["/linear"], model[0](x))  # type: ignore[index,operator]


def test_a_program_is_refused_with_what_to_give_instead(model: nn.Module, x: Tensor) -> None:
    program = torch.export.export(model, (x,))
    with pytest.raises(hl.UnsupportedModel, match="unflatten"):
        hl.capture(program, "0").__enter__()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unflatten"):
        hl.watch(program)  # type: ignore[arg-type]


def test_what_is_exported_is_the_model_alone(model: nn.Module, x: Tensor) -> None:
    alone = torch.export.export(model, (x,)).graph
    with hl.watch(model, None, rules=False):
        hooked = torch.export.export(model, (x,)).graph
    assert str(alone) == str(hooked)
