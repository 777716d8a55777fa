"""What the compiler knows of a function that it is tracing, told to those who are traced.

Each of these is called while a graph is made, and never when it runs.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import pyfunctorch
from torch.compiler import is_dynamo_compiling

_CHECKPOINT = "torch.utils.checkpoint"
_REGIONS = {
    "cond": "torch.cond",
    "while_loop": "torch.while_loop",
    "map_impl": "map",
    "scan": "scan",
    "associative_scan": "associative_scan",
    "invoke_subgraph": "torch.compiler.nested_compile_region",
    "tag_activation_checkpoint": _CHECKPOINT,
}
"""By the name of an operator that takes functions, what users call it."""

_CALL_CODE = nn.Module._call_impl.__code__

_MUST_ASK = torch.__version__ < "2.12"
"""Whether what a `__dict__` or a subclass of `str` consists of is not followed, only known."""

regions: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""The modules whose values were out of reach, because of what part of a graph they are in."""


def settle_when_traced(function: Any) -> Any:
    """Have the compiler call a function when it traces a call of it, and take what that gives.

    The mark that `torch.compiler.assume_constant_result` sets, which would load the compiler.
    """
    function._dynamo_marked_constant = True
    return function


def traced_calls() -> Iterator[tuple[CodeType | None, Callable[[str], Any]]]:
    """Give the code of each function that is being traced, innermost first, and its variables.

    As `sys._getframe` does for functions that run; called by what `settle_when_traced` marked. The
    border of an `autograd.Function` has no code.
    """
    frame: FrameType | None = sys._getframe(1)
    last = None
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            one = frame.f_locals.get("self")
            if hasattr(one, "symbolic_locals") and one is not last:
                last = one
                yield one.f_code, partial(_traced_variable, one)  # type: ignore[union-attr]
            elif type(one).__name__.startswith("AutogradFunction"):
                yield None, lambda name: None
        frame = frame.f_back


def _traced_variable(translator: Any, name: str) -> Any:
    found = translator.symbolic_locals.get(name)
    if type(found).__name__ == "CellVariable":  # functions inside of it use it too
        found = translator.output.side_effects.load_cell(found)
    return getattr(found, "value", None)


def list_attributes(value: Any) -> list[str]:
    """Name the attributes of an object, where the compiler looks on too."""
    if _MUST_ASK and is_dynamo_compiling():
        asked: str = _ask_attributes()
        return asked.split("\0") if asked else []
    return list(value.__dict__)


def equal_text(key: str) -> str | None:
    """Give the plain text that an instance of a subclass of `str` equals; None if there is none."""
    if _MUST_ASK and is_dynamo_compiling() and not isinstance(key, Enum):
        asked: str = _ask_text()
        return asked[1:] if asked else None
    text = "" + key
    return text if text == key else None


@settle_when_traced
def _ask_attributes() -> str:
    """Write the names of the attributes that an object has by now, while it is traced."""
    value, effects = _find_traced("value")
    if value.source is not None:  # another graph where an object has others
        source: Any = sys.modules["torch._dynamo.source"]
        _guard(source.AttrSource(value.source, "__dict__"), "DICT_KEYS_MATCH")
    changed = effects.store_attr_mutations.get(value, {})
    known = dict.fromkeys((*value.value.__dict__, *changed))
    return "\0".join(one for one in known if type(changed.get(one)).__name__ != "DeletedVariable")


@settle_when_traced
def _ask_text() -> str:
    """Write the text that a key equals after a mark; nothing if there is none."""
    key = _find_traced("key")[0]
    if key.source is not None:  # another graph for another text, and not for another object
        _guard(key.source, "EQUALS_MATCH")
    text = str.__str__(key.value)
    return "=" + text if text == key.value else ""


def _guard(source: Any, kind: str) -> None:
    """Have the graph that is being traced serve only where something is as it is now."""
    guards: Any = sys.modules["torch._dynamo.guards"]
    guards.install_guard(source.make_guard(getattr(guards.GuardBuilder, kind)))


def _find_translator() -> Any:
    """Give what traces the innermost function; None where something else does, as torch.export."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if hasattr(one := frame.f_locals.get("self"), "symbolic_locals"):
            return one
        frame = frame.f_back
    return None


def _find_traced(name: str) -> tuple[Any, Any]:
    """Give what stands for a variable of the function that is being traced, and what it changed."""
    translator = _find_translator()
    return translator.symbolic_locals[name].realize(), translator.output.side_effects


@settle_when_traced
def find_region() -> str:
    """Name what is being traced a part of, if that may have no effects; nothing elsewhere.

    A checkpointed region is no such part: there, values are shown in ways that can be repeated.
    """
    found = next((one for one in _list_regions() if one != _CHECKPOINT), "")
    modules = (variable("module") for _, variable in traced_calls()) if found else ()
    module = next((one for one in modules if isinstance(one, nn.Module)), None)
    if module is not None:
        regions[module] = found
    return found


@settle_when_traced
def is_value_product() -> bool:
    """Tell whether what the caller has as `value` was made by a product, whatever was done to it.

    In a graph that is a view of something that nobody else has, where it is none in an eager run.
    Torch runs the graph where a tensor is given to what it calls while it traces.
    """
    found, _ = _find_traced("value")
    node = found.as_proxy().node
    while node.args and isinstance(node.args[0], fx.Node) and _keeps_first(node):
        node = node.args[0]
    return _name_target(node) == "matmul"


def _keeps_first(node: fx.Node) -> bool:
    """Tell whether what a node gives is its first argument: changed in place, or shown."""
    name = _name_target(node)
    is_shown = getattr(node.target, "__module__", "").startswith("hookline.")
    is_augmented = name[:1] == "i" and hasattr(operator, name[1:])  # `+=` is `iadd`
    return is_shown or is_augmented or name.endswith("_")


def _name_target(node: fx.Node) -> str:
    name: str = getattr(node.target, "__name__", None) or str(node.target)
    return name


@settle_when_traced
def count_executions() -> int:
    """Count the executions, in one another, of the module whose hook is being traced."""
    running = []
    translator = _find_translator()
    while translator is not None:
        if translator.f_code is _CALL_CODE:
            running.append(_traced_variable(translator, "self"))
        translator = getattr(translator, "parent", None)
    return sum(one is running[0] for one in running if isinstance(one, nn.Module))


def is_in_region() -> bool:
    """Tell whether what is being traced is a part of anything that has a name."""
    return any(True for _ in _list_regions())


@settle_when_traced
def is_in_checkpoint() -> bool:
    """Tell whether a checkpointed region is being traced."""
    return _CHECKPOINT in _list_regions()


def _list_regions() -> Iterator[str]:
    """Name the operators of whose functions a part is being traced, innermost first."""
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    translator = None if convert is None else getattr(convert.tls, "current_tx", None)
    tracer = None if translator is None else translator.output.current_tracer
    while tracer is not None:  # not so where something else traces, as torch.export does
        target = tracer.source_target
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if name in _REGIONS:
            yield _REGIONS[name]
        tracer = tracer.parent
    levels = pyfunctorch.retrieve_all_functorch_interpreters()
    if any(isinstance(one, pyfunctorch.VmapInterpreter) for one in levels):
        yield "torch.func.vmap"
