"""Extractions that something stops: bad samples, no memory, Ctrl-C; and how they go on."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extracted_models import Layers, Reader, numbered, texts
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hookline as hl
from hookline.extractions.samples import SampleError


class Touchy(nn.Module):
    """Raise at some samples, by their first number; count what went through."""

    def __init__(self, *bad: int, error: BaseException | None = None) -> None:
        super().__init__()
        self.inner = Layers()
        self.bad = set(bad)
        self.error = ValueError("no such word") if error is None else error
        self.done: Counter[int] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        numbers = x[:, 0].int().tolist()
        if self.bad.intersection(numbers):
            raise self.error
        self.done.update(numbers)
        out: Tensor = self.inner(x)
        return out


class Cramped(nn.Module):
    """Have memory for so many samples at once."""

    def __init__(self, most: int, error: Exception | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.most = most
        self.error = torch.OutOfMemoryError("CUDA out of memory.") if error is None else error
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if len(x) > self.most:
            raise self.error
        out: Tensor = self.inner(x)
        return out


def check_store(out: Path, ids: list[int], samples: Tensor) -> None:
    """See whether exactly these samples are in the store, once, with the right values."""
    store = hl.open_store(out)
    rows = [shard.ids(group) for shard in store.shards for group in range(len(shard.groups))]
    assert np.sort(np.concatenate(rows)).tolist() == ids
    torch.testing.assert_close(store["inner.first"][:], Layers().first(samples[ids]).detach())


def test_a_sample_that_raises_stops_and_the_rest_is_done_later(tmp_path: Path) -> None:
    model, samples, out = Touchy(23), numbered(40), tmp_path / "out"
    with pytest.raises(SampleError, match="sample 23 cannot go through the model") as told:
        hl.extract(model, samples, "inner.first", out, batch_size=8)
    assert told.value.id == 23
    assert str(told.value.cause) == "no such word"
    assert isinstance(told.value.__cause__, ValueError)
    kept = hl.open_store(out).ids.tolist()
    assert set(range(16)) <= set(kept)  # all batches before it
    before = model.done.copy()
    model.bad.clear()
    result = hl.extract(model, samples, "inner.first", out, batch_size=8)
    check_store(out, list(range(40)), samples)
    assert (result.advance.before, result.advance.samples) == (len(kept), 40 - len(kept))
    assert model.done - before == Counter(set(range(40)) - set(kept))


@pytest.mark.parametrize("bad", [(0,), (23,), (39,), (5, 6, 17), tuple(range(8, 16))], ids=str)
def test_skipping_leaves_out_exactly_the_bad_ones(tmp_path: Path, bad: tuple[int, ...]) -> None:
    model, samples, out = Touchy(*bad), numbered(40), tmp_path / "out"
    result = hl.extract(model, samples, "inner.first", out, batch_size=8, on_error="skip")
    assert result.failed == dict.fromkeys(bad, "ValueError: no such word")
    assert str(result).endswith(f"{len(bad)} skipped: {out}")
    good = [one for one in range(40) if one not in bad]
    check_store(out, good, samples)
    assert hl.open_store(out).failed == result.failed
    assert set(model.done.values()) == {1}
    model.bad = {bad[-1]}
    hl.extract(model, samples, "inner.first", out, batch_size=8, on_error="skip")
    assert list(hl.open_store(out).failed) == [bad[-1]]
    model.bad.clear()
    again = hl.extract(model, samples, "inner.first", out, batch_size=8, on_error="skip")
    assert (again.advance.samples, again.failed) == (1, {})
    check_store(out, list(range(40)), samples)
    assert hl.open_store(out).failed == {}


def test_a_store_that_is_replaced_forgets_who_failed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    hl.extract(Touchy(3), numbered(9), "inner.first", out, on_error="skip")
    assert list(hl.open_store(out).failed) == [3]
    hl.extract(Touchy(), numbered(2), "inner.first", out, overwrite=True)
    assert hl.open_store(out).failed == {}


def test_what_fails_before_there_is_a_store_is_noted_once_there_is_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    none = hl.extract(Touchy(*range(5)), numbered(5), "inner.first", out, on_error="skip")
    assert len(none.failed) == 5
    assert not out.exists()
    hl.extract(Touchy(0), numbered(5), "inner.first", out, on_error="skip", batch_size=1)
    assert hl.open_store(out).failed == {0: "ValueError: no such word"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no such word")], ids=repr)
def test_a_source_that_waits_holds_nobody_up(tmp_path: Path, error: BaseException) -> None:
    is_over = threading.Event()

    def stream() -> Iterator[Tensor]:
        yield from numbered(16)
        is_over.wait(60)

    begun = time.monotonic()
    with pytest.raises((KeyboardInterrupt, SampleError)):
        hl.extract(Touchy(3, error=error), stream(), "inner.first", tmp_path / "o", batch_size=8)
    assert time.monotonic() - begun < 20
    is_over.set()


def refuse_unlucky(batch: Tensor) -> Tensor:
    """Prepare a batch; raise at two samples."""
    if {13, 14}.intersection(batch[:, 0].int().tolist()):
        raise ValueError("an unlucky one")
    return batch


def join_lucky(samples: list[Tensor]) -> Tensor:
    """Make a batch; raise at a sample."""
    return refuse_unlucky(torch.stack(samples))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_of_a_loader_are_found_and_left_out(tmp_path: Path, workers: int) -> None:
    samples, out, bad = numbered(30), tmp_path / "out", {3, 8, 9, 29}
    # Not forked: what other tests left behind in this process, threads too, is not copied.
    how: Any = "spawn" if workers else None
    loader: Any = DataLoader(
        Torn(samples, bad), batch_size=4, num_workers=workers, multiprocessing_context=how
    )
    with pytest.raises(SampleError, match="sample 3 cannot be read: OSError: the disk is gone"):
        hl.extract(Touchy(), loader, "inner.first", out)
    assert multiprocessing.active_children() == []
    result = hl.extract(Touchy(), loader, "inner.first", out, on_error="skip")
    assert result.failed == dict.fromkeys(sorted(bad), "OSError: the disk is gone")
    check_store(out, [one for one in range(30) if one not in bad], samples)
    again = hl.extract(Touchy(), loader, "inner.first", out, on_error="skip")
    assert (again.advance.samples, set(again.failed)) == (0, bad)


@pytest.mark.parametrize("how", ["prepare", "collate_fn"])
def test_samples_of_a_loader_that_cannot_be_prepared_are_left_out(tmp_path: Path, how: str) -> None:
    samples, out = numbered(30), tmp_path / "out"
    is_first = how == "prepare"
    loader: Any = DataLoader(samples, batch_size=7, collate_fn=None if is_first else join_lucky)  # type: ignore[arg-type]
    prepare = refuse_unlucky if is_first else None
    with pytest.raises(SampleError, match="sample 13 cannot be read: ValueError: an unlucky one"):
        hl.extract(Touchy(), loader, "inner.first", out, prepare=prepare)
    result = hl.extract(Touchy(), loader, "inner.first", out, prepare=prepare, on_error="skip")
    assert result.failed == dict.fromkeys([13, 14], "ValueError: an unlucky one")
    check_store(out, [one for one in range(30) if one not in (13, 14)], samples)


class Tearing(IterableDataset[Tensor]):
    """A stream that breaks off."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from numbered(10)
        raise OSError("the disk is gone")


def test_loader_of_a_stream_that_breaks_off_names_the_batch(tmp_path: Path) -> None:
    loader: Any = DataLoader(Tearing(), batch_size=4)
    with pytest.raises(OSError, match="the disk is gone") as told:
        hl.extract(Touchy(), loader, "inner.first", tmp_path / "out", on_error="skip")
    (note,) = [one for one in told.value.__notes__ if "DataLoader" in one]
    assert "that begins at sample 8. Give the data set itself" in note


class Torn(Dataset[Tensor]):
    """Samples of which some cannot be read."""

    def __init__(self, samples: Tensor, bad: set[int]) -> None:
        self.samples, self.bad = samples, bad

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Tensor:
        if number in self.bad:
            raise OSError("the disk is gone")
        return self.samples[number]


@pytest.mark.parametrize("bad", [{3}, {0, 1, 2}, {29}, set(range(5, 25))], ids=str)
def test_samples_that_cannot_be_read(tmp_path: Path, bad: set[int]) -> None:
    samples, out = numbered(30), tmp_path / "out"
    data = Torn(samples, bad)
    with pytest.raises(SampleError, match=f"sample {min(bad)} cannot be read: OSError: the disk"):
        hl.extract(Touchy(), data, "inner.first", out, batch_size=4)
    result = hl.extract(Touchy(), data, "inner.first", out, batch_size=4, on_error="skip")
    assert result.failed == dict.fromkeys(sorted(bad), "OSError: the disk is gone")
    check_store(out, [one for one in range(30) if one not in bad], samples)
    plan = hl.extract(Touchy(), data, "inner.first", tmp_path / "b", batch_size=7, dry_run=True)
    assert plan.estimate is not None
    assert plan.estimate.each == 32


def test_no_sample_at_all_can_be_read(tmp_path: Path) -> None:
    data = Torn(numbered(12), set(range(12)))
    result = hl.extract(Touchy(), data, "inner.first", tmp_path / "a", on_error="skip")
    assert len(result.failed) == 12
    with pytest.raises(hl.HooklineError, match="none of the first samples"):
        hl.extract(Touchy(), data, "inner.first", tmp_path / "b", dry_run=True)


def test_a_function_that_prepares_may_fail_at_a_sample(tmp_path: Path) -> None:
    def prepare(sample: Tensor) -> Tensor:
        if sample[0] == 5:
            raise KeyError("text")
        return sample

    samples, out = numbered(12), tmp_path / "out"
    options: dict[str, Any] = {"prepare": prepare, "batch_size": 4}
    result = hl.extract(Touchy(), samples, "inner.first", out, on_error="skip", **options)
    assert result.failed == {5: "KeyError: 'text'"}
    check_store(out, [one for one in range(12) if one != 5], samples)


def test_a_sample_that_makes_no_batch_is_skipped_alone(tmp_path: Path) -> None:
    def collate(samples: list[Tensor]) -> Tensor:
        if any(one[0] == 6 for one in samples):
            raise TypeError("a sample of None")
        return torch.stack(samples)

    samples, out = numbered(12), tmp_path / "out"
    options: dict[str, Any] = {"collate": collate, "batch_size": 4}
    with pytest.raises(SampleError, match="sample 6 cannot be read: TypeError: a sample of None"):
        hl.extract(Touchy(), samples, "inner.first", out, **options)
    result = hl.extract(Touchy(), samples, "inner.first", out, on_error="skip", **options)
    assert result.failed == {6: "TypeError: a sample of None"}
    check_store(out, [one for one in range(12) if one != 6], samples)


def test_samples_that_do_not_go_together_are_told(tmp_path: Path) -> None:
    images = [torch.ones(4, 4), torch.ones(4, 5)]
    with pytest.raises(ValueError, match="only rows of one dimension are filled up"):
        hl.extract(nn.Identity(), images, "", tmp_path / "out", on_error="skip")


@pytest.mark.parametrize("given", [None, 64], ids=str)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        hl.OutOfMemory("`inner` could not be captured"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_batches_that_do_not_fit_are_divided(
    tmp_path: Path, given: int | None, error: Exception
) -> None:
    model, samples = Cramped(5, error), numbered(200)
    told: list[int] = []
    result = hl.extract(
        model,
        samples,
        "inner",
        tmp_path / "out",
        batch_size=given,
        on_progress=lambda advance: told.append(advance.batch),
    )
    store = result.open()
    assert (store.ids.tolist(), result.failed) == (list(range(200)), {})
    torch.testing.assert_close(store["inner"][:], model.inner(samples).detach())
    assert told[-1] == 4
    assert sum(size > 5 for size in model.sizes) <= 4  # then it is remembered


def test_a_sample_that_does_not_fit_alone_is_named(tmp_path: Path) -> None:
    model = Cramped(0)
    with pytest.raises(SampleError, match="sample 0 cannot go through the model: OutOfMemoryError"):
        hl.extract(model, numbered(9), "inner", tmp_path / "out", batch_size=4)
    assert model.sizes == [4, 2, 1]


def test_a_device_that_is_lost_stops_also_where_samples_are_skipped(tmp_path: Path) -> None:
    lost = torch.AcceleratorError("CUDA error: device-side assert triggered")
    model = Touchy(2, error=lost)
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        hl.extract(model, numbered(9), "inner.first", tmp_path / "out", on_error="skip")


@pytest.mark.parametrize("kind", ["samples", "loader"])
def test_ctrl_c_keeps_what_was_done(tmp_path: Path, kind: str) -> None:
    samples, out = numbered(60), tmp_path / "out"
    data: Any = samples
    if kind == "loader":
        data = DataLoader(TensorDataset(samples), batch_size=6)
    model = Touchy(30, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        hl.extract(model, data, "inner.first", out, batch_size=6)
    check_store(out, list(range(30)), samples)
    assert not list(hl.inventory(model))
    assert model.training
    model.bad.clear()
    hl.extract(model, data, "inner.first", out, batch_size=6)
    check_store(out, list(range(60)), samples)
    assert model.done == dict.fromkeys(range(60), 1)


def test_an_error_of_the_writer_stops_it(tmp_path: Path) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.same(x[:, : 2 + int(x[0, 0] > 20)])
            return out

    samples = numbered(500)
    with pytest.raises(hl.HooklineError, match=r"holds rows of torch.float32 \[2\]"):
        hl.extract(Growing(), samples, "same", tmp_path / "out", batch_size=2)
    assert set(range(20)) <= set(hl.open_store(tmp_path / "out").ids.tolist())


def test_half_of_a_batch_fails_in_a_loader(tmp_path: Path) -> None:
    samples, out = numbered(20), tmp_path / "out"
    loader = DataLoader(TensorDataset(samples), batch_size=8)
    model = Touchy(9, 19)
    first = hl.extract(model, loader, "inner.first", out, on_error="skip", limit=12)
    assert first.failed == {9: "ValueError: no such word"}
    check_store(out, [one for one in range(12) if one != 9], samples)
    second = hl.extract(model, loader, "inner.first", out, on_error="skip")
    assert list(second.failed) == [9, 19]
    check_store(out, [one for one in range(20) if one not in (9, 19)], samples)


@pytest.mark.parametrize("reduce", [None, "last", "mean"], ids=str)
def test_deterministic_gives_the_same_bits_in_any_batch(tmp_path: Path, reduce: Any) -> None:
    model, data = Reader(), texts(40)
    found = []
    for size in (1, 3, 7, 64):
        for kind in ("list", "loader"):
            given: Any = data
            if kind == "loader":
                given = DataLoader(data, batch_size=size, collate_fn=hl_collate)  # type: ignore[arg-type]
            out = tmp_path / f"{size}-{kind}"
            sites = ["embed", "block.attention", "block", "out"]
            options: dict[str, Any] = {"reduce": reduce, "deterministic": True, "batch_size": size}
            store = hl.extract(model, given, sites, out, **options).open()
            found.append({name: store[name][:] for name in store.columns})
    for other in found[1:]:
        for name, rows in found[0].items():
            for one, same in zip(rows, other[name], strict=True):
                assert torch.equal(one, same), name
    alone = torch.tensor([data[3]["input_ids"]])
    model.eval()
    with torch.no_grad(), hl.capture(model, "block") as got:
        model(alone, torch.ones_like(alone))
    plain = got["block"].output[0]
    expected = {None: plain, "last": plain[-1], "mean": plain.mean(0)}[reduce]
    torch.testing.assert_close(found[0]["block:output"][3], expected)


def hl_collate(samples: list[Any]) -> Any:
    """Make a batch as hookline does."""
    from hookline.extractions.collating import collate

    return collate(samples)


def test_deterministic_rows_that_have_no_mask_are_not_filled_up(tmp_path: Path) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.same((x + 1).sum(1, keepdim=True))
            return out

    data = [[1.0] * one for one in (3, 1, 7, 2)]
    store = hl.extract(
        Sums(), data, "same", tmp_path / "out", deterministic=True, batch_size=4
    ).open()
    assert store["same"][:].flatten().tolist() == [6, 2, 14, 4]


def test_the_same_extraction_started_twice_is_refused(tmp_path: Path) -> None:
    samples, out = numbered(12), tmp_path / "out"
    hl.extract(Layers(), samples, "first", out, limit=8)
    before = {one: one.read_bytes() for one in out.rglob("*.safetensors")}
    with hl.StoreWriter(out, name="part") as other:
        other.claim()
        model = Layers()
        with pytest.raises(hl.StoreError, match="under the same name `part`: wait until that has"):
            hl.extract(model, samples, "first", out)
        assert not model.seen  # it is told before anything is done
    assert {one: one.read_bytes() for one in out.rglob("*.safetensors")} == before
    with pytest.raises(SampleError, match="no such word") as told:
        hl.extract(Touchy(11), samples, "inner.first", tmp_path / "b")
    # An error that somebody holds does not hold the name.
    assert len(hl.extract(Touchy(), samples, "inner.first", tmp_path / "b").open()) == 12
    assert told.value is not None


def test_a_dry_run_does_not_use_up_an_iterator(tmp_path: Path) -> None:
    samples, out = numbered(12), tmp_path / "out"
    stream = iter(samples)
    with pytest.raises(ValueError, match="dry_run=True reads the first samples, and a `tuple_iter"):
        hl.extract(Layers(), stream, "first", out, dry_run=True)
    assert len(hl.extract(Layers(), stream, "first", out).open()) == 12
    loader = DataLoader(TensorDataset(samples), batch_size=4)
    assert hl.extract(Layers(), loader, "first", tmp_path / "b", dry_run=True).estimate is not None
