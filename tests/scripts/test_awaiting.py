"""torch is waited for, and is afterwards what it would be without."""

from __future__ import annotations

import subprocess
import sys

from hookline.scripts.awaiting import TorchArrival

PROBE = """
import sys
from hookline.scripts.awaiting import TorchArrival

told = []
arrival = TorchArrival(lambda: told.append("torch.nn" in sys.modules))
before = list(sys.meta_path)
arrival.start()
import json
assert "torch" not in sys.modules and not told
import torch
assert told == [True], told
assert sys.meta_path == before
assert type(torch.__spec__.loader).__name__ == type(torch.__loader__).__name__ == "SourceFileLoader"
import importlib
importlib.reload(json)
assert told == [True]
never = TorchArrival(lambda: told.append("again"))
never.start()
assert told == [True, "again"]
"""


def test_acts_once_when_torch_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_stops_waiting() -> None:
    before = list(sys.meta_path)
    told: list[str] = []
    arrival = TorchArrival(lambda: told.append("there"))
    arrival.start()  # it is there already
    arrival.stop()
    assert told == ["there"]
    assert sys.meta_path == before
