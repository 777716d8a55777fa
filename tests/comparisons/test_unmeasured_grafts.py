"""Where running the modules again cannot tell, what the traces say stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl
from hookline.comparisons import grafting


class Give(nn.Module):
    """Give a value of its own."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = [value]

    def forward(self, x: Tensor) -> Any:
        return self.value[0]


class Beside(nn.Module):
    """Call a module whose value leads nowhere."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.give = Give(value)

    def forward(self, x: Tensor) -> Tensor:
        self.give(x)
        out: Tensor = self.linear(x)
        return out


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_values_are_compared_by_the_graft_too(layout: torch.layout) -> None:
    one, other = ((number * torch.eye(3)).to_sparse(layout=layout) for number in (1.0, 2.0))
    found = hl.diff(Beside(one), Beside(other), (torch.ones(2, 4),))
    assert (found.same, found.first) == (False, "give")
    assert found.graft is not None
    assert found.graft["verdict"] == "itself"
    assert hl.diff(Beside(one), Beside(one), (torch.ones(2, 4),)).same


def test_verdict_stands_where_outputs_have_no_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> float:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(grafting, "relative_error", refuse)
    found = hl.diff(Beside(torch.ones(3)), Beside(torch.zeros(3)), (torch.ones(2, 4),))
    assert (found.same, found.first, found.graft) == (False, "give", None)
    assert any("no graft: NotImplementedError" in note for note in found.notes)
