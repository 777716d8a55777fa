"""A difference that shows itself, whatever was compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.diffs.difference import Difference
from hookline.views import diff_page_html


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


@pytest.mark.parametrize("kinds", ["models", "run and model", "runs"])
def test_difference_writes_itself(model: nn.Module, tmp_path: Path, kinds: str) -> None:
    x = torch.ones(2, 4)
    hl.record(model, tmp_path / "run", (x,))
    a = model if kinds == "models" else tmp_path / "run"
    b = tmp_path / "run" if kinds == "runs" else model
    found = hl.diff(a, b, (x,) if kinds == "models" else None)
    assert isinstance(found, hl.Difference)
    found.to_html(tmp_path / "diff.html")
    assert (tmp_path / "diff.html").read_text("utf-8").startswith("<!doctype html>")
    assert found._repr_html_() == diff_page_html(found)


def test_replaced_difference_still_shows_itself(model: nn.Module) -> None:
    found = hl.diff(model, model, (torch.ones(2, 4),))
    assert isinstance(dataclasses.replace(found, notes=("a word",)), hl.Difference)


def test_what_is_found_knows_nothing_of_views() -> None:
    assert not hasattr(Difference, "to_html")
    assert issubclass(hl.Difference, Difference)
