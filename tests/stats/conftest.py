"""The implementations of a log, which one set of tests holds to one contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from hookline.stats import Log, compiled
from hookline.stats.anywhere import TorchLog
from hookline.stats.cpu import CpuLog


@dataclass(frozen=True)
class Implementation:
    """One way to measure, and where its tensors must be."""

    device: torch.device
    open: Callable[[], Log]
    tolerance: float = 1e-10
    """How near sums of squares over many blocks come to the exact ones."""
    is_merged: bool = False
    """Whether the row of a large tensor is put together from rows of its parts."""


def open_cuda() -> Log:
    from hookline.stats.cuda import CudaLog

    return CudaLog(torch.device("cuda"))


OPENERS: dict[str, tuple[str, Callable[[], Log]]] = {
    "compiled": ("cpu", CpuLog),
    "blocks": ("cpu", lambda: CpuLog(use_compiled=False)),
    "torch": ("cpu", lambda: TorchLog("cpu")),
    "torch-cuda": ("cuda", lambda: TorchLog("cuda")),
    "triton": ("cuda", open_cuda),
}


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=[pytest.mark.gpu] if device == "cuda" else [])
        for name, (device, _) in OPENERS.items()
    ],
)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """Give each implementation in turn; a whole session shares one, so Hypothesis may too."""
    device, opener = OPENERS[request.param]
    if request.param == "compiled" and compiled.load() is None:
        pytest.skip(compiled.status())
    if request.param == "triton":  # a few numbers of 16 bits are added as float32
        return Implementation(torch.device(device), opener, tolerance=1e-6, is_merged=True)
    return Implementation(torch.device(device), opener)
