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
from hookline.extractions.ray_engine import cut_tasks, find_task, name_shard
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
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start two nodes with a core each."""
    before = dict(os.environ)
    os.environ |= _QUIET
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
    hl.extract(model, samples, "model.first", out, engine=engine, limit=70, **options)
    assert (tmp_path / "fell").exists()
    assert ids_in(out) == list(range(70))
    # The driver stopped half-way: another one goes on.
    hl.extract(model, samples, "model.first", out, engine=engine, **options)
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
    # The first and the last of a task are done later; those between them stay.
    (tmp_path / "mended").touch()
    hl.extract(stopping, samples, "inner.first", out, **options)
    assert ids_in(out) == list(range(60))
    torch.testing.assert_close(rows_of(out, "inner.first"), Layers().first(samples).detach())


def test_what_has_no_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hl.HooklineError, match="it has to be known how many there are"):
        hl.extract(Layers(), iter(numbered(9)), "first", tmp_path / "out", engine="ray")
