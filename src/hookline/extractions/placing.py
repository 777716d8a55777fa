"""The model that runs: what is inside of wrappers."""

from __future__ import annotations

from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """Give what is inside of DistributedDataParallel and DataParallel, compiled or not.

    DDP sends buffers around in each forward, and ranks that have other numbers of batches would
    wait for each other without end.
    """
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return unwrap(inner.module)
    return model
