"""Statistics of a model's values over the steps of a training, judged as they come.

    watch.py       hl.watch: the steps of a training, from the first to the last
    options.py     what is asked of it, checked
    choosing.py    what that means for the models at hand
    attaching.py   which sites are listened at, and when
    listening.py   what flows by is measured
    units.py       channels one by one: dead units, outliers, saturation
    weights.py     parameters, gradients, updates and moments around an optimizer's step
    clocks.py      when optimizers step, and what backward is called on
    backwards.py   what tells that weights are stepped by hand
    strangers.py   optimizers that have nothing of the watched models
    stepping.py    when a step ends, and what is measured in it
    turns.py       what is measured more rarely
    recording.py   what was measured in one step, and whose it is
    harvesting.py  how that becomes the record of the step
    waiting.py     values on a GPU that are measured several in one launch
    sorting.py     rows in the order of their sites
    pausing.py     a watch that measures nothing for a while
    pacing.py      which steps are watched, and what that costs
    working.py     the thread that takes steps away
    delivering.py  where they go: memory, the folder, sinks, rules
    findings.py    what rules found, as a list that prints well
    seeking.py     from a value that is not finite to the operation that made it
    reacting.py    what is done about a finding
    guarding.py    what becomes of an error inside hookline
    sinks.py       the numbers of a step for somebody else
    progress.py    a line on the terminal
    describing.py  what a run says about the model

Never changes a value. Never waits for a disk in the training's own thread, nor for a device but to
learn, once a step, whether something there is not finite.
"""

from __future__ import annotations

from hookline.watchers.pacing import Cost
from hookline.watchers.sinks import Scalars
from hookline.watchers.watch import Watch, watch

__all__ = ["Cost", "Scalars", "Watch", "watch"]
