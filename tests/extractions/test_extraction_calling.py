"""Samples that a model does not take: which part of them it may take, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from extracted_models import Layers, numbered
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline.extractions.samples import SampleError


def labelled() -> TensorDataset:
    """Give rows, each with a label."""
    return TensorDataset(numbered(9), torch.arange(9))


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_samples_of_several_values_are_told_how_to_pick_one(tmp_path: Path, on_error: Any) -> None:
    with pytest.raises(hl.StoreError) as told:
        hl.extract(Layers(), labelled(), "first", tmp_path / "out", on_error=on_error)
    assert str(told.value) == (
        "`Layers.forward` does not take what a sample holds (Layers.forward() takes 2 positional "
        "arguments but 3 were given); a sample is 2 values: pick one of them, such as column=0, or "
        "make what it takes by a function of a sample, prepare="
    )
    assert isinstance(told.value.__cause__, TypeError)


def test_samples_of_several_fields_are_told_so_too(tmp_path: Path) -> None:
    rows = [{"x": row, "label": 1} for row in numbered(3)]
    with pytest.raises(hl.StoreError, match="a sample has the fields x, label: pick one of them"):
        hl.extract(Layers(), rows, "first", tmp_path / "out")


@pytest.mark.parametrize("column", [0, "0"], ids=repr)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_column_picks_one_value_of_a_tuple(
    tmp_path: Path, column: int | str, is_loaded: bool
) -> None:
    data: Any = DataLoader(labelled(), batch_size=4) if is_loaded else labelled()
    result = hl.extract(Layers(), data, "first", tmp_path / "out", column=column)
    torch.testing.assert_close(result.open()["first"][:], Layers().first(numbered(9)).detach())


def test_a_place_that_no_value_has_is_told(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="column=2 is not among the 2 values of a sample"):
        hl.extract(Layers(), labelled(), "first", tmp_path / "out", column=2)


@pytest.mark.parametrize("kind", ["convolution", "product"])
def test_bytes_that_a_model_does_not_take_are_told_to_become_floats(
    tmp_path: Path, kind: str
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 1) if kind == "convolution" else nn.Linear(4, 2))
    images = torch.zeros(5, 3, 4, 4, dtype=torch.uint8)
    with pytest.raises(hl.StoreError, match="as images are read: make floats of them"):
        hl.extract(model, images, "0", tmp_path / "out")
    hl.extract(model, images, "0", tmp_path / "out", prepare=lambda image: image / 255)


def test_errors_of_the_model_itself_stay_as_they_are(tmp_path: Path) -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return len(5)  # type: ignore[arg-type]

    with pytest.raises(SampleError, match=r"TypeError: object of type .int. has no len"):
        hl.extract(Wrong(), numbered(3), "", tmp_path / "out")
