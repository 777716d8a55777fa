"""What a training step costs while it is recorded, and how many bytes a recorded step takes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from monitors import Attach, Attached, Monitor
from tables import Table
from torch import nn
from trainings import CONTROL, PLAIN, SMALL, Training, compare

import hookline as hl

MOST_BYTES = 100_000 / 250
"""What a site of a step may take on disk."""

_STEPS = (5, 15)
"""Bytes are told from two recordings of so many steps: what is written once drops out."""


def record(**options: object) -> Attach:
    """Attach `hl.record` with these options."""

    @contextlib.contextmanager
    def attach(model: nn.Module) -> Iterator[Attached]:
        with (
            tempfile.TemporaryDirectory() as folder,
            hl.record(model, Path(folder) / "run", **options) as recording,
        ):
            yield Attached(settle=recording.flush)

    return attach


RECORDED = [
    Monitor("hl.record, values and gradients", record(parameters=False), target=1.20),
    Monitor("hl.record, and parameters, updates", record()),
]


def measure_record(rounds: int) -> Table:
    """Train a small GPT with every value at a module's border recorded at every step."""
    header = ["monitor", "CPU ms a step", "x plain median", "95% interval", "min", "in threads"]
    table = Table(
        "record: a training step, statistics and a sketch of every value at a module's border",
        [*header, "wall median", "losses", "target"],
    )
    table.rows = compare([PLAIN, CONTROL, *RECORDED], rounds)
    table.notes = [
        f"The training is that of *watch*: {Training(SMALL).describe()}.",
        f"On disk {describe_bytes(parameters=False)} for values and gradients, "
        f"{describe_bytes()} with parameters, their gradients and updates.",
    ]
    return table


def describe_bytes(**options: object) -> str:
    """Say how many bytes a further step takes."""
    sizes = {}
    for steps in _STEPS:
        training = Training(SMALL)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            with hl.record(training.model, path, **options):
                for _ in range(steps):
                    training.step()
            run = hl.open_run(path)
            sites = len(run.table(step=0))
            sizes[steps] = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    few, many = _STEPS
    each = (sizes[many] - sizes[few]) / (many - few)
    word = "met" if each / sites <= MOST_BYTES else "MISSED"
    return f"{each / 1000:.0f} kB a step of {sites} sites ({each / sites:.0f} bytes each, {word})"
