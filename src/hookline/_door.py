"""The public names, gathered from where they live; `hookline` itself shows them as its own."""

from hookline import testing
from hookline._errors import (
    AddressError,
    AmbiguousRead,
    BadTraining,
    CorruptShard,
    EditError,
    GradientError,
    HooklineError,
    HooklineWarning,
    NewerRun,
    NoSuchRun,
    NoSuchSite,
    NotCaptured,
    NotComparable,
    NotRecorded,
    OutOfBudget,
    OutOfMemory,
    Overwritten,
    RunExists,
    RunWriteError,
    SessionError,
    StoreError,
    UnsupportedModel,
    UnsupportedTensor,
)
from hookline.addresses import port
from hookline.captures.capture import capture
from hookline.captures.captured import Captured
from hookline.captures.storing import load
from hookline.comparisons.diff import diff
from hookline.comparisons.showing import Difference
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
from hookline.extractions import AddFeatures, Extraction, RayCluster, extract
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
from hookline.recordings import Recording, record
from hookline.rules import Finding, Rule, register_rule
from hookline.runs import Run, Series, open_run
from hookline.scripts.checking import check
from hookline.scripts.checkups import Checkup
from hookline.stores import Store, StoreWriter, open_store
from hookline.surveys.annotating import source
from hookline.surveys.listing import sites
from hookline.watchers import Watch, watch

__all__ = [
    "KEEP",
    "MISSING",
    "AddFeatures",
    "AddressError",
    "AmbiguousRead",
    "At",
    "BadTraining",
    "Captured",
    "Checkup",
    "CorruptShard",
    "Difference",
    "EditError",
    "Extraction",
    "Finding",
    "GradientError",
    "Handle",
    "HooklineError",
    "HooklineWarning",
    "NewerRun",
    "NoSuchRun",
    "NoSuchSite",
    "NotCaptured",
    "NotComparable",
    "NotRecorded",
    "OutOfBudget",
    "OutOfMemory",
    "Overwritten",
    "RayCluster",
    "Recording",
    "Rule",
    "Run",
    "RunExists",
    "RunWriteError",
    "Series",
    "SessionError",
    "Store",
    "StoreError",
    "StoreWriter",
    "UnsupportedModel",
    "UnsupportedTensor",
    "Watch",
    "add",
    "capture",
    "check",
    "clip",
    "diff",
    "edit",
    "extract",
    "hook",
    "inventory",
    "load",
    "mask",
    "noise",
    "open_run",
    "open_store",
    "patch",
    "port",
    "record",
    "register_backward_hook",
    "register_backward_pre_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_hook",
    "register_rule",
    "scale",
    "set",
    "sites",
    "skip",
    "source",
    "swap_rows",
    "testing",
    "watch",
    "zero",
]
