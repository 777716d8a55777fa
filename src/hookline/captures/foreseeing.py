"""Foresee that a value inside a forward is changed in place after it was captured.

What is foreseen is copied at once. What is not is noticed when it is read, and copied from then on.
"""

from __future__ import annotations

from torch import nn

from hookline.addresses import Inside
from hookline.addresses.variables import forward_of
from hookline.sources import NoSource, Reading, changes_in_place, read


def may_change(module: nn.Module, inside: Inside) -> bool:
    """Tell whether the source says that a variable or an operation's result may be written to."""
    try:
        reading = read(forward_of(module))
        if changes_in_place(reading):
            return True
        if inside.mark == "@" and "." in inside.name and inside.name not in reading.names:
            return _helper_changes(reading, inside.name)
    except NoSource:
        return True
    return False


def _helper_changes(reading: Reading, name: str) -> bool:
    for callee in reading.callees:
        if name.startswith(f"{callee.name}."):
            if callee.function is None:
                return True
            return changes_in_place(read(callee.function))
    return True
