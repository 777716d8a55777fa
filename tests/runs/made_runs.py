"""Steps whose every number follows from the step, the site and the rank, so that each can be told.

Also a process of its own for what must not happen in the one that tests:

    python made_runs.py kill FOLDER SEED               kill a writer at a random moment, ten times
    python made_runs.py rank FOLDER RANK WORLD STEPS   write steps, as one of several ranks
    python made_runs.py fork FOLDER                    fork while writing, and write on
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hookline._errors import SessionError
from hookline.runs import Block, RunWriter, SiteFacts, StepRecord
from hookline.runs.records import WIDTHS
from hookline.stats.rows import empty_rows

SITES = 12


def make_sites(addresses: Sequence[str] = (), *, kind: str = "value") -> list[SiteFacts]:
    """Describe sites: those given, or twelve outputs."""
    names = addresses or [f"layers.{number}.mlp:output" for number in range(SITES)]
    return [
        SiteFacts(
            id=number,
            address=name,
            kind=kind,
            module=name.partition(":")[0],
            type="Linear",
            dtype="float32",
            shape=(8, 4),
            source=f"model.py:{number}",
            more={"order": number},
        )
        for number, name in enumerate(names)
    ]


def make_rows(step: int, sites: int = SITES, *, rank: int = 0) -> np.ndarray:
    """Make rows of which every number tells the step, the site and the rank."""
    rows = empty_rows(sites)
    number = np.arange(sites)
    mean = step + number * 0.25 + rank * 1000
    rows[:, 0] = 32
    rows[:, 1] = number == step % max(1, sites)
    rows[:, 4], rows[:, 5], rows[:, 6] = mean - 1, mean + 1, mean
    rows[:, 7] = 32 * (number + 1.0) ** 2
    return rows


def make_block(kind: str, step: int, *, sites: int = SITES, rank: int = 0) -> Block:
    """Make a block of any kind."""
    if kind == "rows":
        values = make_rows(step, sites, rank=rank)
    else:
        wide = np.arange(sites * WIDTHS[kind]).reshape(sites, WIDTHS[kind])
        values = (wide + step).astype(np.float32 if kind == "sketch" else np.int64)
    return Block(kind, np.arange(sites, dtype=np.int32), values)


def make_step(
    step: int, kinds: Sequence[str] = ("rows",), *, sites: int = SITES, rank: int = 0
) -> StepRecord:
    """Make a step with one block of each kind."""
    blocks = [make_block(kind, step, sites=sites, rank=rank) for kind in kinds]
    scalars = {"loss": 1.0 / (step + 1), "lr": 0.1 + rank}
    return StepRecord(step, 1000.0 + step, 0.5, scalars, blocks)


def write_run(
    folder: Path, steps: int = 5, *, kinds: Sequence[str] = ("rows",), rank: int = 0, world: int = 1
) -> None:
    """Write a whole run."""
    with RunWriter(folder, rank=rank, world=world) as writer:
        writer.add_sites(make_sites())
        for step in range(steps):
            writer.write(make_step(step, kinds, rank=rank))


def start(*words: object) -> subprocess.Popen[str]:
    """Start this file as a process of its own."""
    command = [sys.executable, __file__, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for such a process; give what it printed."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def _write_until_killed(folder: Path, pipe: int) -> None:
    writer = RunWriter(folder)
    writer.add_sites(make_sites())
    for step in range(1_000_000):
        writer.write(make_step(step, ("rows", "sketch")))
        os.write(pipe, step.to_bytes(4, "little"))


def _kill_ten(folder: Path, seed: int) -> None:
    """Kill ten writers; print which steps each had acknowledged."""
    moments = random.Random(seed)
    for number in range(10):
        reader, pipe = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _write_until_killed(folder / str(number), pipe)
        os.close(pipe)
        time.sleep(moments.uniform(0, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as acknowledged:
            print(json.dumps(len(acknowledged.read()) // 4))


def _write_rank(folder: Path, rank: int, world: int, steps: int) -> None:
    with RunWriter(folder, rank=rank, world=world) as writer:
        writer.add_sites(make_sites())
        for step in range(steps):
            writer.write(make_step(step, ("rows", "counts"), rank=rank))
            time.sleep(0.003)


def _fork_and_write_on(folder: Path) -> None:
    """Have one child end while the run is written, and one after it; print how each ended."""
    writer = RunWriter(folder)
    writer.add_sites(make_sites())
    for step in range(50):
        writer.write(make_step(step))
    log = Path(f"{writer.path}-wal")
    before = log.stat().st_size
    early, _ = _fork_user(writer, folder / "early.txt")
    _, early_status = os.waitpid(early, 0)
    after = log.stat().st_size if log.exists() else None
    late, pipe = _fork_user(writer, folder / "late.txt", is_late=True)
    for step in range(50, 100):
        writer.write(make_step(step))
    writer.close()
    os.close(pipe)
    _, late_status = os.waitpid(late, 0)
    print(json.dumps([early_status, late_status, before, after]))


def _fork_user(writer: RunWriter, note: Path, *, is_late: bool = False) -> tuple[int, int]:
    """Fork a child that tries to write and to close, and goes the whole way out."""
    end, pipe = os.pipe()
    child = os.fork()
    if child:
        return child, pipe
    os.close(pipe)
    if is_late:
        os.read(end, 1)  # until the parent has closed the other end
    try:
        writer.write(make_step(1))
    except SessionError as error:
        note.write_text(str(error))
    writer.close()
    gc.collect()
    sys.exit(0)


if __name__ == "__main__":
    command, where, *rest = sys.argv[1:]
    actions = {"kill": _kill_ten, "rank": _write_rank, "fork": _fork_and_write_on}
    actions[command](Path(where), *map(int, rest))
