"""Other data of the same type and length: told apart by a few samples, wherever that is sound."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extracted_models import Layers, numbered
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hookline as hl
from hookline.extractions import probing
from hookline.extractions.probing import choose_positions, differ
from hookline.extractions.sources import open_source


class Drawn(Dataset[Tensor]):
    """Samples that are turned over at random, by whichever generator."""

    def __init__(self, kind: str = "torch", broken: int = -1) -> None:
        self.kind, self.broken, self.taken = kind, broken, 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Tensor:
        self.taken += 1
        if number == self.broken:
            raise OSError("the disk is gone")
        draws = {
            "torch": lambda: float(torch.rand(())),
            "numpy": np.random.rand,
            "random": random.random,
            "none": lambda: 0.0,
        }
        return numbered(40)[number] + draws[self.kind]()


def probe(data: Any, **options: Any) -> Any:
    return open_source(data, **options).probe()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 9, 1000, 10**9])
def test_positions_are_few_and_hold_the_first_and_the_last(size: int) -> None:
    found = choose_positions(size)
    assert len(found) == len(set(found)) == min(size, 5)
    assert not size or {0, size - 1} <= set(found)
    assert all(0 <= one < size for one in found)


def change(data: Any, at: int) -> Any:
    """Give the same data with one other sample."""
    if isinstance(data, (Tensor, np.ndarray)):
        other: Any = data.clone() if isinstance(data, Tensor) else data.copy()
        other[at] += 1
        return other
    return [*data[:at], {**data[at], "more": 1}, *data[at + 1 :]]


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(12.0).reshape(6, 2),
        torch.arange(6).to(torch.bfloat16),
        torch.arange(6) * 1j,
        np.arange(12).reshape(6, 2),
        [{"text": "a", "n": [1, None, True]}] * 6,
    ],
    ids=lambda one: f"{type(one).__name__}-{getattr(one, 'dtype', '')}",
)
def test_another_sample_is_seen(data: Any) -> None:
    assert differ(probe(data), probe(data)) == []
    for at in (0, 2, 5):
        assert differ(probe(change(data, at)), probe(data)) == [str(at)]
    loader = DataLoader(data, batch_size=4)
    assert differ(probe(DataLoader(change(data, 0))), probe(loader)) == ["0"]


def test_samples_are_the_same_in_every_process() -> None:
    data = [{"text": "é", "words": ["a", "b"], "x": torch.ones(3), "y": np.float32(2)}] * 7
    code = (
        "import torch, numpy as np; from hookline.extractions.sources import open_source; "
        "data = [{'text': 'é', 'words': ['a', 'b'], 'x': torch.ones(3), 'y': np.float32(2)}] * 7; "
        "print(open_source(data).probe())"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == str(probe(data))


@pytest.mark.parametrize("kind", ["torch", "numpy", "random"])
def test_samples_drawn_at_random_are_left_out_and_nothing_is_drawn(kind: str) -> None:
    data = Drawn(kind)
    states = [torch.get_rng_state(), str(np.random.get_state()), random.getstate()]
    assert probe(data) is None
    assert data.taken == 2
    assert torch.equal(torch.get_rng_state(), states[0])  # type: ignore[arg-type]
    assert [str(np.random.get_state()), random.getstate()] == states[1:]


def test_a_sample_that_cannot_be_read_says_nothing() -> None:
    assert list(probe(Drawn("none", broken=39))) == ["0", "9", "19", "29"]
    assert differ(probe(Drawn("none", broken=0)), probe(Drawn("none"))) == []
    unknown = [object(), {1, 2}, open_source, iter(())]
    assert len(probe(unknown)) == 4
    assert probe([{"text": "a"}, {"n": 1}], column="text").keys() == {"0"}


def test_samples_that_are_large_or_slow_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.zeros(2, 3 << 20)
    assert differ(probe(large), probe(large + 1)) == ["0", "1"]
    monkeypatch.setattr(probing, "_SECONDS", -1.0)
    data = Drawn("none")
    assert list(probe(data)) == ["0"]
    assert data.taken == 2


@pytest.mark.parametrize("kind", ["tensor", "list", "dataset", "loader", "npy"])
def test_other_data_of_the_same_length_are_refused(tmp_path: Path, kind: str) -> None:
    def make(samples: Tensor) -> Any:
        if kind == "npy":
            np.save(tmp_path / "rows.npy", samples.numpy())
        made = {
            "tensor": samples,
            "list": list(samples),
            "dataset": Drawn("none"),
            "loader": DataLoader(TensorDataset(samples), batch_size=7),
            "npy": str(tmp_path / "rows.npy"),
        }
        return made[kind]

    model, out = Layers(), tmp_path / "out"
    data = make(numbered(40))
    hl.extract(model, data, "first", out, limit=10)
    others = make(numbered(40) + 1)
    if kind == "dataset":
        others = Drawn("none")
        others.__class__ = type("Drawn", (Drawn,), {"__getitem__": lambda *_: torch.ones(4)})
    with pytest.raises(hl.StoreError, match=r"data: .*others, such as sample 0\)"):
        hl.extract(model, others, "first", out)
    with pytest.raises(hl.StoreError, match=r"data: .*others, such as sample 0\)"):
        hl.extract(model, others, "first", out, dry_run=True)
    assert hl.extract(model, make(numbered(40)), "first", out).advance.before == 10


def test_data_augmented_at_random_go_on(tmp_path: Path) -> None:
    for limit in (10, 25, None):
        result = hl.extract(Layers(), Drawn(), "first", tmp_path / "out", limit=limit)
    assert len(result.open()) == 40
    # Where two readings happened to be the same the first time, they are not the next.
    hl.extract(Layers(), Drawn("none"), "first", tmp_path / "b", limit=10)
    assert len(hl.extract(Layers(), Drawn(), "first", tmp_path / "b").open()) == 40
