"""Trainings in processes of their own, to be killed, interrupted and left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent

PREAMBLE = """
import os, random, signal, sys, time
import torch
from torch import nn
import hookline as hl

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

def step():
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    return loss
"""

# A fork is much faster than a process that imports torch anew. The watch is made in the fork.
KILLED = """
random.seed(int(sys.argv[2]))
for number in range(int(sys.argv[3])):
    folder = f"{sys.argv[1]}/{number}"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        watched = hl.watch(model, folder)
        os.write(writing, b"-1\\n")
        for count in range(100000):
            step()
            if count % 3 == 2:
                watched.flush()
                os.write(writing, b"%d\\n" % count)
        os._exit(1)
    os.close(writing)
    said = b""
    while b"\\n" not in said:
        said += os.read(reading, 100)
    time.sleep(random.random() * 0.3)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reading, 100000):
        said += more
    os.close(reading)
    print(number, said.decode().split()[-1], flush=True)
"""


def start(script: str, *args: str, **options: int) -> subprocess.Popen[str]:
    """Start a training; what it prints can be read."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PREAMBLE + script, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"},
        **options,  # type: ignore[call-overload]
    )


def finish(process: subprocess.Popen[str], *, code: int = 0) -> tuple[str, str]:
    """Wait for the end, check its exit code, and give what it said."""
    try:
        said, complained = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, complained
    return said, complained
