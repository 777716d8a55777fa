"""Two models, two runs, or one of each: `hl.diff`, and what the models themselves say of it.

diff.py        hl.diff
arguments.py   what a user gives to it, checked
showing.py     a difference that shows itself
calling.py     what a step of a model is: arguments, loss, random states
flowing.py     the second model's values compared as they flow
catching.py    one call of a module, taken from a step
rerunning.py   a module called again by itself
grafting.py    both modules on the same input
recorded.py    a module on the input that a run has kept
operations.py  the operations of a module's own forward
pairing.py     the operations of two forwards side by side
descending.py  the first operation that differs
locating.py    up and down to the module that differs itself
confirming.py  what these add to a difference
baselines.py   a run in the place of an older one

Models are left as they were.
"""

from __future__ import annotations

from hookline.comparisons.diff import diff

__all__ = ["diff"]
