"""What in a folder is a run's: only that is ever removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hookline as hl
from hookline._errors import RunExists
from hookline.comparisons.baselines import replace_run
from hookline.recordings import record
from hookline.runs.belonging import copy_run, find_others, find_own, prepare_folder


def keep(folder: Path, **options: object) -> None:
    """Record one step of a small model."""
    record(nn.Linear(2, 2), folder, (torch.ones(1, 2),), tensors=True, **options)  # type: ignore[arg-type]


def test_everything_a_recording_writes_is_its_own(tmp_path: Path) -> None:
    keep(tmp_path / "run")
    (tmp_path / "run/report.html").touch()
    assert find_others(tmp_path / "run") == []
    assert len(find_own(tmp_path / "run")) >= 8
    prepare_folder(tmp_path / "run", overwrite=True)
    assert not (tmp_path / "run").exists()


def test_everything_a_watch_writes_is_its_own(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with hl.watch(model, tmp_path / "run") as watch:
        model(torch.ones(1, 2)).sum().backward()
        watch.step()
    assert find_others(tmp_path / "run") == []


@pytest.mark.parametrize("name", ["thesis.txt", "notes.json", "report.html", "tensors/mine.pt"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_other_files_is_refused(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    with pytest.raises(RunExists, match="holds other files"):
        keep(tmp_path, overwrite=overwrite)
    with pytest.raises(RunExists, match="holds other files"):
        record(nn.Linear(2, 2), tmp_path, overwrite=overwrite)
    assert [one.name for one in tmp_path.iterdir()] == [Path(name).parts[0]]
    assert (tmp_path / name).read_text() == "precious"


@pytest.mark.parametrize("name", ["thesis.txt", "thesis.json", "tensors/mine.pt", "sub/file"])
def test_a_run_among_other_files_is_not_replaced(tmp_path: Path, name: str) -> None:
    keep(tmp_path / "run")
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).write_text("precious")
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(RunExists, match="holds other files"):
        keep(tmp_path / "run", overwrite=True)
    with pytest.raises(RunExists, match="holds other files"):
        replace_run(tmp_path / "run", keep)
    assert sorted((tmp_path / "run").rglob("*")) == before
    copy_run(tmp_path / "run", tmp_path / "copy")
    assert find_others(tmp_path / "copy") == []
    assert hl.diff(tmp_path / "run", tmp_path / "copy").same


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(RunExists, match="is a file"):
            keep(tmp_path / "train.py", overwrite=overwrite)
    assert (tmp_path / "train.py").read_text() == "precious"


def test_a_mistake_in_the_call_costs_no_run(tmp_path: Path) -> None:
    keep(tmp_path / "run")
    with pytest.raises(TypeError, match="needs inputs"):
        record(nn.Linear(2, 2), tmp_path / "run", loss=torch.sum, overwrite=True)
    assert hl.open_run(tmp_path / "run").steps[0] == 0


def test_what_another_rank_has_begun_is_no_reason(tmp_path: Path) -> None:
    (tmp_path / ".hookline-17").touch()
    prepare_folder(tmp_path)
    (tmp_path / "rank-00000.sqlite").touch()
    prepare_folder(tmp_path)
