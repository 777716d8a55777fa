"""The private corners of torch's compiler that hookline stands on, gathered in one place.

As `_torch.py` does for the rest of torch. Called outside of what is traced; what is called while a
graph is made is in `_tracing.py`.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Callable, Container
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch._C._dynamo import eval_frame
from torch._higher_order_ops import effects
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch
from torch.utils.checkpoint import CheckpointPolicy

_EFFECT: Any = effects._EffectType


def is_compiled(module: nn.Module) -> bool:
    """Tell whether calling this module runs `torch.compile`d code."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def has_compiled_part(model: nn.Module) -> bool:
    """Tell whether a model, or any module in it, was given to `torch.compile`."""
    return "torch._dynamo" in sys.modules and any(map(is_compiled, model.modules()))


def is_compile_forced_eager() -> bool:
    """Tell whether `torch.compiler.set_stance("force_eager")` is in effect."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and dynamo._stance.stance == "force_eager"


def force_eager() -> Callable[[], None]:
    """Run compiled models eagerly until what this gives is called.

    A stance that is set meanwhile, by whom and however long, is only noted, and takes effect then:
    contexts put back what was there when they were made, in whatever order they end.
    """
    frames: Any = importlib.import_module("torch._dynamo.eval_frame")
    decorators: Any = importlib.import_module("torch._dynamo.decorators")
    set_stance, lock = frames._set_stance, threading.Lock()
    current, has_ended = set_stance(frames.DynamoStance("force_eager")), False

    def note(stance: Any) -> Any:
        nonlocal current
        with lock:
            if has_ended:  # another thread was on its way here
                return set_stance(stance)
            before, current = current, stance
            return before

    def end() -> None:
        nonlocal has_ended
        with lock:
            has_ended = True
            decorators._set_stance = set_stance
            frames._stance = current  # not by its function, which refuses to in a compiled one

    note._dynamo_forbidden = True  # type: ignore[attr-defined]  # as torch marks its own
    decorators._set_stance = note
    return end


def register_effectful(operator: Any) -> None:
    """Have the compiler keep every call of an operator, in order, whatever its results are for."""
    effects._register_effectful_op(operator, _EFFECT.ORDERED)


def run_uncompiled(function: Any, *, is_deep: bool = True) -> Any:
    """Have the compiler leave a function alone where it is run, not traced; what it calls too.

    Hooks of a compiled module's root run beside the graph, but under the compiler's eyes.
    """
    mark_uncompiled(function.__code__, is_deep=is_deep)
    return function


def mark_uncompiled(code: CodeType, *, is_deep: bool) -> None:
    """Have the compiler leave code alone where it is run."""
    skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    strategy = eval_frame._FrameExecStrategy(skip, skip if is_deep else default)
    eval_frame.set_code_exec_strategy(code, strategy)


def is_run_uncompiled(code: CodeType) -> bool:
    """Tell whether the compiler leaves code alone where it is run, because of where it is from."""
    return "torch._dynamo" in sys.modules and _is_skipped(code, code.co_filename)


@lru_cache(maxsize=1024)
def _is_skipped(code: CodeType, _file: str) -> bool:  # equal code may be from another file
    return bool(sys.modules["torch._dynamo.trace_rules"].check(code))


def resumed_code(code: CodeType) -> CodeType:
    """Give the function that code goes on with, after the compiler broke its graph there.

    All other code is given back.
    """
    resuming = sys.modules.get("torch._dynamo.resume_execution")
    known = None if resuming is None else resuming.ContinueExecutionCache.generated_code_metadata
    found = known.get(code) if known else None
    return code if found is None else found.code


def is_compiled_if_hooked(module: nn.Module) -> bool:
    """Tell whether hooks on a module have the compiler take a forward that it else leaves alone.

    It leaves alone what is in torch's own files, but not the modules of `torch.nn` and `torch.ao`
    that have hooks; in torch 2.11 these too, because its rules are told of no frame.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    is_told = rules is not None and "frame" in rules.check_verbose.__code__.co_varnames
    return is_told and type(module).__module__.startswith(("torch.nn.", "torch.ao."))


def leave_uncompiled(function: Any, why: str, *, is_deep: bool = True) -> Any:
    """Have the compiler leave a function alone that it would trace: a graph ends before its call.

    The mark that `torch.compiler.disable` sets, which would load the compiler. What it calls is
    left alone too, unless told otherwise.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = why
    return run_uncompiled(function, is_deep=is_deep)


def is_called_compiled() -> bool:
    """Tell whether a compiled function is running that has called this, past breaks of its graph.

    Not so where `torch.compiler.disable` lies in between, or everything runs eagerly.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or is_compile_forced_eager():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == dynamo.__file__ and code.co_name in ("compile_wrapper", "_fn"):
            return "callback" in code.co_freevars
        frame = frame.f_back
    return False


def has_compiled_code() -> bool:
    """Tell whether anything was or will be compiled in this process, by `torch.compile`."""
    asked = sys.modules.get("torch._dynamo.eval_frame")
    # What is to be left alone, such as an optimizer's step, is there too, with no backend.
    if asked is not None and any(map(callable, asked.cached_backends.values())):
        return True
    convert = sys.modules.get("torch._dynamo.convert_frame")
    return convert is not None and bool(convert.input_codes.seen)


def has_inductor() -> bool:
    """Tell whether inductor is loaded, which compiles graphs unless another backend is named."""
    return "torch._inductor.compile_fx" in sys.modules


def is_recomputed() -> bool:
    """Tell whether the compiler is making the graph of a region whose forward runs again.

    In torch 2.11 it marks what comes from such a region, later a mode says so while it is traced.
    """
    if fx_traceback.current_meta.get("recompute") is not None:
        return True
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return any(type(mode).__name__ == "_CachingTorchDispatchMode" for mode in modes)


def save_in_checkpoint(operator: Any) -> None:
    """Have the result of the latest call of an operator kept for backward, and not made again."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return
    for node in reversed(mode.tracer.graph.nodes):
        if node.target is operator:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            return


def list_graph_breaks() -> list[tuple[str, str]]:
    """List where the compiler broke graphs so far in this process, and why, in a few words."""
    known = sys.modules.get("torch._dynamo.utils")
    found = []
    for one in [] if known is None else known.graph_break_reasons:
        last = one.user_stack[-1] if one.user_stack else None
        where = "?" if last is None else f"{Path(last.filename).name}:{last.lineno}"
        found.append((where, one.reason.strip().partition("\n")[0]))
    return found


def count_recompile_limits() -> int:
    """Count how often the compiler gave up on a function that it had compiled too often."""
    known = sys.modules.get("torch._dynamo.utils")
    if known is None:
        return 0
    reasons = known.counters["unimplemented"] + known.counters["graph_break"]
    return sum(count for text, count in reasons.items() if "recompile limit" in text)


def list_spent_codes(count: Callable[[CodeType], int]) -> list[CodeType]:
    """List the functions of which the compiler has made as many graphs as it may, as counted.

    Only where it gave up on one since this process began.
    """
    convert = sys.modules.get("torch._dynamo.convert_frame")
    if convert is None or not count_recompile_limits():
        return []
    most = min(convert.config.recompile_limit, convert.config.accumulated_recompile_limit)
    codes = [code for seen in tuple(convert.input_codes.seen) if (code := seen()) is not None]
    return [one for one in codes if count(one) >= most]


def list_graphs(code: CodeType) -> list[Any]:
    """List what the compiler made of a function."""
    return eval_frame._debug_get_cache_entry_list(code)


def describe_guards(code: CodeType) -> str:
    """Write out what the latest graph of a function asks for: the types it met, by identity, too.

    Long where it calls a large model.
    """
    entries = list_graphs(code)
    return str(entries[0].guard_manager) if entries else ""


def forget_filtered_graphs(kept: Container[Any]) -> None:
    """Forget graphs, but for those of these guards, of backends whose guards users have dropped."""
    convert = sys.modules["torch._dynamo.convert_frame"]
    stances = sys.modules["torch._dynamo.eval_frame"]
    if not convert.input_codes.seen:
        return
    kind = convert.CatchErrorsWrapper
    # The compiler keeps no list of what it was given, and graphs do not say what they lack.
    given = [one for one in gc.get_referrers(kind) if type(one) is kind]
    backends = [stances.innermost_backend(one) for one in given if one.hooks.guard_filter_fn]
    if not backends:
        return
    with convert.compile_lock:
        for seen in tuple(convert.input_codes.seen):
            code = seen()
            for entry in () if code is None else list_graphs(code):
                if entry.backend in backends and entry.guard_manager not in kept:
                    eval_frame.reset_code(code)
                    break


def list_compiled_codes(module: nn.Module) -> list[CodeType]:
    """List the functions that the compiler may begin a graph of where it is given a module."""
    inner: Any = module._modules.get("_orig_mod", module)
    given = [getattr(module, "_compiled_call_impl", None), module.__dict__.get("forward")]
    functions = [getattr(one, "_torchdynamo_orig_callable", None) for one in given]
    codes = [getattr(one, "__code__", None) for one in (type(inner).forward, *functions)]
    return [one for one in codes if one is not None]
