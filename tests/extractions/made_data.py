"""Small data sets that note what is read of them, and a folder that command lines work in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import Dataset, IterableDataset


class Squares(Dataset[int]):
    """Ten samples; one of them cannot be read, and each that is read is noted."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken
        self.taken: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> int:
        self.taken.append(number)
        if number == self.broken:
            raise OSError("the disk is gone")
        return number**2


class Counting(IterableDataset[int]):
    """A stream of samples that says how far it was read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0

    def __len__(self) -> int:
        return 999

    def __iter__(self) -> Iterator[int]:
        for number in range(self.size):
            self.taken = number + 1
            yield number


def enter_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Path:
    """Work in a folder whose `net.py` has the model and the data."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "net", raising=False)
    (folder / "net.py").write_text(code)
    return folder


def files_in(folder: Path) -> list[str]:
    """Name everything under a folder."""
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*"))
