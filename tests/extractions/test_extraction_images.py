"""Samples of folders of images: tensors of bytes, in the order of the paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hookline.extractions.sources import Broken, Wanted, open_source

EVERYTHING = Wanted.everything()


def read(data: Any, wanted: Wanted = EVERYTHING, **options: Any) -> list[tuple[int, Any]]:
    """Read the wanted samples of data."""
    return list(open_source(data, **options).samples(wanted))


def write_image(path: Path, mode: str = "RGB", colour: Any = (1, 2, 3)) -> Path:
    """Write an image of one colour, 5 wide and 4 high."""
    images = pytest.importorskip("PIL.Image")
    path.parent.mkdir(exist_ok=True, parents=True)
    images.new(mode, (5, 4), colour).save(path)
    return path


def test_images_are_tensors_sorted_by_path(tmp_path: Path) -> None:
    write_image(tmp_path / "cat" / "b.png", colour=(3, 4, 5))
    write_image(tmp_path / "cat" / "a.PNG", colour=(2, 4, 5))
    write_image(tmp_path / "bird" / "z.webp", colour=(100, 100, 100))
    write_image(tmp_path / "dog.jpg", colour=(200, 200, 200))
    (tmp_path / "metadata.jsonl").write_text("{}\n")
    source = open_source(tmp_path)
    assert source.size == 4
    found = dict(source.samples(EVERYTHING))
    assert all(sample.shape == (3, 4, 5) for sample in found.values())
    assert all(sample.dtype == torch.uint8 for sample in found.values())
    assert [int(found[number][0, 0, 0]) for number in (1, 2)] == [2, 3]
    assert found[1][:, 2, 2].tolist() == [2, 4, 5]
    assert abs(int(found[0][0, 0, 0]) - 100) < 3
    assert abs(int(found[3][0, 0, 0]) - 200) < 3


def test_images_of_other_modes_are_red_green_and_blue(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image")
    write_image(tmp_path / "0.png", "L", 7)
    write_image(tmp_path / "1.png", "RGBA", (1, 2, 3, 128))
    indexed = images.new("P", (5, 4), 0)
    indexed.putpalette([9, 8, 7] * 256)
    indexed.save(tmp_path / "2.png", transparency=b"\x00\x80")
    write_image(tmp_path / "3.png", "I;16", 40_000)
    found = dict(read(tmp_path))
    assert found[0][:, 0, 0].tolist() == [7, 7, 7]
    assert found[1][:, 0, 0].tolist() == [1, 2, 3]
    assert found[2][:, 0, 0].tolist() == [9, 8, 7]
    assert "more than 8 bits a channel" in str(found[3].error)


def test_broken_image_names_its_path_and_only_wanted_ones_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = pytest.importorskip("PIL.Image")
    for number in range(4):
        write_image(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_bytes(b"no image")
    source = open_source(tmp_path)
    opened = []
    original = images.open

    def note(path: Path) -> Any:
        opened.append(path.name)
        return original(path)

    monkeypatch.setattr(images, "open", note)
    found = dict(source.samples(Wanted.of_ranges([(1, 4)])))
    assert opened == ["1.png", "2.png", "3.png"]
    assert isinstance(found[2], Broken)
    assert str(tmp_path / "2.png") in str(found[2].error)
    assert found[3].shape == (3, 4, 5)
