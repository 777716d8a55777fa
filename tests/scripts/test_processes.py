"""Scripts in processes of their own: signals, children, ranks, and every byte they print."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hookline as hl

HOOKLINE = [sys.executable, "-m", "hookline"]

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(32, 8), torch.randn(32, 4)


def train(steps):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(step, loss.item(), flush=True)


def work(number):
    train(2)


if __name__ == "__main__":
    if "spawn" in sys.argv:
        torch.multiprocessing.spawn(work, nprocs=1)
    train(1_000_000 if "endless" in sys.argv else 8)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_output_is_that_of_python_and_children_are_silent(script: Path) -> None:
    plain = subprocess.run(
        [sys.executable, "train.py", "spawn"], capture_output=True, text=True, check=True
    )
    ours = subprocess.run(
        [*HOOKLINE, "run", "train.py", "spawn"], capture_output=True, text=True, check=True
    )
    assert ours.stdout == plain.stdout
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("train-")
    run = hl.open_run(folder)
    assert (run.status, len(run.steps), run.ranks) == ("finished", 8, (0,))
    assert "command" in run.environment
    assert run.environment["command"][1:] == ["train.py", "spawn"]
    assert (folder / "report.html").is_file()
    assert ours.stderr.count("No findings in 8 steps") == 1
    assert f"page  runs/{folder.name}/report.html" in ours.stderr


def _heed_interrupts() -> None:
    """Undo what a shell does to commands in the background: they do not hear of Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("number", "code", "status"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "interrupted"),
        (signal.SIGKILL, -9, "killed"),
    ],
)
def test_signal_keeps_the_run(script: Path, number: int, code: int, status: str) -> None:
    command = [*HOOKLINE, "run", "--no-html", "--out", "run", "train.py", "endless"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_interrupts,
    ) as process:
        assert process.stdout is not None
        for _ in range(4):
            process.stdout.readline()
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == code
    run = hl.open_run("run")
    assert run.status == status
    assert len(run.steps) > 5
    if number != signal.SIGKILL:
        assert "No findings in" in error
        return
    told = subprocess.run(
        [*HOOKLINE, "report", "run"], capture_output=True, text=True, check=True
    ).stdout
    assert "killed" in told


RANKS = """
import sys
import torch
from torch import nn

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(torch.distributed.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


def test_ranks_write_one_run(script: Path) -> None:
    script.write_text(RANKS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "-m", "hookline", "run", "--no-html", "train.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = Path("runs").iterdir()
    run = hl.open_run(folder)
    assert (run.status, run.ranks, list(run.steps)) == ("finished", (0, 1), [0, 1, 2, 3])
    assert done.stderr.count("No findings in 4 steps") == 1
