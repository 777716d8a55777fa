"""Extractions by several ranks: each its share, whoever is killed and however many come back."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extracted_models import Falling, Layers, Reader, numbered, texts
from ranks import PRELOADED
from torch.utils.data import DataLoader, IterableDataset

import hookline
import hookline as hl

SIZE = 300
_SECONDS = 60.0


@pytest.fixture(scope="module")
def processes() -> multiprocessing.context.ForkServerContext:
    """Start processes from one that has loaded torch, so that each begins at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def extract_texts(rank: int, world: int, out: Path) -> None:
    """Be one rank that reads texts."""
    become(rank, world)
    hl.extract(Reader(), texts(90), ["block", "out"], out, deterministic=True)


def extract_rows(rank: int, world: int, out: Path, at: int, mark: Path) -> None:
    """Be one rank that reads rows, and is killed at one of them unless there is a mark."""
    become(rank, world)
    model = Falling(Layers(), at, mark, pause=0.002)
    hl.extract(model, numbered(SIZE), "model.first", out, batch_size=5, deterministic=True)


def become(rank: int, world: int) -> None:
    """Be a rank, as torchrun says it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)


def run_ranks(context: Any, world: int, function: Any, *args: Any) -> list[int | None]:
    """Run a function as all ranks; give how each process ended."""
    ranks = [context.Process(target=function, args=(one, world, *args)) for one in range(world)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(_SECONDS)
    codes = [one.exitcode for one in ranks]
    for one in ranks:
        if one.is_alive():
            one.kill()
    return codes


def ids_in(out: Path) -> list[int]:
    """Give the numbers of all samples in the shards, also of those that are there twice."""
    shards = hl.open_store(out).shards
    found = [shard.ids(group) for shard in shards for group in range(len(shard.groups))]
    return [int(one) for one in np.sort(np.concatenate(found))]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_make_the_same_bits_as_one_process(
    tmp_path: Path, processes: Any, world: int
) -> None:
    sites = ["block", "out"]
    one = hl.extract(Reader(), texts(90), sites, tmp_path / "one", deterministic=True).open()
    assert run_ranks(processes, world, extract_texts, tmp_path / "many") == [0] * world
    many = hl.open_store(tmp_path / "many")
    assert ids_in(tmp_path / "many") == list(range(90))
    assert {shard.path.split("/")[-1].split("-")[0] for shard in many.shards} == {
        f"rank{rank}" for rank in range(world)
    }
    for site in sites:
        for mine, other in zip(one[site][:], many[site][:], strict=True):
            assert torch.equal(mine, other)


class Numbered(IterableDataset[torch.Tensor]):
    """A stream of rows."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(numbered(SIZE))


@pytest.mark.parametrize("data", [numbered(SIZE), Numbered()], ids=["rows", "stream"])
@pytest.mark.parametrize("batch", [7, 64, 100])
def test_a_batch_of_a_loader_goes_to_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any, batch: int
) -> None:
    seen: Counter[int] = Counter()
    shares = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        model = Layers()
        hl.extract(model, DataLoader(data, batch_size=batch), "first", tmp_path / "out")
        seen.update(model.seen)
        shares.append(sum(model.seen.values()))
    assert set(seen.values()) == {1}
    assert min(shares) >= SIZE // 3 - batch
    assert ids_in(tmp_path / "out") == list(range(SIZE))


@pytest.mark.parametrize("worlds", [(2, 2), (4, 3), (3, 1)], ids=str)
def test_a_rank_that_is_killed_costs_nothing_but_time(
    tmp_path: Path, processes: Any, worlds: tuple[int, int]
) -> None:
    out, mark = tmp_path / "out", tmp_path / "fell"
    codes = run_ranks(processes, worlds[0], extract_rows, out, 140, mark)
    assert sorted(codes, key=str) == sorted([-signal.SIGKILL] + [0] * (worlds[0] - 1), key=str)
    kept = ids_in(out)
    assert 0 < len(kept) < SIZE
    assert 140 not in kept
    assert run_ranks(processes, worlds[1], extract_rows, out, 140, mark) == [0] * worlds[1]
    assert ids_in(out) == list(range(SIZE))
    plain = hl.extract(Layers(), numbered(SIZE), "first", tmp_path / "one", deterministic=True)
    assert torch.equal(hl.open_store(out)["model.first"][:], plain.open()["first"][:])
    assert not [one for one in (out / "shards").iterdir() if one.name.endswith(".part")]


SCRIPT = """
import sys
from pathlib import Path

import hookline as hl
from extracted_models import Falling, Layers, numbered


model = Falling(Layers(), 200, Path(sys.argv[2]), pause=0.002)
hl.extract(model, numbered(300), "model.first", sys.argv[1], batch_size=5)
"""


@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again(tmp_path: Path) -> None:
    script, out, mark = tmp_path / "script.py", tmp_path / "out", tmp_path / "fell"
    script.write_text(SCRIPT)
    source = Path(hookline.__file__).parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": f"{source}{os.pathsep}{Path(__file__).parent}",
        "OMP_NUM_THREADS": "1",
        # The store of the rendezvous else listens on an address that may not be this machine's.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(script), out, mark]
    done = subprocess.run(
        [str(one) for one in command],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert mark.exists()
    assert ids_in(out) == list(range(300))
    expected = Layers().first(numbered(300)).detach()
    torch.testing.assert_close(hl.open_store(out)["model.first"][:], expected)


@pytest.mark.parametrize(("held", "world"), [("rank1", 1), ("part", 2)])
def test_ranks_that_nobody_waits_for_are_not_worked_against(
    held: str, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hl.extract(Layers(), numbered(4), "second", tmp_path / "out", limit=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with hl.StoreWriter(tmp_path / "out", name=held) as other:
        other.claim()
        with pytest.raises(hl.HooklineError, match="is being written by another writer"):
            hl.extract(Layers(), numbered(4), "second", tmp_path / "out")
    hl.extract(Layers(), numbered(4), "second", tmp_path / "out")
