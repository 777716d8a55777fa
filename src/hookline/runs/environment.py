"""Where a run came from: versions, machine, command, state of the code.

Nothing is started for it but git, and nothing secret is kept: of the environment variables only a
short list, of the command line nothing that looks like a key, of the code no text.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("hookline", "torch", "numpy", "safetensors")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "NVIDIA_TF32_OVERRIDE",
    "PYTHONHASHSEED",
)
_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_SECRET_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"
_GIT_SECONDS = 2.0


def describe_environment() -> dict[str, Any]:
    """Describe this process: versions, machine, command, git, and a few variables."""
    return {
        "python": platform.python_version(),
        "packages": {name: _read_package(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "gpus": _list_gpus(),
        "command": read_command(),
        "directory": str(Path.cwd()),
        "git": _read_git(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def read_command() -> list[str]:
    """Read the command line, with `***` for what looks like a secret."""
    words = [sys.executable, *sys.argv]
    shown = []
    is_value_secret = False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_value_secret and not word.startswith("-"):
            shown.append(_HIDDEN)
        elif equals and _SECRET.search(name):
            shown.append(f"{name}={_HIDDEN}")
        else:
            shown.append(_SECRET_IN_URL.sub(_HIDDEN, word))
        is_value_secret = word.startswith("-") and not equals and bool(_SECRET.search(word))
    return shown


def read_hookline_version() -> str | None:
    """Read the version of this package; None where it runs from a plain folder."""
    return _read_package("hookline")


def _read_package(name: str) -> str | None:
    loaded = getattr(sys.modules.get(name), "__version__", None)
    if loaded is not None:  # names the build of torch, of which its metadata need not tell
        return str(loaded)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _list_gpus() -> list[str]:
    """Name the GPUs that are in use; asking whether there are any would claim one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def _read_git() -> dict[str, Any] | None:
    """Read commit, branch and whether files changed since; None outside a repository."""
    commit = _ask_git("rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _ask_git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "branch": _ask_git("rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": None if changes is None else bool(changes),
    }


def _ask_git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words],
            capture_output=True,
            check=True,
            timeout=_GIT_SECONDS,
            stdin=subprocess.DEVNULL,
            # So that asking for the status does not write to the repository.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()
