"""A watch whose process is killed, interrupted, forked, or simply ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import Net
from torch.utils.data import DataLoader, Dataset
from training_processes import KILLED, finish, start

import hookline as hl


def test_no_acknowledged_step_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    said, _ = finish(start(KILLED, str(tmp_path), "1", "10"))
    acknowledged = [int(line.split()[1]) for line in said.splitlines()]
    assert len(acknowledged) == 10
    assert max(acknowledged) > 2
    for number, last in enumerate(acknowledged):
        run = hl.open_run(tmp_path / str(number))
        assert run.status == "killed"
        steps = run.steps.tolist()
        assert steps == list(range(len(steps)))
        assert len(steps) > last
        if not steps:
            continue
        for site in ("0", "2:output.grad", "0.weight:update"):
            values = run.series(site, "rms").values
            assert np.isfinite(values).all(), site
        assert len(run.table()) > 10


def test_an_interrupt_from_the_keyboard_keeps_the_run(tmp_path: Path) -> None:
    process = start(
        """
# A shell lets what it runs in the background ignore the keyboard, and so would this.
signal.signal(signal.SIGINT, signal.default_int_handler)
with hl.watch(model, sys.argv[1]) as watched:
    for count in range(100000):
        step()
        if count == 5:
            watched.flush()
            print("go", flush=True)
""",
        str(tmp_path / "run"),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGINT)
    _, complained = finish(process, code=-signal.SIGINT)
    assert "KeyboardInterrupt" in complained
    run = hl.open_run(tmp_path / "run")
    assert run.status == "interrupted"
    assert len(run.steps) >= 6
    assert run.cost["steps"] >= 5


def test_a_watch_that_nobody_closes_is_complete_at_the_end_of_the_process(tmp_path: Path) -> None:
    script = """
watched = hl.watch(model, sys.argv[1])
for _ in range(5):
    watched.log(loss=step())
"""
    _, complained = finish(start(script, str(tmp_path / "run")))
    assert complained == ""
    run = hl.open_run(tmp_path / "run")
    assert run.status == "finished"
    assert run.steps.tolist() == [0, 1, 2, 3, 4]
    assert np.isfinite(run.scalar("loss").values).all()


def test_a_watch_that_was_dropped_still_completes_its_run(tmp_path: Path) -> None:
    script = """
import gc

def train():
    watched = hl.watch(model, sys.argv[1])
    for _ in range(3):
        step()

train()
gc.collect()
step()
"""
    _, complained = finish(start(script, str(tmp_path / "run")))
    assert complained == ""
    run = hl.open_run(tmp_path / "run")
    assert run.status == "finished"
    assert run.steps.tolist() == [0, 1, 2, 3]


def test_a_full_disk_ends_the_writing_and_steps_are_judged_on(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    script = """
import resource, hashlib
torch.manual_seed(1)
if sys.argv[2] == "watched":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    watched = hl.watch(model, sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    for count in range(300):
        step()
    watched.flush()
    watched.close()
    assert watched.failure is None and watched.write_failure is not None
    assert watched.verdict.startswith("No findings in 300 steps"), watched.verdict
else:
    for count in range(300):
        step()
print(hashlib.sha256(model[0].weight.detach().numpy().tobytes()).hexdigest())
"""
    said, complained = finish(start(script, str(tmp_path / "run"), "watched"))
    plain, _ = finish(start(script, "", "plain"))
    assert said == plain
    assert complained.count("steps are judged all the same") == 1
    run = hl.open_run(tmp_path / "run")
    steps = run.steps.tolist()
    assert steps == list(range(len(steps)))
    assert 0 < len(steps) < 300


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


def test_loader_processes_that_fork_do_no_harm(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, tmp_path / "run"):
        for _ in range(2):
            loader = DataLoader(
                Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork"
            )
            for batch in loader:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
    run = hl.open_run(tmp_path / "run")
    assert run.status == "finished"
    assert run.steps.tolist() == list(range(8))
    assert run.series("fc1", "count").values.tolist() == [8.0] * 8


@pytest.mark.parametrize("closes", [False, True])
def test_a_fork_that_trains_writes_nothing(tmp_path: Path, closes: bool) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()

    with hl.watch(model, tmp_path / "run") as watched:
        train(2)
        child = os.fork()
        if not child:
            code = 1
            try:
                train(3)
                watched.flush()
                if closes:
                    watched.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        train(2)
    run = hl.open_run(tmp_path / "run")
    assert run.status == "finished"
    assert run.steps.tolist() == [0, 1, 2, 3]
    assert run.notes == ()
