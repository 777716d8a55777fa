"""Writers that are killed: one process loads torch, and forks a writer again and again.

    crashing_writers.py FOLDER

In the folder there is a store for each way to die then. What is printed says by store how many
samples were in it each time that a writer was gone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from made_samples import make_values, start

from hookline.stores import StoreWriter, direct_files, open_store, shard_writing
from hookline.stores.places import LocalPlace

EACH = 32
"""Samples of a group."""
GROUPS = 3
"""Groups of a shard."""
STEP = 5 * EACH * GROUPS
"""So many samples a writer may do before it waits for its end."""
MOMENTS = 20
"""So many writers are killed at random moments."""
ROUNDS = 3
"""So many writers die at each of the points."""
POINTS = (
    "while-written",
    "before-head",
    "after-head",
    "before-rename",
    "before-line",
    "half-line",
    "after-line",
)


def write(folder: Path, end: int) -> None:
    """Write the samples that are not there yet."""
    # Where the name says so, small stages: then small shards too grow on the disk, by a thread.
    if folder.name.startswith("direct-"):
        direct_files._STAGE, shard_writing._ROOM = 4096, 8192
    size = 1800 * GROUPS
    with StoreWriter(folder, group_bytes=1, shard_bytes=size) as writer:
        done = set(writer.find_done().tolist())
        left = [one for one in range(end) if one not in done]
        for at in range(0, len(left), EACH):
            ids = left[at : at + EACH]
            writer.add(ids, make_values(ids))


def make_deadly(point: str) -> None:
    """Have this process kill itself at a point of its work, when one shard at least is finished."""
    left = 5 if point == "while-written" else 2

    def die() -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner: Any, name: str) -> None:
        wanted = getattr(owner, name)

        def work(*given: Any) -> Any:
            die()
            return wanted(*given)

        setattr(owner, name, work)

    def after(owner: Any, name: str) -> None:
        wanted = getattr(owner, name)

        def work(*given: Any) -> Any:
            found = wanted(*given)
            die()
            return found

        setattr(owner, name, work)

    def write_half(self: LocalPlace, name: str, line: str) -> None:
        path = self.local / name
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(line[: len(line) // 2].encode())
        os.kill(os.getpid(), signal.SIGKILL)

    if point == "before-rename":
        before(LocalPlace, "take")
    elif point == "before-line":
        before(LocalPlace, "append_line")
    elif point == "half-line":
        LocalPlace.append_line = write_half  # type: ignore[method-assign]
    elif point == "after-line":
        after(LocalPlace, "append_line")
    elif point == "before-head":
        before(direct_files.DirectFile, "finish")
    elif point == "after-head":
        after(direct_files.DirectFile, "finish")
    elif point == "while-written":
        before(direct_files.DirectFile, "_write")
    else:
        raise ValueError(f"there is no point `{point}`")


def kill_at_moments(folder: Path, seed: int) -> list[int]:
    """Kill one writer after the other; let the last one go on to the end."""
    chance = random.Random(seed)
    begun = time.monotonic()
    finish(folder.with_name(f"{folder.name}-measured"), STEP)
    most = 2 * (time.monotonic() - begun)  # a machine with much to do needs longer
    counts = []
    for number in range(1, MOMENTS + 1):

        def go_on(end: int = number * STEP) -> None:
            write(folder, end)
            signal.pause()

        child = start(go_on)
        time.sleep(chance.uniform(0.0, most))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        counts.append(count(folder))
    return [*counts, finish(folder, STEP * MOMENTS)]


def kill_at_point(folder: Path, point: str) -> list[int]:
    """Have several writers die at one point; let the last one go on to the end."""

    def go_on() -> None:
        make_deadly(point)
        write(folder, STEP * ROUNDS)

    counts = []
    for _ in range(ROUNDS):
        _, status = os.waitpid(start(go_on), 0)
        assert status == signal.SIGKILL, f"the writer was not killed: {status}"
        counts.append(count(folder))
    return [*counts, finish(folder, STEP * ROUNDS)]


def finish(folder: Path, end: int) -> int:
    """Have a writer go on to the end."""
    _, status = os.waitpid(start(lambda: write(folder, end)), 0)
    assert status == 0, f"the last writer ended with {status}"
    return count(folder)


def count(folder: Path) -> int:
    """Give how many samples are there."""
    return len(open_store(folder)) if (folder / "store.json").exists() else 0


def main() -> None:
    """Have writers die in every way."""
    folder = Path(sys.argv[1])
    told = {
        name: kill_at_moments(folder / name, seed)
        for seed, name in enumerate(("plain-moments", "direct-moments"))
    }
    for point in POINTS:
        told[f"direct-{point}"] = kill_at_point(folder / f"direct-{point}", point)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
