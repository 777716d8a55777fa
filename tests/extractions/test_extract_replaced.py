"""`hl.extract` where a store is there already: gone on with, refused, or replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from extracted_models import Layers, numbered
from made_data import files_in

import hookline as hl
from hookline import HooklineError


def test_another_extraction_is_refused(tmp_path: Path) -> None:
    model, samples, out = Layers(), numbered(6), tmp_path / "out"
    hl.extract(model, samples, "first", out)
    other = Layers()
    with torch.no_grad():
        other.first.bias.add_(1)
    attempts: list[tuple[str, Any, Any, Any, dict[str, Any]]] = [
        ("model", other, samples, "first", {}),
        ("model", Layers(width=5), numbered(6, 5), "first", {}),
        ("data", model, numbered(7), "first", {}),
        ("data", model, list(samples), "first", {}),
        ("sites", model, samples, "second", {}),
        ("sites", model, samples, ["first", "second"], {}),
        ("sites", model, samples, "first", {"reduce": "spatial"}),
        ("dtype", model, samples, "first", {"dtype": torch.float16}),
        ("deterministic", model, samples, "first", {"deterministic": True}),
        ("prepare", model, samples, "first", {"prepare": torch.clone}),
    ]
    with pytest.raises(HooklineError, match="holds another extraction"):
        hl.extract(model, samples, "second", out, dry_run=True)
    planned = hl.extract(model, samples, "second", out, dry_run=True, overwrite=True)
    assert "6 samples to do" in str(planned)
    before = files_in(out)
    for word, one, data, sites, options in attempts:
        with pytest.raises(HooklineError, match=rf"holds another extraction \(.*{word}: ") as told:
            hl.extract(one, data, sites, out, **options)
        assert "overwrite=True" in str(told.value)
    assert files_in(out) == before
    same = torch.compile(model, backend="eager")
    assert hl.extract(same, samples, "first", out).advance.samples == 0
    result = hl.extract(other, samples, "first", out, overwrite=True)
    torch.testing.assert_close(result.open()["first"][:], other.first(samples).detach())


@pytest.mark.parametrize("which", ["prepare", "collate", "reduce"])
def test_another_function_is_another_extraction(which: str, tmp_path: Path) -> None:
    def extract(function: Any) -> hl.Extraction:
        return hl.extract(
            Layers(), numbered(6), "second", tmp_path / "out", **{which: function}, limit=3
        )

    functions = {
        "prepare": (lambda one: one + 1, lambda one: one + 2),
        "collate": (lambda some: torch.stack(some), torch.stack),
        "reduce": (lambda value, _: value, lambda value, _: value * 2),
    }[which]
    extract(functions[0])
    assert extract(functions[0]).advance.before == 3
    with pytest.raises(hl.StoreError, match="holds another extraction"):
        extract(functions[1])


def test_overwrite_leaves_other_files_alone(tmp_path: Path) -> None:
    model, samples = Layers(), numbered(6)
    (tmp_path / "notes.txt").write_text("mine")
    hl.extract(model, samples, "first", tmp_path)
    hl.extract(model, samples, "second", tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert list(hl.open_store(tmp_path).columns) == ["second:output"]


def test_overwrite_by_ranks_without_a_group_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hl.extract(Layers(), numbered(6), "first", tmp_path / "out")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="remove it before they are started"):
        hl.extract(Layers(), numbered(6), "first", tmp_path / "out", overwrite=True)
    assert len(hl.open_store(tmp_path / "out")) == 6


def test_ranks_that_torchrun_starts_again_go_on_also_with_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, samples = Layers(), numbered(6)
    hl.extract(model, samples, "first", tmp_path / "out", limit=4)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    hl.extract(model, samples, "first", tmp_path / "out", overwrite=True)
    assert set(model.seen.values()) == {1}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert hl.extract(model, samples, "first", tmp_path / "out", overwrite=True).advance.before == 0


DAMAGE = {
    "empty": "",
    "cut off": '{"version": 1, "colu',
    "no columns": '{"version": 1, "facts": {}}',
    "a list": "[]",
    "a dtype": '{"version": 1, "facts": {}, "columns": [{"name": "x", "dtype": "Q", "shape": []}]}',
}


@pytest.mark.parametrize("text", DAMAGE.values(), ids=DAMAGE)
def test_a_store_that_does_not_know_itself_is_replaced(tmp_path: Path, text: str) -> None:
    model, samples, out = Layers(), numbered(6), tmp_path / "out"
    hl.extract(model, samples, "first", out, limit=4)
    (out / "store.json").write_text(text)
    before = files_in(out)
    words = r"store.json` is damaged: .*put a copy of it back .* begins anew with overwrite=True"
    for dry in (False, True):
        with pytest.raises(hl.StoreError, match=words):
            hl.extract(model, samples, "first", out, dry_run=dry)
    with pytest.raises(hl.StoreError, match=words):
        hl.open_store(out)
    assert files_in(out) == before
    assert hl.extract(model, samples, "first", out, dry_run=True, overwrite=True).estimate
    result = hl.extract(model, samples, "second", out, overwrite=True)
    assert (result.advance.samples, list(result.open().columns)) == (6, ["second:output"])


def test_what_is_no_store_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text('{"shop": "flowers"}')
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "mine.safetensors").touch()
    with pytest.raises(hl.StoreError, match="is no store of hookline"):
        hl.extract(Layers(), numbered(6), "first", tmp_path, overwrite=True)
    assert files_in(tmp_path) == ["shards", "shards/mine.safetensors", "store.json"]


def test_a_store_that_somebody_writes_is_not_overwritten(tmp_path: Path) -> None:
    model, samples, out = Layers(), numbered(6), tmp_path / "out"
    hl.extract(model, samples, "first", out)
    before = files_in(out)
    with hl.StoreWriter(out, name="rank3") as other:
        other.claim()
        with pytest.raises(hl.StoreError, match=r"is being written by .*: stop that first"):
            hl.extract(model, samples, "second", out, overwrite=True)
    assert files_in(out) == before
    hl.extract(model, samples, "second", out, overwrite=True)


@pytest.mark.parametrize(
    "wrong",
    [{"sites": "secnod"}, {"data": "no/such/file.jsonl"}, {"on_error": "ignore"}],
    ids=["site", "data", "option"],
)
def test_what_is_there_stays_where_what_should_replace_it_cannot_be(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"data": numbered(5), "sites": "second", "out": tmp_path / "out"}
    before = hl.extract(Layers(), **given).open()["second"][:].clone()
    with pytest.raises((hl.HooklineError, ValueError, FileNotFoundError)):
        hl.extract(Layers(), **given | wrong, overwrite=True)
    assert torch.equal(hl.open_store(tmp_path / "out")["second"][:], before)
