"""Statistics of a model's values over the steps of a training.

    watch.py       hl.watch: the steps of a training, from the first to the last
    attaching.py   which sites are listened at, and when
    listening.py   what flows by is measured
    weights.py     parameters, gradients, updates and moments around an optimizer's step
    clocks.py      when optimizers step
    recording.py   what was measured in one step, and whose it is
    pacing.py      which steps are watched, and what that costs
    working.py     the thread that takes steps away
    sinks.py       where else they go
    progress.py    a line on the terminal
    describing.py  what a run says about the model

Never changes a value, and never waits for a device or a disk in the training's own thread.
"""

from __future__ import annotations

from hookline.watchers.pacing import Cost
from hookline.watchers.sinks import Scalars
from hookline.watchers.watch import Watch, watch

__all__ = ["Cost", "Scalars", "Watch", "watch"]
