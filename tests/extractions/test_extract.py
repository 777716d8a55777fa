"""`hl.extract`: what is in the store afterwards, and what is left as it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extracted_models import Layers, Reader, numbered, texts
from made_data import files_in
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl
from hookline import HooklineError
from hookline.extractions import Advance


class Never(nn.Module):
    """A module that must not run."""

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("it lies behind the last site")


def test_values_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    model, samples = Layers(), numbered(21)
    result = hl.extract(model, samples, "second", tmp_path / "out", batch_size=8)
    expected = torch.cat(
        [model.second(model.first(part).tanh()) for part in samples.split(8)]
    ).detach()
    store = result.open()
    assert store.ids.tolist() == list(range(21))
    assert torch.equal(store["second"][:], expected)
    assert (result.advance.samples, result.advance.bytes) == (21, 21 * 3 * 4)
    assert (result.failed, result.estimate, result.advance.total) == ({}, None, 21)


def test_several_sites_and_patterns_take_one_pass(tmp_path: Path) -> None:
    model, samples = Layers(), numbered(10)
    sites = ["first", "*", "head:input"]
    store = hl.extract(model, samples, sites, tmp_path / "out", batch_size=4).open()
    columns = ["first:output", "head:input.input", "head:output", "second:output"]
    assert sorted(store.columns) == columns
    assert set(model.seen.values()) == {1}
    first = model.first(samples)
    for name, value in [("first", first), ("second", model.second(first.tanh()))]:
        torch.testing.assert_close(store[name][:], value.detach())
    assert torch.equal(store["head:input.input"][:], store["second"][:].tanh())


def test_the_forward_ends_after_the_last_site(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), Never())
    samples = numbered(6)
    store = hl.extract(model, samples, ["1", "0"], tmp_path / "out").open()
    torch.testing.assert_close(store["1"][:], model[1](model[0](samples)).detach())


def test_of_a_module_that_runs_twice_the_first_time_counts(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.shared(self.shared(x)))
            return out

    model, samples = Twice(), numbered(5)
    alone = hl.extract(model, samples, "shared", tmp_path / "alone").open()
    both = hl.extract(model, samples, ["shared", "last"], tmp_path / "both").open()
    expected = model.shared(samples).detach()
    assert torch.equal(alone["shared"][:], expected)
    assert torch.equal(both["shared"][:], expected)


def test_values_are_kept_as_the_type_that_was_named(tmp_path: Path) -> None:
    model, samples = Layers(), numbered(6)
    store = hl.extract(model, samples, "first", tmp_path / "out", dtype=torch.bfloat16).open()
    assert store.columns["first:output"].dtype == torch.bfloat16
    assert torch.equal(store["first"][:], model.first(samples).detach().bfloat16())


def test_a_limit_keeps_the_first_samples_and_can_be_raised(tmp_path: Path) -> None:
    model, samples = Layers(), numbered(30)
    first = hl.extract(model, samples, "first", tmp_path / "out", limit=7)
    assert first.open().ids.tolist() == list(range(7))
    assert first.advance.total == 7
    second = hl.extract(model, samples, "first", tmp_path / "out", limit=12)
    assert second.open().ids.tolist() == list(range(12))
    assert (second.advance.samples, second.advance.before) == (5, 7)
    hl.extract(model, samples, "first", tmp_path / "out")
    assert model.seen == dict.fromkeys(range(30), 1)


def test_a_dict_of_sites_says_what_is_kept_of_each(tmp_path: Path) -> None:
    model, data = Reader(), texts(9)
    sites: dict[str, Any] = {"*": "last", "embed": "mean", "out": "tokens"}
    store = hl.extract(model, data, sites, tmp_path / "out", reduce="first").open()
    lengths = [len(one["input_ids"]) for one in data]
    assert store["out"].lengths.tolist() == lengths  # "*" has it already; what comes later counts
    for at, one in enumerate(data):
        tokens = model.embed(torch.tensor(one["input_ids"]))
        torch.testing.assert_close(store["embed"][at], tokens.mean(0).detach())
    assert store.facts["sites"] == {
        "embed:output": "mean",
        "block:output": "last",
        "out:output": "tokens",
    }


def test_texts_give_a_row_for_each_token(tmp_path: Path) -> None:
    model, data = Reader().eval(), texts(13)
    store = hl.extract(model, data, "block", tmp_path / "out", batch_size=5).open()
    for at, one in enumerate(data):
        ids = torch.tensor([one["input_ids"]])
        with torch.no_grad(), hl.capture(model, "block") as got:
            model(ids, torch.ones_like(ids))
        assert store["block"][at].shape == (len(one["input_ids"]), 32)
        torch.testing.assert_close(store["block"][at], got["block"].output[0], atol=1e-5, rtol=1e-5)


def test_a_loader_gives_its_own_batches_also_where_they_are_half_done(tmp_path: Path) -> None:
    model, samples = Layers(), numbered(20)
    loader = DataLoader(TensorDataset(samples), batch_size=6)
    first = hl.extract(model, loader, "first", tmp_path / "out", limit=8)
    assert first.open().ids.tolist() == list(range(8))
    assert model.sizes == [6, 6]
    second = hl.extract(model, loader, "first", tmp_path / "out")
    assert model.sizes == [6, 6, 6, 6, 2]
    store = second.open()
    assert (store.ids.tolist(), second.advance.samples) == (list(range(20)), 12)
    assert sum(len(shard.ids(0)) for shard in store.shards) == 20
    torch.testing.assert_close(store["first"][:], model.first(samples).detach())


def test_any_iterable_and_a_prepare_function(tmp_path: Path) -> None:
    class Numbers:
        def __iter__(self) -> Iterator[int]:
            return iter(range(7))

    model = Layers()
    result = hl.extract(
        model, Numbers(), "first", tmp_path / "out", prepare=lambda one: torch.full((4,), one / 2)
    )
    expected = model.first(torch.arange(7)[:, None].expand(7, 4) / 2).detach()
    torch.testing.assert_close(result.open()["first"][:], expected)
    assert result.advance.total is None


def test_an_iterator_that_was_begun_does_not_go_on(tmp_path: Path) -> None:
    model, samples = Layers(), numbered(9)
    hl.extract(model, iter(samples), "first", tmp_path / "out", limit=4)
    with pytest.raises(HooklineError, match="an iterator that was begun does not tell which"):
        hl.extract(model, iter(samples), "first", tmp_path / "out")


def test_everything_is_put_back(tmp_path: Path) -> None:
    model, samples = Layers(), numbered(9)
    model.train()
    model.second.eval()
    modes = [one.training for one in model.modules()]
    torch.set_num_threads(2)
    benchmark = torch.backends.cudnn.benchmark
    try:
        for data in (samples, [*samples[:4], torch.ones(5)]):
            out = tmp_path / str(len(data))
            if len(data) == 9:
                hl.extract(model, data, "first", out, deterministic=True)
            else:
                with pytest.raises(HooklineError, match="sample 4 cannot go through the model"):
                    hl.extract(model, data, "first", out, deterministic=True)
            assert [one.training for one in model.modules()] == modes
            assert torch.get_num_threads() == 2
            assert not torch.are_deterministic_algorithms_enabled()
            assert torch.backends.cudnn.benchmark == benchmark
            assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
            assert not list(hl.inventory(model))
    finally:
        torch.set_num_threads(1)


def test_the_model_evaluates_without_gradients(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9))
    modes: list[tuple[bool, bool]] = []

    def note(module: nn.Module, *_: object) -> None:
        modes.append((module.training, torch.is_grad_enabled()))

    handle = model[1].register_forward_hook(note)
    hl.extract(model, numbered(3), "1", tmp_path / "out")
    handle.remove()
    assert modes == [(False, False)]
    assert torch.is_grad_enabled()


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookline.extractions.work._TELL_EVERY", 0.0)
    told: list[tuple[int, int | None, int]] = []

    def tell(advance: Advance) -> None:
        assert advance.seconds >= 0
        told.append((advance.samples, advance.total, advance.batch))

    samples = numbered(20)
    hl.extract(Layers(), samples, "first", tmp_path / "out", batch_size=5, on_progress=tell)
    assert len(told) == 5
    assert told[-1] == (20, 20, 5)
    assert told == sorted(told)


@pytest.mark.parametrize("count", [1, 8, 9, 100])
def test_a_dry_run_tells_the_bytes_and_writes_nothing(tmp_path: Path, count: int) -> None:
    model, samples, out = Layers(), numbered(count), tmp_path / "out"
    result = hl.extract(model, samples, ["first", "second"], out, dry_run=True, dtype=torch.half)
    assert not list(tmp_path.iterdir())
    assert result.estimate is not None
    assert result.estimate.columns == {"first:output": 16, "second:output": 6}
    assert (result.estimate.samples, result.estimate.bytes) == (count, count * 22)
    done = hl.extract(model, samples, ["first", "second"], out, dtype=torch.half)
    assert done.advance.bytes == count * 22
    assert done.open().nbytes == count * 22


def test_a_dry_run_counts_what_is_left(tmp_path: Path) -> None:
    model, samples, out = Layers(), numbered(50), tmp_path / "out"
    hl.extract(model, samples, "first", out, limit=20)
    before = files_in(tmp_path)
    result = hl.extract(model, samples, "first", out, dry_run=True)
    assert result.estimate is not None
    assert (result.estimate.samples, result.estimate.before) == (30, 20)
    assert "30 samples to do, 960 B to write" in str(result)
    assert files_in(tmp_path) == before
    hl.extract(model, samples, "first", out)
    done = hl.extract(model, samples, "first", out, dry_run=True)
    assert done.estimate is not None
    assert (done.estimate.samples, done.estimate.bytes) == (0, 0)


def test_a_disk_that_is_too_small_is_told_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2000))
    model, samples = Layers(), numbered(100)
    with pytest.raises(HooklineError, match=r"need about .* KiB more; 1.95 KiB are free"):
        hl.extract(model, samples, "first", tmp_path / "out", batch_size=4)
    assert len(model.seen) <= 32  # all of them are 3,200 bytes
    monkeypatch.undo()
    hl.extract(model, samples, "first", tmp_path / "out", batch_size=4)
    assert len(hl.open_store(tmp_path / "out")) == 100


def test_a_disk_holds_the_parts_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2000))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(HooklineError, match="100 samples need"):
        hl.extract(Layers(), numbered(100), "first", tmp_path / "out", batch_size=4)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_gives_the_same(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    samples = numbered(20)
    compiled = torch.compile(model, backend="eager")
    store = hl.extract(compiled, samples, ["0", "1"], tmp_path / "out", batch_size=8).open()
    torch.testing.assert_close(store["1"][:], model[1](model[0](samples)).detach())
    assert sorted(store.columns) == ["0:output", "1:output"]


def resident_bytes() -> int:
    """Give how much memory this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Same(nn.Module):
    """Gives what it gets, and notes how much that is."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        out: Tensor = self.same(x)
        return out


def make_large(count: int, seen: list[int]) -> Iterator[Tensor]:
    """Make samples of a MiB, and note the memory that is used after each."""
    for number in range(count):
        yield torch.full((1 << 18,), float(number))
        seen.append(resident_bytes())


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")
    seen: list[int] = []
    # Batches of one size: what waits for the model and for the disk is bounded by their number.
    options: Any = {"shard_bytes": 64 << 20, "batch_size": 4}
    result = hl.extract(Same(), make_large(600, seen), "same", tmp_path / "out", **options)
    assert result.advance.bytes == 600 << 20
    store = result.open()
    assert [int(store["same"][at][7]) for at in (0, 300, 599)] == [0, 300, 599]
    shutil.rmtree(tmp_path / "out")
    assert max(seen[300:]) - max(seen[:300]) < 100 << 20


def test_batches_of_large_samples_stay_small(tmp_path: Path) -> None:
    model = Same()
    hl.extract(model, make_large(200, []), "same", tmp_path / "out")
    assert max(model.sizes) <= 64  # a few of these wait for the model, and for the disk


def test_a_size_of_batches_is_found(tmp_path: Path) -> None:
    model, samples = Layers(), numbered(5000)
    result = hl.extract(model, samples, "first", tmp_path / "out")
    assert max(model.sizes) > 8
    assert result.open().ids.tolist() == list(range(5000))
    with pytest.raises(ValueError, match="a batch of 0 samples is none"):
        hl.extract(model, samples, "first", tmp_path / "other", batch_size=0)


def test_what_is_asked_for_wrongly_is_told(tmp_path: Path) -> None:
    model, samples, out = Layers(), numbered(6), tmp_path / "out"
    with pytest.raises(HooklineError, match="Nearest: `first`"):
        hl.extract(model, samples, "frist", out)
    with pytest.raises(ValueError, match="name at least one site"):
        hl.extract(model, samples, [], out)
    with pytest.raises(ValueError, match="'middle' is no way to reduce a value"):
        hl.extract(model, samples, "first", out, reduce="middle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="True is no way to reduce"):
        hl.extract(model, samples, "first", out, reduce=True)
    with pytest.raises(ValueError, match='on_error is "stop" or "skip"'):
        hl.extract(model, samples, "first", out, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='engine is "local", "ray"'):
        hl.extract(model, samples, "first", out, engine="spark")  # type: ignore[arg-type]
    assert not out.exists()


def test_samples_come_in_the_order_of_the_data_whatever_the_type(tmp_path: Path) -> None:
    rows = numbered(11).numpy()
    np.save(tmp_path / "rows.npy", rows)
    model = Layers()
    store = hl.extract(model, str(tmp_path / "rows.npy"), "first", tmp_path / "out").open()
    torch.testing.assert_close(store["first"][:], model.first(torch.from_numpy(rows)).detach())
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "rows.npy").rename(moved / "rows.npy")
    again = hl.extract(model, str(moved / "rows.npy"), "first", tmp_path / "out")
    assert (again.advance.samples, again.advance.before) == (0, 11)
