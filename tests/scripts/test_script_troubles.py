"""What is odd in a script is left out of the watch, and said; the rest of it is watched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import hookline as hl
from hookline.scripts import watching

RunHere = Callable[..., SimpleNamespace]

TRAIN = "model = make()\ntrain(model, torch.optim.SGD(model.parameters(), lr=0.01))\n"

FORKING = """
import concurrent.futures, os, sys, threading
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


train(2)
model.weight.data[0, 0] = float("nan")
train(2)
for number in range(3):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        train(1)
        if number == 0:
            sys.exit(0)
        if number == 1:
            sys.exit(5)
        raise RuntimeError("of a child")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
pool = concurrent.futures.ThreadPoolExecutor()
pool.submit(train, 3)
"""


def test_forks_end_as_without_us_and_pools_are_waited_for(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FORKING)
    words = [sys.executable, "-m", "hookline", "run", "--out", "run", "--no-html", "script.py"]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, timeout=100, check=False
    )
    assert done.returncode == 1
    assert done.stdout == "0\n5\n1\n"
    assert done.stderr.count("RuntimeError: of a child") == 1
    assert "scripts/running.py" not in done.stderr
    assert done.stderr.count("\nrun   run (finished, 7 steps") == 1


def test_threads_that_go_on_are_watched_to_their_end(run_here: RunHere) -> None:
    done = run_here(
        "import threading, time\n"
        "model = make()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "def work():\n"
        "    time.sleep(0.3)\n"
        "    train(model, optimizer, 6)\n"
        "threading.Thread(target=work).start()\n"
    )
    assert "No findings in 6 steps" in done.err


def test_error_is_shown_before_threads_are_waited_for(run_here: RunHere) -> None:
    done = run_here(
        "import threading, time\n"
        "def work():\n"
        "    time.sleep(0.3)\n"
        "    print('worked', file=sys.stderr)\n"
        "threading.Thread(target=work).start()\n"
        "raise ValueError('on purpose')\n"
    )
    assert done.code == 1
    assert done.err.index("ValueError: on purpose") < done.err.index("worked")


def test_torchscript_is_left_out(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here(
        "part = torch.jit.script(nn.Linear(8, 8))\n"
        "model = make()\n"
        "optimizer = torch.optim.SGD([*model.parameters(), *part.parameters()], lr=0.01)\n"
        "train(lambda x: model(part(x)), optimizer)\n"
        "scripted = torch.jit.script(model)\n"
        "traced = torch.jit.trace(model, x)\n"
        "print(torch.equal(scripted(x), traced(x)))\n"
        "train(model, optimizer)\n"
    )
    assert (done.code, done.out) == (0, "True\n")
    note = "`Linear` is TorchScript, inside of which nothing is watched"
    run = hl.open_run(tmp_path / "run")
    assert len(run.steps) == 10
    assert "model.2:output" in [site.address for site in run.describe_sites()]
    assert note in run.document("notes")["notes"]


def test_models_without_values_are_left_out(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here(
        "with torch.device('meta'):\n"
        "    other = make()\n"
        "    other(torch.randn(4, 8)).sum().backward()\n"
        "    torch.optim.SGD(other.parameters(), lr=0.1).step()\n" + TRAIN
    )
    assert done.code == 0
    assert "No findings in 5 steps" in done.err
    (note,) = hl.open_run(tmp_path / "run").document("notes")["notes"]
    assert note == "`Sequential` is on the meta device, where there are no values"


def test_calls_of_transforms_are_no_steps(run_here: RunHere) -> None:
    done = run_here(
        "from torch.func import functional_call, grad, vmap\n"
        "model = make()\n"
        "weights = {name: one.detach() for name, one in model.named_parameters()}\n"
        "def loss(weights, x):\n"
        "    return functional_call(model, weights, (x,)).square().mean()\n"
        "vmap(grad(loss), (None, 0))(weights, x)\n"
        "train(model, torch.optim.SGD(model.parameters(), lr=0.01))\n"
        "vmap(grad(loss), (None, 0))(weights, x)\n"
    )
    assert done.code == 0
    assert "No findings in 5 steps" in done.err


def test_folder_that_is_removed_takes_no_report_along(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here(
        f"os.mkdir('here'); os.chdir('here')\n{TRAIN}os.rmdir({str(tmp_path / 'here')!r})\n"
    )
    assert "No findings in 5 steps" in done.err
    assert f"run   {tmp_path / 'run'}" in done.err


def test_watch_that_stopped_says_so_first(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = 0

    def fail(*args: object, **more: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("planted")

    monkeypatch.setattr(watching.LossCode, "follow", fail)
    done = run_here(TRAIN)
    assert done.code == 0
    assert done.done.verdict.startswith("The watch stopped at step ")
    assert "nothing after that was judged. No findings in" in done.done.verdict
    assert done.done.verdict in " ".join(done.err.split())
    assert "planted" in hl.open_run(tmp_path / "run").document("notes")["notes"][-1]


def test_pattern_of_a_later_model_is_found(run_here: RunHere, tmp_path: Path) -> None:
    done = run_here(
        "first = make()\n"
        "train(first, torch.optim.SGD(first.parameters(), lr=0.01))\n"
        "class Late(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head = make()\n"
        "    def forward(self, x):\n"
        "        return self.head(x)\n"
        "late = Late()\n"
        "train(late, torch.optim.SGD(late.parameters(), lr=0.01))\n",
        sites=("**.head",),
    )
    assert "nothing is watched of `Sequential`" in done.err
    assert len(hl.open_run(tmp_path / "run").series("late.head").values) == 5
