"""Which rows of a log are not finite, asked before they are taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hookline.stats import Log
from hookline.stats.anywhere import TorchLog
from hookline.stats.cpu import CpuLog

LOGS = [CpuLog, lambda: CpuLog(use_compiled=False), lambda: TorchLog("cpu")]


@pytest.mark.parametrize("make", LOGS, ids=["compiled", "blocks", "torch"])
def test_rows_with_nan_or_infinity_are_named_and_stay(make: Callable[[], Log]) -> None:
    log = make()
    values = torch.ones(6, 1000)
    values[1, 7], values[3, 1], values[4, 0] = torch.nan, torch.inf, -torch.inf
    assert log.find_bad() == {}
    for one in values:
        log.add(one)
    assert log.find_bad() == {1: True, 3: False}
    log.add(values)
    assert log.find_bad() == {1: True, 3: False, 6: True}
    assert log.take().wait().rows[:, 1].tolist() == [0, 1, 0, 0, 0, 0, 1]
    assert log.find_bad() == {}


def test_pieces_of_a_large_tensor_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.stats.anywhere._PIECE", 64)
    log = TorchLog("cpu")
    value = torch.ones(1000)
    value[900] = torch.inf
    log.add(torch.ones(200))
    log.add(value)
    assert log.find_bad() == {1: False}
