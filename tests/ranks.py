"""Run a function on processes that form a process group on this machine, and gather results."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

WORLD = 2
PRELOADED = [
    "hookline.testing",
    "hookline.extractions",
    "torch._inductor.config",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
_SECONDS = 120.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _work(rank: int, function: Callable[[int], Any], port: int, folder: str, world: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    try:
        torch.save(function(rank), Path(folder) / f"{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def run_on_ranks(function: Callable[[int], Any], folder: Path, world: int = WORLD) -> list[Any]:
    """Give what the function returned on each rank; an error in a process is raised here."""
    # From one process that has loaded torch, so that each begins at once.
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    context = torch.multiprocessing.start_processes(
        _work,
        (function, _free_port(), str(folder), world),
        nprocs=world,
        join=False,
        start_method="forkserver",
    )
    assert context is not None
    end = time.monotonic() + _SECONDS
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < end, "the processes did not end in time"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
