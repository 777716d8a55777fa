"""The private corners of torch that hookline stands on, gathered in one place.

Everything here exists in torch 2.11 to 2.15 and has a test of its own, so that a torch release
that moves one of them fails there and not in a user's run. Knows nothing of hookline.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import guards
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

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


def is_capturing_cuda_graph(tensor: Tensor) -> bool:
    """Tell whether the tensor's stream is recording a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_function_mode_on(mode: TorchFunctionMode) -> bool:
    """Tell whether a function mode sees what is called now in this thread."""
    return any(one is mode for one in _get_current_function_mode_stack())


def end_loading(batches: Any) -> None:
    """End the processes of a DataLoader that is not read to its end; not those that it keeps.

    They end by themselves when nothing holds the iterator. If the collector finds it in a cycle,
    with an error that has passed through it, say, it waits for ten seconds and then kills them.
    """
    end = getattr(batches, "_shutdown_workers", None)
    if end is not None and not getattr(batches, "_persistent_workers", False):
        end()
