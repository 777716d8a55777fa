"""Where the run of a script goes: a folder of its own, the same one for all ranks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

RUNS = "runs"
"""The folder in which runs lie unless another is named."""

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+")


def read_rank(environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Tell from what a launcher such as torchrun sets which rank of how many this is."""
    found = os.environ if environment is None else environment
    try:
        return int(found.get("RANK", "0")), int(found.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def choose_folder(name: str, *, environment: Mapping[str, str] | None = None) -> Path:
    """Name the folder of a run that begins now; ranks of one launch choose the same."""
    found = os.environ if environment is None else environment
    stem = _UNFIT.sub("-", name).strip("-.") or "script"
    if read_rank(found)[1] > 1:
        return (Path(RUNS) / f"{stem}-{_name_launch(found)}").absolute()
    return (Path(RUNS) / f"{stem}-{_format(time.time())}").absolute()


def claim_folder(folder: Path) -> Path:
    """Make the folder, or where somebody has it already the next one that is free."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    free, number = folder, 2
    while True:
        try:
            free.mkdir()
        except FileExistsError:
            free = folder.with_name(f"{folder.name}-{number}")
            number += 1
        else:
            return free


def _name_launch(found: Mapping[str, str]) -> str:
    """Name a launch by what all of its ranks know: its job, or when the launcher started."""
    job = found.get("SLURM_JOB_ID", "")
    given = found.get("TORCHELASTIC_RUN_ID", "")
    is_one_machine = found.get("LOCAL_WORLD_SIZE") == found.get("WORLD_SIZE")
    started = _read_start(os.getppid()) if is_one_machine else None
    if started is not None:
        name = _format(started)
    elif job:
        name = "-".join(filter(None, ["job", job, found.get("SLURM_STEP_ID", "")]))
    elif given and given != "none":
        name = given
    else:
        name = f"{found.get('MASTER_ADDR', 'ranks')}-{found.get('MASTER_PORT', '0')}"
    restarts = found.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts not in ("", "0"):
        name = f"{name}-restart-{restarts}"
    return _UNFIT.sub("-", name)


def _format(moment: float) -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(moment))


def _read_start(process: int) -> float | None:
    """Tell when a process started, in whole seconds; None where that cannot be read."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
        ticks = int(text.rpartition(")")[2].split()[19])
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        # The kernel's own figure: computed from two clocks it would differ between ranks.
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return boot + ticks // os.sysconf("SC_CLK_TCK")
