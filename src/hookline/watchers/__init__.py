"""Statistics of a model's values over the steps of a training.

    watch.py       hl.watch: the steps of a training, from the first to the last
    options.py     what is asked of it, checked
    attaching.py   which sites are listened at, and when
    listening.py   what flows by is measured
    weights.py     parameters, gradients, updates and moments around an optimizer's step
    clocks.py      when optimizers step
    stepping.py    when a step ends, and what is measured in it
    recording.py   what was measured in one step, and whose it is
    waiting.py     values on a GPU that are measured several in one launch
    sorting.py     rows in the order of their sites
    pacing.py      which steps are watched, and what that costs
    working.py     the thread that takes steps away
    delivering.py  where they go: memory, the folder, sinks
    sinks.py       the numbers of a step for somebody else
    progress.py    a line on the terminal
    describing.py  what a run says about the model

Never changes a value, and never waits for a device or a disk in the training's own thread.
"""

from __future__ import annotations

from hookline.watchers.pacing import Cost
from hookline.watchers.sinks import Scalars
from hookline.watchers.watch import Watch, watch

__all__ = ["Cost", "Scalars", "Watch", "watch"]
