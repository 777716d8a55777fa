"""Run folders as traces: recordings, watches, ranks, and what is broken."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_gpt import make_gpt, make_ids, square
from made_traces import MemoryTrace, TraceMaker, follow
from torch import Tensor

from hookline._errors import NoSuchRun, NotComparable
from hookline.diffs.comparing import compare
from hookline.diffs.ranking import compare_runs
from hookline.diffs.reading import open_trace
from hookline.runs import Block, RunWriter, SiteFacts, StepRecord, open_run
from hookline.stats.reference import measure, sketch


def write(
    folder: Path,
    trace: MemoryTrace,
    *,
    tensors: bool = False,
    rank: int = 0,
    world: int = 1,
    floors: dict[str, float] | None = None,
) -> Path:
    """Write a trace as a recording is written."""
    with RunWriter(folder, rank=rank, world=world) as writer:
        writer.add_sites([_write_site(site) for site in trace.sites])
        modules = {
            path: {"type": one.type, "is_torch": one.is_torch, "config": dict(one.config)}
            for path, one in trace.facts.modules.items()
        }
        writer.describe("modules", {"modules": modules, "ties": [["a.weight", "b.weight"]]})
        if floors is not None:
            writer.describe("floors", floors)
        for step in trace.steps:
            found = trace.measurements(step)
            own = [site.id for site in trace.sites if site.same_as is None]
            sites = np.array([one for one in own if found.is_there[one]], np.int32)
            blocks = [
                Block("rows", sites, found.rows[sites]),
                Block("sketch", sites, found.sketches[sites]),
            ]
            writer.write(StepRecord(step, float(step), blocks=blocks))
            if tensors:
                kept = {str(one): trace.tensor(int(one), step) for one in sites}
                writer.dump("values", kept, {"step": step})
    return folder


def _write_site(site: Any) -> SiteFacts:
    more: dict[str, Any] = {"port": site.port, "visit": site.visit, "leaf": list(site.leaf)}
    for name in ("caller", "requires_grad", "same_as", "of"):
        if getattr(site, name) is not None:
            more[name] = getattr(site, name)
    if site.is_part:
        more["is_part"] = True
    more |= site.more
    mark = f"#{site.visit}" if site.visit else "#part" if site.is_part else ""
    return SiteFacts(
        site.id,
        site.address + mark,
        site.kind,
        site.module,
        site.type,
        site.dtype,
        site.shape,
        site.source,
        {**more, "mark": mark} if mark else more,
    )


@pytest.fixture
def gpt_trace() -> MemoryTrace:
    return follow(make_gpt(), make_ids(), loss=square, lr=0.1)


@pytest.mark.parametrize("tensors", [False, True])
def test_recording_reads_back_as_it_was(
    gpt_trace: MemoryTrace, tmp_path: Path, tensors: bool
) -> None:
    read = open_trace(write(tmp_path / "run", gpt_trace, tensors=tensors))
    assert read.steps == [0]
    assert list(read.sites) == gpt_trace.sites
    ours, theirs = gpt_trace.measurements(0), read.measurements(0)
    np.testing.assert_allclose(theirs.rows, ours.rows, rtol=1e-6)
    np.testing.assert_array_equal(theirs.sketches, ours.sketches)
    assert read.facts.title == "run"
    assert read.facts.ties == (("a.weight", "b.weight"),)
    assert read.facts.modules["blocks.1.mlp.act"].config == {"approximate": "'none'"}
    site = next(one for one in read.sites if one.address == "blocks.1.mlp.up:input")
    assert site.same_as is not None
    kept = read.tensor(site.id, 0)
    if tensors:
        assert torch.equal(kept, gpt_trace.tensor(site.id, 0))
    else:
        assert kept is None
    assert read.has_tensors(0) is tensors
    assert read.floors() is None


def test_floors_are_read(gpt_trace: MemoryTrace, tmp_path: Path) -> None:
    read = open_trace(write(tmp_path / "run", gpt_trace, floors={"1": 1e-7, "3": 2e-6}))
    floors = read.floors()
    assert floors[[1, 3]].tolist() == [1e-7, 2e-6]
    assert np.isnan(floors[[0, 2]]).all()


def test_recordings_find_what_their_traces_do(tmp_path: Path) -> None:
    traces = []
    for approximate in ("none", "tanh"):
        model = make_gpt()
        model.blocks[1].mlp.act.approximate = approximate
        traces.append(follow(model, make_ids(), loss=square))
    paths = [write(tmp_path / f"{number}", trace) for number, trace in enumerate(traces)]
    found = compare_runs(*paths)
    assert (found.first, found.causes) == (
        "blocks.1.mlp.act",
        ("approximate='none' here, 'tanh' there",),
    )
    assert found.titles == ("0", "1")
    assert found.find("blocks.1.mlp.act").measured == "sketch"
    assert found.profile("blocks.1.mlp.act") is None


def test_recordings_with_tensors_are_compared_exactly(tmp_path: Path) -> None:
    traces = []
    for approximate in ("none", "tanh"):
        model = make_gpt()
        model.blocks[1].mlp.act.approximate = approximate
        traces.append(follow(model, make_ids()))
    paths = [
        write(tmp_path / f"{number}", trace, tensors=True) for number, trace in enumerate(traces)
    ]
    found = compare_runs(*paths)
    exact = compare(*traces)
    assert found.introduced == exact.introduced
    assert found.find("blocks.1.mlp.act").measured == "tensor"
    detail = found.profile("blocks.1.mlp.act")
    assert detail.r == found.introduced
    assert [len(detail.profile[dim]) for dim in range(3)] == [2, 6, 64]


def test_second_visits_are_told_apart(tmp_path: Path) -> None:
    maker = TraceMaker()
    for visit in range(3):
        maker.value("fc", "output", torch.randn(4), visit=visit, caller="")
    read = open_trace(write(tmp_path / "run", maker.build()))
    assert [(site.address, site.visit) for site in read.sites] == [
        ("fc:output", 0),
        ("fc:output", 1),
        ("fc:output", 2),
    ]


def make_watch(folder: Path, *, sketches: bool = True, scale: float = 1.0) -> Path:
    """Write a run as a watch does: outputs, their gradients, parameters' gradients."""
    torch.manual_seed(0)
    names = [
        ("net.fc1:output", "value"),
        ("net.fc2:output[0]", "value"),
        ("net.fc2:output[0].grad", "gradient"),
        ("net.fc1.weight:grad", "parameter gradient"),
        ("net.fc1.weight:exp_avg", "moment"),
        ("net.fc1.weight:update", "update"),
    ]
    with RunWriter(folder) as writer:
        writer.add_sites(
            SiteFacts(number, name, kind, name.rpartition(".weight")[0] or name.partition(":")[0])
            for number, (name, kind) in enumerate(names)
        )
        for step in range(3):
            values = [torch.randn(50) for _ in names]
            if step == 2:
                values[1] = values[1] * scale
            sites = np.arange(len(names), dtype=np.int32)
            blocks = [Block("rows", sites, np.stack([measure(one).numpy() for one in values]))]
            if sketches and step != 1:
                found = np.stack([sketch(one).numpy() for one in values]).astype(np.float32)
                blocks.append(Block("sketch", sites, found))
            writer.write(StepRecord(step, 0.0, blocks=blocks))
    return folder


def test_watch_is_read_where_it_has_sketches(tmp_path: Path) -> None:
    read = open_trace(make_watch(tmp_path / "a"))
    assert read.steps == [0, 2]
    assert [(site.kind, site.module, site.port, site.leaf, site.of) for site in read.sites] == [
        ("value", "net.fc1", "output", (), None),
        ("value", "net.fc2", "output", (0,), None),
        ("gradient", "net.fc2", "output", (0,), 1),
        ("parameter gradient", "net.fc1", "parameter", ("weight",), None),
        ("update", "net.fc1", "parameter", ("weight",), None),
    ]
    found = compare_runs(tmp_path / "a", make_watch(tmp_path / "b", scale=1.1))
    assert (found.step, found.first) == (2, "net.fc2")
    assert any("outputs of modules and not their inputs" in note for note in found.notes)


def test_watch_without_sketches_says_how_to_record(tmp_path: Path) -> None:
    make_watch(tmp_path / "a", sketches=False)
    with pytest.raises(NotComparable, match=r"holds statistics alone.*hl\.record"):
        open_trace(tmp_path / "a")


def test_path_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRun, match="is not there"):
        open_trace(tmp_path / "nothing")


def test_run_without_steps(tmp_path: Path) -> None:
    RunWriter(tmp_path / "a").close()
    with pytest.raises(NotComparable, match=r"has no steps.*hl\.record"):
        open_trace(tmp_path / "a")


def test_truncated_database(gpt_trace: MemoryTrace, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", gpt_trace)
    file = folder / "rank-00000.sqlite"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(NotComparable, match="cannot be read"):
        open_trace(folder)
    file.write_bytes(b"")
    with pytest.raises(NotComparable, match="is empty"):
        open_trace(folder)


@pytest.mark.parametrize("is_gone", [False, True])
def test_broken_tensors_are_refused(gpt_trace: MemoryTrace, tmp_path: Path, is_gone: bool) -> None:
    """What the run lists must be there: a comparison of less would look as good as a whole one."""
    folder = write(tmp_path / "a", gpt_trace, tensors=True)
    (file,) = (folder / "tensors").iterdir()
    if is_gone:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(NotComparable, match=f"{file.name}` is listed in the run and cannot be"):
        compare(open_trace(folder), gpt_trace)


def test_unknown_rank(gpt_trace: MemoryTrace, tmp_path: Path) -> None:
    write(tmp_path / "a", gpt_trace)
    with pytest.raises(NotComparable, match="has no rank 3; there are 0"):
        open_trace(tmp_path / "a", rank=3)


def make_rank(x: Tensor, weight: Tensor, **more: Any) -> MemoryTrace:
    maker = TraceMaker()
    maker.value("fc", "input", x, caller="")
    maker.value("fc", "output", 2 * x, caller="")
    parameter = maker.parameter("fc", "weight", weight, **more)
    maker.parameter_gradient(parameter, 3 * weight, **more)
    return maker.build()


def test_equal_ranks_are_compared_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    for name, wrong in (("a", 1.0), ("b", 1.1)):
        for rank in range(2):
            part = x[2 * rank : 2 * rank + 2] * (wrong if rank else 1)
            write(tmp_path / name, make_rank(part, weight), rank=rank, world=2)
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert not found.same
    assert found.notes[0] == "rank 1 differs first, and no other does"
    same = compare_runs(tmp_path / "a", tmp_path / "a")
    assert same.same
    assert same.notes[0] == "2 ranks were compared, each with its counterpart"


@pytest.mark.parametrize("tensors", [True, False])
def test_one_rank_against_two(tmp_path: Path, tensors: bool) -> None:
    """The batch is split over the ranks; the weights are the same on both."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    write(tmp_path / "one", make_rank(x, weight), tensors=tensors)
    for rank in range(2):
        part = make_rank(x[2 * rank : 2 * rank + 2], weight)
        write(tmp_path / "two", part, rank=rank, world=2, tensors=tensors)
    found = compare_runs(tmp_path / "one", tmp_path / "two")
    assert found.same
    compared = {pair.site for pair in found.pairs if pair.r is not None}
    weights = {"fc.weight", "fc.weight:grad"}
    assert compared == (weights | {"fc:input", "fc:output"} if tensors else weights)
    assert any("were left out" in note for note in found.notes) is not tensors


def test_shards_add_up(tmp_path: Path) -> None:
    """A shard's sketch is made at the places that it has in the whole."""
    torch.manual_seed(0)
    weight = torch.randn(8, 16)
    whole = TraceMaker()
    whole.parameter("fc", "weight", weight)
    write(tmp_path / "one", whole.build())
    for name, factor in (("two", 1.0), ("bad", 1.5)):
        for rank in range(2):
            part = weight[4 * rank : 4 * rank + 4] * (factor if rank else 1)
            maker = TraceMaker()
            maker.parameter("fc", "weight", part, more={"shard": [[4 * rank, 0]]})
            maker.sites[0] = dataclasses.replace(maker.sites[0], shape=(8, 16))
            trace = maker.build(keeps_tensors=False)
            rows = measure(part).numpy()[None]
            places = sketch(part, positions=torch.arange(64 * rank, 64 * rank + 64))
            found = trace.measurements(0)
            found.rows[:], found.sketches[:] = rows, places.numpy()
            write(tmp_path / name, trace, rank=rank, world=2)
    assert compare_runs(tmp_path / "one", tmp_path / "two").same
    found = compare_runs(tmp_path / "one", tmp_path / "bad")
    assert (found.first, found.direction) == ("fc", "state")
    assert found.introduced == pytest.approx(0.5 / math.sqrt(2), rel=0.3)
    assert open_run(tmp_path / "bad").ranks == (0, 1)
