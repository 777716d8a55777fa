"""Comparing on a GPU: the same answers there, between devices, and from recordings."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import planted_gpt as planted
import pytest
import torch
from torch import Tensor

import hookline as hl

pytestmark = pytest.mark.gpu

BUGS = [
    planted.tanh_gelu,
    planted.epsilon,
    planted.missing_residual,
    planted.wrong_scale,
    planted.detached,
    planted.wrong_backward,
]


def make_pair() -> tuple[planted.Gpt, planted.Gpt, Tensor]:
    model = planted.make_gpt().cuda()
    return model, deepcopy(model), planted.make_words().cuda()


@pytest.mark.parametrize("plant", BUGS)
def test_module_is_the_one_that_a_cpu_names(plant: Callable[[planted.Gpt], None]) -> None:
    model, other, words = make_pair()
    plant(other)
    found = hl.diff(model, other, (words,), loss=planted.loss_of)
    here = hl.diff(model.cpu(), other.cpu(), (words.cpu(),), loss=planted.loss_of)
    assert not found.same
    assert (found.first, found.direction) == (here.first, here.direction)


@pytest.mark.parametrize("plant", BUGS)
def test_recordings_name_it_too(plant: Callable[[planted.Gpt], None], tmp_path: Path) -> None:
    model, other, words = make_pair()
    plant(other)
    expected = hl.diff(model, other, (words,), loss=planted.loss_of)
    for name, one in (("a", model), ("b", other)):
        hl.record(one, tmp_path / name, (words,), loss=planted.loss_of)
    assert hl.diff(tmp_path / "a", tmp_path / "b").first == expected.first


def test_the_other_device_is_no_difference() -> None:
    model, other, words = make_pair()
    found = hl.diff(model, other.cpu(), (words,), inputs_b=(words.cpu(),), loss=planted.loss_of)
    assert found.same, str(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_against_itself_is_equal(dtype: torch.dtype) -> None:
    model, other, words = make_pair()
    found = hl.diff(model.to(dtype), other.to(dtype), (words,), loss=planted.loss_of)
    assert found.same, str(found)
    assert found.agree_to == 0


def test_half_precision_against_full() -> None:
    model, other, words = make_pair()
    found = hl.diff(model, other.bfloat16(), (words,), loss=planted.loss_of)
    assert found.same, str(found)


def test_recorded_training_is_bit_for_bit_the_same(tmp_path: Path) -> None:
    def train(model: planted.Gpt, words: Tensor) -> list[float]:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = planted.loss_of(model(words))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, other, words = make_pair()
    with hl.record(model, tmp_path / "a"):
        recorded = train(model, words)
    assert recorded == train(other, words)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    assert hl.diff(tmp_path / "a", tmp_path / "a").same
