"""The private corners of torch that hookline stands on, gathered in one place.

Everything here exists in torch 2.11 to 2.15 and has a test of its own, so that a torch release
that moves one of them fails there and not in a user's run. Knows nothing of hookline.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame, guards
from torch._higher_order_ops import effects
from torch.autograd import forward_ad
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import proxy_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.hooks import RemovableHandle

_EFFECT: Any = effects._EffectType

graph_task_id = torch._C._current_graph_task_id
"""Give the id of the backward pass this thread runs in, or -1 outside of one."""

preserve_version: Any = vars(torch.autograd)["_unsafe_preserve_version_counter"]
"""Make a context in which a tensor's version counter is put back at the end."""

is_functorch_active = torch._C._are_functorch_transforms_active
"""Tell whether a `torch.func` transform (grad, vmap, jvp) is running."""

is_tracing: Any = vars(torch._C)["_is_tracing"]
"""Tell whether `torch.jit.trace` is recording what is called now."""

CreationMeta = torch._C._autograd.CreationMeta
creation_meta = torch._C._autograd._get_creation_meta
"""Tell how a view was made, which decides whether torch lets it be changed in place."""

top_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_batched = torch._C._functorch.is_batchedtensor
_batch_dim = torch._C._functorch.maybe_get_bdim
_unwrapped = torch._C._functorch.get_unwrapped


has_function_mode: Any = vars(torch._C)["_is_torch_function_mode_enabled"]
"""Tell whether any `TorchFunctionMode` sees the functions that are called now."""

# Builds of torch without CUDA lack both.
raw_cuda_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Give the address of the stream that work for a CUDA device goes to now."""

current_cuda_device: Any = getattr(torch._C, "_cuda_getDevice", None)
"""Give the index of the CUDA device that is current; CUDA must have been initialised."""


is_nested: Any = vars(torch._C.TensorBase)["is_nested"].__get__
"""Tell whether a tensor is a nested one, which has no sizes; what is no tensor is a TypeError."""


def guard_tensors(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Give what tells whether as many tensors are like these, given one by one, in one call.

    Like them in class, dtype, device, layout, sizes, strides and need of a gradient, under the same
    modes of dispatch. All are to be different objects: one that comes twice is never like. A nested
    tensor that is given ends the process: look before.
    """
    sizes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
    make: Any = guards.TensorGuards
    made = make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = made.check
    return check


def gradient_scale(scaler: torch.amp.GradScaler) -> Tensor | None:
    """Give the factor that a scaler puts into the loss, without waiting for a device."""
    return scaler._scale if scaler.is_enabled() else None


_OWN_KEY = 1 << 40
"""The key of hookline's hooks on any module, far from those that torch counts up.

Always the same, because compiled graphs look at keys: another one is another graph.
"""


def add_forward_hooks(module: nn.Module, pre: Any | None, post: Any, *, place: int = 0) -> int:
    """Put a pre hook, if any, and a post hook on a module, with keyword arguments, on errors too.

    A module has one such pair at each place: who has another reason to listen takes another.

    Registering through the module's methods does the same at several times the cost, which shows
    when a session is opened for every call of a model.
    """
    key = _OWN_KEY + place
    if pre is not None:
        module._forward_pre_hooks[key] = pre
        module._forward_pre_hooks_with_kwargs[key] = True
    module._forward_hooks[key] = post
    module._forward_hooks_with_kwargs[key] = True
    module._forward_hooks_always_called[key] = True
    return key


def set_forward_pre_hook(module: nn.Module, key: int, pre: Any | None) -> None:
    """Put the pre hook of `add_forward_hooks` on a module again, or take it away alone."""
    if pre is None:
        module._forward_pre_hooks.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    else:
        module._forward_pre_hooks[key] = pre
        module._forward_pre_hooks_with_kwargs[key] = True


def remove_forward_hooks(module: nn.Module, key: int) -> None:
    """Take away what `add_forward_hooks` put on a module."""
    module._forward_pre_hooks.pop(key, None)
    module._forward_pre_hooks_with_kwargs.pop(key, None)
    module._forward_hooks.pop(key, None)
    module._forward_hooks_with_kwargs.pop(key, None)
    module._forward_hooks_always_called.pop(key, None)


def move_forward_hooks_last(module: nn.Module, key: int) -> None:
    """Let hooks run after those that were added since."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        if key in hooks:
            hooks[key] = hooks.pop(key)


def add_tensor_hook(tensor: Tensor, hook: Any) -> None:
    """Put a gradient hook on a tensor for good, without the handle that registering makes."""
    if type(tensor) is not Tensor:
        tensor.register_hook(hook)
        return
    node: Any = tensor.grad_fn  # read first: on a stale view the next line would crash
    if tensor._backward_hooks is None:
        tensor._backward_hooks = OrderedDict()
        node._register_hook_dict(tensor)
    key = RemovableHandle.next_id
    RemovableHandle.next_id = key + 1
    tensor._backward_hooks[key] = hook


def find_values(nested: Any) -> Tensor:
    """Give the elements of a nested tensor with a jagged layout, one row after the other."""
    values: Tensor = nested._values
    return values


def is_gapless(nested: Any) -> bool:
    """Tell whether these are all its own, and not a part of another one's."""
    return nested._lengths is None


_PRODUCTS = ("AddmmBackward0", "BmmBackward0", "CopySlices")


def may_be_changed(tensor: Tensor) -> bool:
    """Tell whether torch lets a tensor with a gradient be changed in place where grad is on.

    What is given to a graph is a leaf there, though it has a history that is an error to go into;
    where the graph changes it, a copy has its place.
    """
    base = tensor if tensor._base is None else tensor._base
    if base.is_leaf or type(base.grad_fn).__name__ == "Error":
        return False
    return base is tensor or creation_meta(tensor) == CreationMeta.DEFAULT


def shown_product(view: Tensor) -> Tensor | None:
    """Give what a linear layer made, of which it gave a view; None for what is no such view.

    Since torch 2.15 it gives no view. In a graph a product of batches gives one, which may have
    been changed in place since.
    """
    base = view._base
    if base is None or base.numel() != view.numel():
        return None
    return base if type(base.grad_fn).__name__ in _PRODUCTS else None


def storage_number(tensor: Tensor, held: dict[int, object]) -> int:
    """Give the number of a tensor's memory; what is put into `held` keeps others from having it.

    The memory itself is not held: it is freed when the tensors that lie in it are.
    """
    storage = tensor.untyped_storage()
    number: int = storage._cdata
    if number not in held:
        held[number] = StorageWeakRef(storage)
    return number


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply an autograd function outside `torch.func`, past the checks for being inside."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def at_end_of_backward(callback: Any) -> None:
    """Run `callback` when the backward pass that is running now ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_in_nested_backward() -> bool:
    """Tell whether the backward under way was called by that of a function, inside of another.

    As that of a reentrant checkpoint is; what is to run at its end runs before the other's end.
    """
    code = torch.autograd.function.BackwardCFunction.apply.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def will_accumulate(leaf: Tensor) -> bool:
    """Tell whether the backward under way adds to the `.grad` of a leaf, or only gives it out."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        will: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that `torch.autograd.grad` was asked for
        return False
    return will


def unwrap_functorch(tensor: Tensor) -> Tensor:
    """Give the plain tensor behind `torch.func` wrappers, batch dimensions moved to the front."""
    while _is_wrapped(tensor):
        batch_dim = _batch_dim(tensor) if _is_batched(tensor) else -1
        tensor = _unwrapped(tensor)
        if batch_dim > 0:
            tensor = tensor.movedim(batch_dim, 0)
    return tensor


def in_forward_mode() -> bool:
    """Tell whether forward-mode gradients are being computed."""
    return forward_ad._current_level >= 0


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


def is_capturing_cuda_graph(tensor: Tensor) -> bool:
    """Tell whether the tensor's stream is recording a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_function_mode_on(mode: TorchFunctionMode) -> bool:
    """Tell whether a function mode sees what is called now in this thread."""
    return any(one is mode for one in _get_current_function_mode_stack())


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


def end_loading(batches: Any) -> None:
    """End the processes of a DataLoader that is not read to its end; not those that it keeps.

    They end by themselves when nothing holds the iterator. If the collector finds it in a cycle,
    with an error that has passed through it, say, it waits for ten seconds and then kills them.
    """
    end = getattr(batches, "_shutdown_workers", None)
    if end is not None and not getattr(batches, "_persistent_workers", False):
        end()
