"""See and change any value in a PyTorch model, forward and backward, without touching its code.

    sites      what an address or pattern means in a model
    source     the source of a forward, with the address of each value beside it
    hook       a function at any site; register_* are torch's own calls over patterns
    capture    keep values and gradients
    edit       change them: set, add, scale, zero, clip, noise, mask, patch, swap_rows, skip
    inventory  every hook on a model
    watch      statistics of every value while a model trains, into a run, and what is wrong
    check      the same for one batch, before the training
    open_run   read a run
    record     every value of a step or a training, to be compared
    diff       the first place where two models or recordings differ, and why
    extract    the activations of a whole data set, into a tensor store on disk
    open_store read one
    testing    a model that must compute what it did: assert_same_run

Importing changes nothing in torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline._door import *  # noqa: F403 (what `__getattr__` gives at run time)


def __getattr__(name: str) -> Any:
    """Load the package when a name of it is first asked for: `hookline --help` needs none of it."""
    if name == "__all__" or not name.startswith("_"):
        door = import_module("hookline._door")
        # While the door itself is being loaded, it has no names yet.
        names = getattr(door, "__all__", ())
        globals().update({one: getattr(door, one) for one in names}, __all__=names)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
