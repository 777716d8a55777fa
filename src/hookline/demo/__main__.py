"""Run the script of the demo as anybody runs their own: `hookline run train_gpt.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("train_gpt.py")


def run_demo(options: list[str]) -> int:
    """Train under `hookline run`. It says that something is wrong: that is what the demo shows."""
    print(f"$ hookline run {' '.join([*options, SCRIPT.name])} --steps 100", flush=True)
    command = [sys.executable, "-m", "hookline", "run", *options, str(SCRIPT), "--steps", "100"]
    code = subprocess.call(command)
    return 0 if code == 1 else code or 2


if __name__ == "__main__":
    sys.exit(run_demo(sys.argv[1:]))
