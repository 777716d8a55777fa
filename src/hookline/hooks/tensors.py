"""`hl.register_hook`: the gradient of one tensor the user holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hookline._errors import GradientError, UnsupportedModel
from hookline._torch import graph_task_id
from hookline.hooks.fitting import check_fit


class TensorHandle:
    """Remove a tensor's hook, once or many times; also a context manager."""

    def __init__(self, hook: _TensorHook, handles: list[Any]) -> None:
        self._hook = hook
        self._handles = handles

    def remove(self) -> None:
        """Remove the hook; takes effect at once."""
        self._hook.is_live = False
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> TensorHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


class _TensorHook:
    """Call the user's function, check what it returns, and notice when it was passed over."""

    def __init__(self, tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
        self.function = function
        self.is_live = True
        self.shape = tuple(tensor.shape)
        self.version = tensor._version
        self.tensor = weakref.ref(tensor)  # a hook that held its own tensor would never be freed
        self.base = weakref.ref(tensor if tensor._base is None else tensor._base)
        """What it is a view of: both count the same versions."""
        self.last_task = -1

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if not self.is_live or grad is None:
            return None
        self.last_task = graph_task_id()
        try:
            new = self.function(grad)
        except Exception as error:
            error.add_note(f"in a hl.register_hook of a tensor of shape {self.shape}")
            raise
        if new is None or new is grad:
            return None
        check_fit(grad, new, f"a tensor of shape {self.shape}")
        return new

    def base_done(self, grad: Tensor | None) -> None:
        """Run when the gradient of a view's base is there: the view's must have come before."""
        if self.is_live and self.last_task != graph_task_id():
            tensor = self.tensor() if self.tensor() is not None else self.base()
            changed = tensor is None or tensor._version != self.version
            if changed:
                raise GradientError(
                    f"the hook on a tensor of shape {self.shape} was lost: it is a view that was "
                    "changed in place after hl.register_hook. Register it after the change, or on "
                    "y = y.clone()."
                )


def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> TensorHandle:
    """Call `hook(grad)` when the gradient of this tensor is there; a return replaces it.

    The hook belongs to the tensor's value now: an in-place change later makes another value. On a
    view that is changed in place afterwards torch drops hooks in silence; this raises.
    """
    if not isinstance(tensor, Tensor):
        raise UnsupportedModel(
            f"hl.register_hook takes a tensor; this is {type(tensor).__qualname__}. "
            "For modules there is hl.hook(model, address, fn)."
        )
    if not tensor.requires_grad:
        raise GradientError(
            "this tensor has no gradient: nothing it was made from requires one, or it was made "
            "under torch.no_grad(). Call x.requires_grad_() on an input first."
        )
    tensor.grad_fn  # noqa: B018  a stale view crashes in torch's register_hook otherwise
    own = _TensorHook(tensor, hook)
    handles = [tensor.register_hook(own)]
    if tensor._is_view() and tensor._base is not None and tensor._base.requires_grad:
        handles.append(tensor._base.register_hook(own.base_done))
    return TensorHandle(own, handles)
