"""See and change any value in a PyTorch model, forward and backward, without touching its code.

    sites      what an address or pattern means in a model
    hook       a function at any site; register_* are torch's own calls over patterns
    capture    keep values and gradients
    edit       change them: set, add, scale, zero, clip, noise, mask, patch, swap_rows, skip
    inventory  every hook on a model

Importing changes nothing in torch.
"""

from hookline._errors import (
    AddressError,
    AmbiguousRead,
    EditError,
    GradientError,
    HooklineError,
    HooklineWarning,
    NoSuchSite,
    NotCaptured,
    OutOfBudget,
    Overwritten,
    SessionError,
    UnsupportedModel,
)
from hookline.addresses import port
from hookline.captures.capture import capture
from hookline.captures.captured import Captured
from hookline.captures.storing import load
from hookline.edits.actions import (
    add,
    clip,
    mask,
    noise,
    patch,
    scale,
    set,
    swap_rows,
    zero,
)
from hookline.edits.edit import edit
from hookline.edits.skipping import skip
from hookline.hooks.functions import hook
from hookline.hooks.inventory import inventory
from hookline.hooks.sessions import Handle
from hookline.hooks.tensors import register_hook
from hookline.hooks.torch_style import (
    register_backward_hook,
    register_backward_pre_hook,
    register_forward_hook,
    register_forward_pre_hook,
)
from hookline.hooks.visits import KEEP, MISSING, At
from hookline.surveys.listing import sites

__all__ = [
    "KEEP",
    "MISSING",
    "AddressError",
    "AmbiguousRead",
    "At",
    "Captured",
    "EditError",
    "GradientError",
    "Handle",
    "HooklineError",
    "HooklineWarning",
    "NoSuchSite",
    "NotCaptured",
    "OutOfBudget",
    "Overwritten",
    "SessionError",
    "UnsupportedModel",
    "add",
    "capture",
    "clip",
    "edit",
    "hook",
    "inventory",
    "load",
    "mask",
    "noise",
    "patch",
    "port",
    "register_backward_hook",
    "register_backward_pre_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_hook",
    "scale",
    "set",
    "sites",
    "skip",
    "swap_rows",
    "zero",
]
