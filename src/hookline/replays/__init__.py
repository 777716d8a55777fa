"""A call of a model again, operation by operation: which one made the first non-finite value.

calls.py       what is kept of a call so that it can be run again: `keep_call`
randomness.py  the random states of a call, taken and put back
containers.py  copies of the containers in which modules keep their state
staging.py     the model as it was at the call, for as long as the replay takes
places.py      which module's forward calls an operation, and which line of the user's code
looking.py     what is in a tensor: NaN, infinities, extremes
events.py      what is noted of operations and of what came of them
following.py   the mode that follows non-finite values from operation to operation
inner.py       which operation inside an operation it was
naming.py      what operations are by their name: masks, fresh memory, changes in place
explaining.py  why an operation gave what it gave, in words
slopes.py      the same for its backward
nodes.py       backward nodes tied to the operations that made them
origins.py     what was found: `Origin`
finding.py     the replay itself: `find_origin`
apart.py       the same in a process of its own, of which nothing stays behind
rowwise.py     why, from rows of statistics alone
outside.py     operations that a script calls outside of its models: `OutsideOperations`

Leaves the model, its gradients and the random states as they were, and knows no watches or rules.
"""

from __future__ import annotations

from hookline.replays.apart import find_origin_apart
from hookline.replays.calls import KeptCall, keep_call
from hookline.replays.finding import find_origin
from hookline.replays.origins import Origin
from hookline.replays.outside import OutsideOperations

__all__ = [
    "KeptCall",
    "Origin",
    "OutsideOperations",
    "find_origin",
    "find_origin_apart",
    "keep_call",
]
