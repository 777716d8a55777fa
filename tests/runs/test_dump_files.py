"""Dumps whose tensors come one by one: what is read is what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hookline as hl
from hookline.runs import DumpFile, RunWriter
from hookline.runs.dump_files import DTYPES


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> hl.Run:
    with RunWriter(folder) as writer:
        file = writer.open_dump("values-0")
        for key, one in tensors.items():
            assert file.add(key, one)
        assert len(file) == len(tensors)
        writer.finish_dump("values", file, {"step": 3})
    return hl.open_run(folder)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    plain = torch.tensor([0, 1, 2, 3, 4, 5]).to(dtype)
    dump = write(tmp_path, {"a": plain, "b": plain[:3]}).tensors["values"]
    assert dump["a"].dtype == dtype
    assert dump["a"].view(torch.uint8).equal(plain.view(torch.uint8))
    assert dump["b"].view(torch.uint8).equal(plain[:3].view(torch.uint8))
    assert dump.facts == {"step": 3}


def test_views_scalars_and_empty_tensors_come_back(tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    tensors = {
        "transposed": whole.t(),
        "strided": whole[:, ::2],
        "expanded": whole[:1].expand(5, 6),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "grad": torch.ones(2, requires_grad=True),
        "sparse": torch.eye(3).to_sparse(),
    }
    dump = write(tmp_path, tensors).tensors["values"]
    assert set(dump) == set(tensors)
    for key, one in tensors.items():
        assert dump[key].equal(one.detach().to_dense()), key


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    file = DumpFile(tmp_path, "values", rank=0)
    assert not file.add("a", torch.zeros(2, dtype=torch.complex128))
    assert len(file) == 0
    file.discard()
    assert list((tmp_path / "tensors").iterdir()) == []


def test_two_dumps_of_one_name_do_not_meet(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step in (0, 1):
            file = writer.open_dump("values")
            file.add("a", torch.tensor([step]))
            writer.finish_dump("values", file, {"step": step})
    found = {
        dump.facts["step"]: dump["a"].item() for dump in hl.open_run(tmp_path).tensors.values()
    }
    assert found == {0: 0, 1: 1}
    assert not [one for one in (tmp_path / "tensors").iterdir() if one.name.startswith(".")]


def test_a_folder_that_is_gone_is_said_as_one_error(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        (tmp_path / "run" / "tensors").write_text("in the way")
        with pytest.raises(hl.RunWriteError):
            writer.open_dump("values")
