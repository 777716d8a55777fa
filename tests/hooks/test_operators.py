"""The operators while a graph is made, given values without content."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hookline.hooks import operators

look, pass_by = operators._look, operators._pass_by

VALUES = {
    "plain": lambda: torch.empty(2, 3, 4),
    "transposed": lambda: torch.empty(2, 3, 4).transpose(0, 2),
    "sliced": lambda: torch.empty(6, 8)[::2, 1:5],
    "expanded": lambda: torch.empty(3, 1).expand(3, 5),
    "channels last": lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "half": lambda: torch.empty(0, 2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", VALUES)
def test_looking_at_a_value_without_content_gives_one_like_that_of_a_real_one(name: str) -> None:
    real = look(VALUES[name]())
    with FakeTensorMode():
        fake = look(VALUES[name]())
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_passing_a_value_without_content_does_not_go_through_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeTensorMode() as mode:
        value, key = torch.empty(3), torch.zeros(1, dtype=torch.int64)
        asked: list[Any] = []
        monkeypatch.setattr(mode, "dispatch", lambda called, *_: asked.append(called))
        assert pass_by(value, key, "output") is None
    assert asked == []


def test_a_real_value_among_those_without_content_is_refused_as_torch_does() -> None:
    value = torch.empty(3)
    with FakeTensorMode():
        key = torch.zeros(1, dtype=torch.int64)
        with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
            pass_by(value, key, "output")
