"""Recordings of whole tensors are compared without being read whole."""

from __future__ import annotations

import weakref
from pathlib import Path

import planted_gpt as planted
import pytest
from torch import Tensor

import hookline as hl
from hookline.diffs.reading import RunTrace


def test_no_more_than_two_tensors_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = planted.make_gpt()
    for name in ("a", "b"):
        hl.record(
            model, tmp_path / name, (planted.make_words(),), loss=planted.loss_of, tensors=True
        )
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    read = most = 0
    plain = RunTrace.tensor

    def tensor(self: RunTrace, site: int, step: int) -> Tensor | None:
        nonlocal read, most
        found = plain(self, site, step)
        if found is not None:
            alive.add(found)
            read, most = read + 1, max(most, len(alive))
        return found

    monkeypatch.setattr(RunTrace, "tensor", tensor)
    assert hl.diff(tmp_path / "a", tmp_path / "b").same
    assert read > 200
    assert most <= 2
