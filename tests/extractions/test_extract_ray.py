"""Extractions by a pool of actors of Ray, on a cluster of two nodes; actors and nodes get lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extracted_models import Falling, Layers, Reader, Stopping, numbered, texts

import hookline as hl
from hookline.extractions import Advance
from hookline.extractions.ray_actors import Plan, name_shard
from hookline.extractions.ray_engine import cut_tasks, find_sizes, find_task
from hookline.extractions.ray_rows import Part, cut_blocks, read_parts
from hookline.extractions.samples import SampleError
from hookline.extractions.wanted import Wanted

pytest.importorskip("ray")

pytestmark = [
    # What Ray's own modules say when they are loaded and run.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

_STORE = 100 * 2**20
_HASTE = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200}
"""A node that is gone is missed soon."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_TQDM_PATCH_PRINT": "0",  # else it has a `print` of its own from then on
}
_FEW = {"RAY_DATA_PARQUET_FOOTER_NUM_ACTORS": "1"}
"""Ray starts 32 processes to look at the first Parquet file."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start two nodes with a core each."""
    before = dict(os.environ)
    os.environ |= _QUIET | _FEW
    import ray
    from ray.cluster_utils import Cluster

    found: Any = Cluster()
    try:
        for config in ({"_system_config": _HASTE}, {}):
            found.add_node(num_cpus=1, object_store_memory=_STORE, **config)
        ray.init(address=found.address, log_to_driver=False, logging_level=logging.ERROR)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()
        os.environ.clear()
        os.environ |= before


def ids_in(out: Path) -> list[int]:
    """Give the numbers of all samples in the shards, also of those that are there twice."""
    shards = hl.open_store(out).shards
    found = [shard.ids(group) for shard in shards for group in range(len(shard.groups))]
    return [int(one) for one in np.sort(np.concatenate(found))]


def rows_of(out: Path, site: str) -> Any:
    """Give all rows of a site."""
    return hl.open_store(out)[site][:]


def test_tasks_are_cut_from_what_is_left() -> None:
    wanted = Wanted.of_ranges([(0, 10)]).without(np.array([3, 4]))
    tasks = list(cut_tasks(wanted, 9, 3))
    assert tasks == [
        {"begins": [0], "ends": [3]},
        {"begins": [5], "ends": [8]},
        {"begins": [8], "ends": [9]},
    ]
    assert next(cut_tasks(wanted, 9, 4)) == {"begins": [0, 5], "ends": [3, 6]}


def test_tasks_are_many_whole_batches_and_enough_for_all_actors() -> None:
    assert find_task(100, actors=4, batch=32) == 4
    assert find_task(1920, actors=1, batch=32) == 256
    assert find_task(1_000_000, actors=8, batch=64) == 1024
    assert find_task(100_000_000, actors=8, batch=96) == 48_864
    assert find_task(1, actors=1, batch=8) == 1


def test_a_shard_is_named_after_all_its_samples() -> None:
    assert name_shard([(0, 5), (7, 9)]) == name_shard([(0, 5), (7, 9)])
    names = {name_shard(runs) for runs in ([(0, 9)], [(0, 5), (7, 9)], [(0, 1), (8, 9)])}
    assert len(names) == 3


def test_a_second_driver_is_refused(tmp_path: Path) -> None:
    with hl.StoreWriter(tmp_path / "out", name="ray") as other:
        other.claim()
        with pytest.raises(hl.StoreError, match="under the same name `ray`"):
            hl.extract(Layers(), numbered(6), "first", tmp_path / "out", engine="ray")


@pytest.mark.slow
def test_two_nodes_make_the_same_bits_as_one_process(tmp_path: Path, cluster: Any) -> None:
    sites = ["block", "out"]
    options: dict[str, Any] = {"deterministic": True}
    hl.extract(Reader(), texts(90), sites, tmp_path / "one", **options)
    told: list[tuple[int, int | None]] = []

    def tell(advance: Advance) -> None:
        told.append((advance.samples, advance.total))

    engine = hl.RayCluster(actors=2, task=8)
    result = hl.extract(
        Reader, texts(90), sites, tmp_path / "ray", engine=engine, on_progress=tell, **options
    )
    assert result.advance.samples == 90
    assert told[-1] == (90, 90)
    assert len(told) == 12
    assert ids_in(tmp_path / "ray") == list(range(90))
    for site in sites:
        both = zip(rows_of(tmp_path / "one", site), rows_of(tmp_path / "ray", site), strict=True)
        assert all(torch.equal(mine, other) for mine, other in both)
    again = hl.extract(Reader(), texts(90), sites, tmp_path / "ray", engine=engine, **options)
    assert (again.advance.samples, again.advance.before) == (0, 90)


@pytest.mark.slow
def test_an_actor_that_is_killed_costs_nothing_but_time(tmp_path: Path, cluster: Any) -> None:
    samples = numbered(120)
    model = Falling(Layers(), 50, tmp_path / "fell")
    engine = hl.RayCluster(actors=1, task=20)
    options: dict[str, Any] = {"deterministic": True, "batch_size": 4}
    out = tmp_path / "out"
    hl.extract(model, samples, "model.first", out, engine=engine, **options)
    assert (tmp_path / "fell").exists()
    assert ids_in(out) == list(range(120))
    hl.extract(Layers(), samples, "first", tmp_path / "one", **options)
    assert torch.equal(rows_of(out, "model.first"), rows_of(tmp_path / "one", "first"))
    assert not list((out / "shards").glob(".*"))


@pytest.mark.slow
def test_a_node_that_is_lost_is_replaced(tmp_path: Path, cluster: Any) -> None:
    samples, out = numbered(200), tmp_path / "out"
    nodes = cluster.list_all_nodes()
    assert len(nodes) == 2

    def tell(advance: Advance) -> None:
        if len(lost) < 1 and advance.samples >= 20:
            lost.append(advance.samples)
            cluster.remove_node(nodes[1], allow_graceful=False)
            cluster.add_node(num_cpus=1, object_store_memory=_STORE)

    lost: list[int] = []
    model = Falling(Layers(), -1, tmp_path / "never", pause=0.05)
    hl.extract(
        model,
        samples,
        "model.first",
        out,
        engine=hl.RayCluster(actors=2, task=10),
        batch_size=2,
        on_progress=tell,
    )
    assert lost
    assert lost[0] < 200
    assert ids_in(out) == list(range(200))
    torch.testing.assert_close(rows_of(out, "model.first"), Layers().first(samples).detach())


@pytest.mark.slow
def test_samples_that_fail_are_told_and_done_later(tmp_path: Path, cluster: Any) -> None:
    samples, out = numbered(60), tmp_path / "out"
    engine = hl.RayCluster(actors=1, task=20)
    bad = [20, 39, 45]
    stopping = Stopping(bad, tmp_path / "mended")
    options: dict[str, Any] = {"engine": engine, "batch_size": 8}
    with pytest.raises(SampleError, match=r"sample (20|45) cannot go through the model") as told:
        hl.extract(stopping, samples, "inner.first", out, **options)
    assert isinstance(told.value.cause, ValueError)
    result = hl.extract(stopping, samples, "inner.first", out, on_error="skip", **options)
    assert result.failed == dict.fromkeys(bad, "ValueError: no such word")
    good = [one for one in range(60) if one not in bad]
    assert ids_in(out) == good
    assert hl.open_store(out).failed == result.failed
    assert [one.name for one in (out / "failed").iterdir()] == ["ray.jsonl"]
    # The first and the last of a task are done later; those between them stay.
    (tmp_path / "mended").touch()
    hl.extract(stopping, samples, "inner.first", out, **options)
    assert ids_in(out) == list(range(60))
    torch.testing.assert_close(rows_of(out, "inner.first"), Layers().first(samples).detach())


def test_lines_of_a_file_can_be_dealt_out(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("[1.0, 2.0, 3.0, 4.0]\n" * 2500)
    plan = Plan(Layers, tmp_path / "rows.jsonl", "first", None, None, "out", {}, "stop")
    work, _ = plan.start()
    tasks = list(cut_tasks(Wanted.everything(), work.size, 1000))
    assert tasks == [{"begins": [at], "ends": [min(at + 1000, 2500)]} for at in (0, 1000, 2000)]


def test_what_has_no_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hl.HooklineError, match="it has to be known how many there are"):
        hl.extract(Layers(), iter(numbered(9)), "first", tmp_path / "out", engine="ray")


def test_blocks_are_numbered_and_cut_into_tasks() -> None:
    blocks = [("a", 0, 5), ("b", 2, 3), ("c", 0, 4), ("d", 0, 9)]
    wanted = Wanted.of_ranges([(0, 9)]).without(np.array([1, 4]))
    tasks = list(cut_blocks(blocks, wanted, lambda seen: 4 if seen else 2))
    assert tasks == [
        ([Part([0, 2], [1, 3], 0)], ["a"]),
        ([Part([3], [4], 0), Part([2], [3], 3), Part([0], [2], 6)], ["a", "b", "c"]),
        ([Part([2], [3], 6)], ["c"]),
    ]


def test_tasks_grow_where_it_is_not_known_how_many_samples_there_are() -> None:
    plan = Plan(Layers, None, "first", None, None, "out", {"batch_size": 32}, "stop")
    cluster = hl.RayCluster(actors=(1, 4))
    find = find_sizes(plan, cluster, None)
    assert [find(seen) for seen in (0, 2048, 10**5, 10**7)] == [32, 64, 1024, 4896]
    assert find_sizes(plan, hl.RayCluster(task=7), None)(10**7) == 7


@pytest.mark.slow
def test_files_that_ray_reads_make_the_same_bits(tmp_path: Path, cluster: Any) -> None:
    from ray import data

    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    samples, sites = texts(90), ["block", "out"]
    for first in range(0, 90, 30):
        table = pyarrow.Table.from_pylist(samples[first : first + 30])
        parquet.write_table(table, tmp_path / f"{first:02d}.parquet", row_group_size=11)
    hl.extract(Reader(), samples, sites, tmp_path / "one", deterministic=True)
    rows, out = data.read_parquet(str(tmp_path)), tmp_path / "ray"
    options: dict[str, Any] = {"engine": hl.RayCluster(task=8), "deterministic": True}
    result = hl.extract(Reader, rows, sites, out, limit=50, **options)
    assert result.advance.samples == 50
    # The driver stopped half-way: another one goes on.
    result = hl.extract(Reader, rows, sites, out, **options)
    assert (result.advance.samples, result.advance.before) == (40, 50)
    assert ids_in(out) == list(range(90))
    assert len(hl.open_store(out).shards) == 12
    for site in sites:
        both = zip(rows_of(tmp_path / "one", site), rows_of(out, site), strict=True)
        assert all(torch.equal(mine, other) for mine, other in both)
    assert not rows.context.execution_options.preserve_order
    with pytest.raises(hl.StoreError, match="another extraction"):
        hl.extract(Reader, data.from_items(samples), sites, out, **options)


@pytest.mark.slow
def test_rows_with_numbers_survive_an_actor_that_is_killed(tmp_path: Path, cluster: Any) -> None:
    from ray import data

    samples, out = numbered(120), tmp_path / "out"
    numbers = [5 * one for one in reversed(range(120))]
    items = zip(numbers, samples.numpy(), strict=True)
    rows = data.from_items([{"number": number, "x": x} for number, x in items])
    options: dict[str, Any] = {"column": "x", "ids": "number", "batch_size": 4}
    options |= {"deterministic": True, "engine": hl.RayCluster(task=20)}
    model = Falling(Layers(), 50, tmp_path / "fell")
    result = hl.extract(model, rows, "model.first", out, **options)
    assert (tmp_path / "fell").exists()
    assert result.advance.samples == 120
    assert ids_in(out) == sorted(numbers)
    hl.extract(Layers(), samples, "first", tmp_path / "one", deterministic=True)
    found = hl.open_store(out)["model.first"].of(numbers)
    assert torch.equal(found, rows_of(tmp_path / "one", "first"))
    assert not list((out / "shards").glob(".*"))
    # What was written is read by Ray again.
    features = hl.open_store(out)["model.first"]
    read = data.range(120).map_batches(lambda batch: batch | {"x": features[batch["id"]].numpy()})
    batch = read.take_batch(120)
    assert torch.equal(torch.from_numpy(batch["x"][np.argsort(batch["id"])]), found.flip(0))
    table = data.from_arrow(hl.open_store(out).to_arrow()).take(2)
    assert np.array_equal(table[1]["model.first:output"], found[-2].numpy())


@pytest.mark.slow
def test_rows_that_fail_and_numbers_that_repeat_are_told(tmp_path: Path, cluster: Any) -> None:
    from ray import data

    samples, out = numbered(40), tmp_path / "out"
    rows = data.from_items([{"x": one, "n": at % 20} for at, one in enumerate(samples.numpy())])
    options: dict[str, Any] = {"column": "x", "engine": hl.RayCluster(task=20)}
    plan = hl.extract(Layers, rows, "first", out, dry_run=True, limit=30, **options)
    assert plan.estimate is not None
    assert (plan.estimate.samples, plan.estimate.bytes) == (30, 30 * 8 * 4)
    stopping = Stopping([5, 23], tmp_path / "mended")
    result = hl.extract(stopping, rows, "inner.first", out, on_error="skip", **options)
    assert result.failed == dict.fromkeys([5, 23], "ValueError: no such word")
    assert ids_in(out) == [one for one in range(40) if one not in (5, 23)]
    with pytest.raises(ValueError, match="ids='number' is not among the columns: x, n"):
        hl.extract(Layers, rows, "first", out, ids="number", **options)
    with pytest.raises(hl.StoreError, match="20 samples have a number that another has too"):
        hl.extract(Layers, rows, "first", tmp_path / "same", ids="n", **options)


def test_numbers_are_read_from_blocks_or_are_places() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    block = pyarrow.table({"n": [7, 3, 9, 9], "at": [0.0, 1.0, None, 2.0]})
    parts = [Part([0, 2], [1, 3], 10)]
    ids, rows = read_parts(parts, [block], None)
    assert ids.tolist() == [10, 12]
    assert [row["n"] for row in rows] == [7, 9]
    assert read_parts(parts, [block], "n")[0].tolist() == [7, 9]
    with pytest.raises(ValueError, match="the column `n` holds a number twice"):
        read_parts([Part([0], [4], 10)], [block], "n")
    with pytest.raises(ValueError, match="the column `at` holds float64"):
        read_parts(parts, [block], "at")


def test_numbers_of_their_own_are_for_ray_datasets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ids='n' names the numbers of the rows of a Ray Dataset"):
        hl.extract(Layers(), numbered(9), "first", tmp_path / "out", ids="n")
