"""The random states that follow from a seed, without a random number being drawn."""

from __future__ import annotations

import random
import sys

import torch

from hookline.replays.randomness import RandomStates, put_states, take_states


def seed_states(seed: int) -> RandomStates:
    """Give the random states that seeding torch, Python and numpy would lead to."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    before = take_states(devices, in_full=True)
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        return take_states(devices, in_full=True)
    finally:
        put_states(before)
