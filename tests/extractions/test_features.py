"""Activations as more columns of batches: plain ones, Hugging Face data sets, Ray Data's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookline as hl


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.embed(input_ids)
        return out


def make_batch(count: int = 5) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {"name": np.arange(count), "x": random.random((count, 4), np.float32)}


def test_sites_become_columns() -> None:
    model, batch = make_model(), make_batch()
    found = hl.AddFeatures(model, ["0", "1"], column="x")(batch)
    assert list(found) == ["name", "x", "0:output", "1:output"]
    expected = model[0](torch.from_numpy(batch["x"])).detach()  # type: ignore[operator,index]
    np.testing.assert_allclose(found["0:output"], expected.numpy(), rtol=1e-6)
    np.testing.assert_allclose(found["1:output"], expected.tanh().numpy(), rtol=1e-6)
    assert model.training
    assert not len(hl.inventory(model))


def test_a_model_is_made_once_by_a_function() -> None:
    made = []

    def make() -> nn.Module:
        made.append(make_model())
        return made[-1]

    add = hl.AddFeatures(make, "2", column="x", dtype=torch.bfloat16)
    for _ in range(3):
        assert add(make_batch())["2:output"].dtype == np.float32
    assert len(made) == 1


def test_tokens_become_arrays_of_their_own_lengths() -> None:
    batch = {"input_ids": [[1, 2, 3], [4]], "number": [7, 8]}
    add = hl.AddFeatures(Words(), "embed", prepare=lambda one: {"input_ids": one["input_ids"]})
    found = add(batch)
    assert [one.shape for one in found["embed:output"]] == [(3, 3), (1, 3)]
    assert found["number"] == [7, 8]


def test_an_empty_batch_stays_one() -> None:
    assert hl.AddFeatures(make_model(), "0", column="x")({"x": []}) == {"x": []}


def test_a_missing_column_and_a_bad_sample_are_named() -> None:
    add = hl.AddFeatures(make_model(), "0", column="y")
    with pytest.raises(ValueError, match="no column `y`; it has name, x"):
        add(make_batch())
    add = hl.AddFeatures(make_model(), "0", column="x")
    with pytest.raises(hl.HooklineError, match="sample 0"):
        add({"x": [torch.ones(3)]})


def test_hugging_face_data_sets_map_it() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": make_batch()["x"].tolist()})
    add = hl.AddFeatures(make_model(), "2", prepare=torch.tensor)
    found = data.map(add, batched=True, batch_size=2, new_fingerprint="features")
    expected = make_model()(torch.from_numpy(make_batch()["x"])).detach()
    np.testing.assert_allclose(np.array(found["2:output"]), expected.numpy(), rtol=1e-5)
