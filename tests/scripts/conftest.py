"""Scripts run inside of the test's own process, which afterwards is as it was."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hookline.scripts.launching import Launch
from hookline.scripts.options import RunOptions
from hookline.scripts.running import ScriptRun

# What every script begins with.
BEGINNING = """
import copy, os, sys
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


def make(inner=8, outer=4):
    return nn.Sequential(nn.Linear(inner, 16), nn.ReLU(), nn.Linear(16, outer))


x, y = torch.randn(32, 8), torch.randn(32, 4)


def train(model, optimizer, steps=5):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
"""


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """Let nothing be seen of the models of other tests: what is frozen, gc does not list."""
    gc.freeze()
    yield
    gc.unfreeze()


RunHere = Callable[..., SimpleNamespace]


@pytest.fixture
def run_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    only_new_objects: None,
) -> RunHere:
    """Give a function that runs a script under watch in this process, and tells what came of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    # A script that leaves threads ends the pools of its process, which is that of the tests.
    monkeypatch.setattr(threading, "_threading_atexits", [])

    def run(text: str, *args: str, **options: Any) -> SimpleNamespace:
        script = tmp_path / "script.py"
        script.write_text(BEGINNING + text)
        options.setdefault("folder", tmp_path / "run")
        own = nn.Module.__call__, torch.compile, torch.autograd.backward
        handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
        done = ScriptRun(Launch(str(script), args), RunOptions(**options))
        code = done.run()
        assert (nn.Module.__call__, torch.compile, torch.autograd.backward) == own
        assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
        for name in ("last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)  # they hold every frame of the script
        written = capfd.readouterr()
        return SimpleNamespace(code=code, done=done, out=written.out, err=written.err)

    return run
