"""A kernel is launched the short way only where that gives what Triton's own way gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu


def open_anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open a log in a process that has not tried the short way yet."""
    from hookline.stats.cuda import CudaLog
    from hookline.stats.launching import Launcher

    monkeypatch.setattr(Launcher, "is_quick", None)
    return CudaLog(torch.device("cuda"))


def assert_measures(log: Any) -> None:
    """Measure a few numbers, twice: the second launch may be another one than the first."""
    x = torch.tensor([1.0, 2.0, 6.0], device="cuda")
    log.add(x)
    log.add(x)
    for row in log.take().wait().rows:
        assert row.tolist() == [3, 0, 0, 0, 1, 6, 3, 14]


def test_the_short_way_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from hookline.stats.launching import Launcher

    log = open_anew(monkeypatch)
    assert Launcher.is_quick is True
    assert_measures(log)


def test_it_is_not_taken_where_triton_is_made_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    from hookline.stats import launching

    def shorten(compiled: Any) -> Any:
        return compiled.no_such_thing

    monkeypatch.setattr(launching, "_shorten", shorten)
    log = open_anew(monkeypatch)
    assert launching.Launcher.is_quick is False
    assert_measures(log)


def test_it_is_not_taken_where_it_gives_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from hookline.stats import launching

    def shorten(compiled: Any) -> Any:
        return (lambda *_: None), ()

    monkeypatch.setattr(launching, "_shorten", shorten)
    log = open_anew(monkeypatch)
    assert launching.Launcher.is_quick is False
    assert_measures(log)
