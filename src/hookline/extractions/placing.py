"""The model that runs: what is inside of wrappers, on the device that was given."""

from __future__ import annotations

import torch
from torch import nn

from hookline.extractions.running import choose_device
from hookline.extractions.teams import is_spread


def unwrap(model: nn.Module) -> nn.Module:
    """Give what is inside of DistributedDataParallel and DataParallel, compiled or not.

    DDP sends buffers around in each forward, and ranks that have other numbers of batches would
    wait for each other without end.
    """
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return unwrap(inner.module)
    return model


def place_model(model: nn.Module, device: torch.device | str | None) -> nn.Module:
    """Move a model to a device, if one was given; one that lies on several stays as it is."""
    place = choose_device(device)
    # Models that were loaded with a device_map know by themselves what goes where.
    has_map = any(hasattr(one, "hf_device_map") for one in model.modules())
    if place is None or has_map or is_spread(model):
        return model
    if len({one.device for one in model.parameters()}) > 1:
        return model
    return model.to(place)
