"""Aliases that share memory with an original, and the history the original must not lose.

A tap hands a detached alias of a tensor on. What changes the alias in place changes the original
too, but autograd knows it of the alias alone. Where that happens inside the module the original's
history is put right; where it happens later, the gradients tell whether anything was lost.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from hookline import _trees
from hookline._errors import GradientError
from hookline._torch import (
    CreationMeta,
    add_tensor_hook,
    creation_meta,
    graph_task_id,
    is_functorch_active,
    preserve_version,
)
from hookline.addresses import format_leaf


class Audited(Protocol):
    """What delivers gradients of tapped tensors and has their audits by position."""

    audits: dict[int, Audit]


def refuse_leaf() -> NoReturn:
    """Raise what torch raises when a leaf is changed in place."""
    raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether a tensor is another one or a view into the same storage."""
    if one is other:
        return True
    if one.layout != torch.strided or other.layout != torch.strided:
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class _Rebase(Function):
    """Make a tensor's history run through an alias of it that was changed in place."""

    @staticmethod
    def forward(ctx: Any, original: Tensor, alias: Tensor) -> Tensor:
        ctx.mark_dirty(original)
        return original

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        # Zeros, not None: None would lose the rest of a view's base.
        return torch.zeros_like(grad), grad


def rebase(original: Tensor, alias: Tensor) -> None:
    """Give a tensor that was changed in place through its alias the alias's history."""
    if original.is_leaf:
        refuse_leaf()
    with preserve_version(original):
        _Rebase.apply(original, alias)  # type: ignore[no-untyped-call]


class InputTaps:
    """The tapped arguments of one call: originals, aliases, and the version they had."""

    __slots__ = ("aliases", "bound", "originals", "path", "relays", "versions")

    def __init__(
        self,
        originals: list[Tensor],
        aliases: tuple[Tensor, ...],
        relays: list[tuple[Audited, int]],
        bound: dict[str, Any],
        path: str,
    ) -> None:
        self.originals = originals
        self.aliases = aliases
        self.relays = relays
        """What delivers the gradient of each, and at which position."""
        self.bound = bound
        """All arguments by name."""
        self.path = path
        self.versions = [tensor._version for tensor in originals]

    def rebase(self) -> None:
        """Give originals that were changed in place through their alias the right history."""
        for original, alias, version in zip(
            self.originals, self.aliases, self.versions, strict=True
        ):
            if original._version != version:
                if not original.is_leaf:
                    self._refuse_overlap(original)
                rebase(original, alias)

    def audit(self, output: Any) -> None:
        """Watch over the originals of arguments that the module gives back, whole or in part."""
        if is_functorch_active():
            return
        for original, alias, (relay, position) in zip(
            self.originals, self.aliases, self.relays, strict=True
        ):
            if any(shares_memory(tensor, alias) for _, tensor in _trees.leaves(output)):
                relay.audits[position] = Audit(original, f"{self.path}:input.grad")

    def _refuse_overlap(self, changed: Tensor) -> None:
        """Raise where another argument saw the change, whose alias knows nothing of it."""
        for leaf, tensor in _trees.leaves(self.bound):
            if tensor is not changed and _overlap(tensor, changed):
                raise GradientError(
                    f"`{self.path}:input{format_leaf(leaf)}` shares memory with another argument, "
                    "and one of them was changed in place inside the module: their gradients "
                    "cannot be told apart. Pass a clone() of one of them."
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have an element in common."""
    if one.layout != torch.strided or other.layout != torch.strided:
        return False
    storage = one.untyped_storage()
    if storage.data_ptr() != other.untyped_storage().data_ptr() or not one.numel():
        return False
    if one.element_size() != other.element_size():
        return True
    # Slow and exact: columns of one matrix lie between each other without overlapping.
    marks = torch.zeros(storage.nbytes() // one.element_size(), dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


class Audit:
    """Watch over a tapped tensor that shares memory with one somebody else may use.

    When the alias is changed in place, later uses of the original, or of the base of a view, miss
    that change in their history. So once it was changed, everything in the gradient of the
    original must have come through the tap; anything else is refused.
    """

    __slots__ = (
        "address",
        "is_leaf",
        "is_one_of_several",
        "place",
        "root",
        "through",
        "version",
        "witness",
    )

    def __init__(self, original: Tensor, address: str) -> None:
        self.address = address
        self.through: dict[int, Tensor | None] = {}
        """The gradients that came through the tap, by backward pass."""
        self.version = original._version
        # It shares the version counter and holds no memory.
        self.witness = original.detach()
        self.witness.data = original.new_empty(0)
        root = original
        if original._is_view() and original._base is not None:
            root = original._base
        offset = original.storage_offset() - root.storage_offset()
        self.place = (original.shape, original.stride(), offset)
        self.root = (root.shape, root.stride())
        self.is_leaf = root.is_leaf
        self.is_one_of_several = (
            original._is_view() and creation_meta(original) == CreationMeta.MULTI_OUTPUT_NODE
        )
        """Whether it is a view that torch lets nobody change: of chunk, split or unbind."""
        if root.requires_grad and not root.is_leaf:
            add_tensor_hook(root, self.check)

    @property
    def is_changed(self) -> bool:
        return self.witness._version != self.version

    def pass_through(self, grad: Tensor | None, task: int) -> None:
        """Note what comes through the tap; before the original has its gradient."""
        if self.is_changed:
            if self.is_leaf:
                refuse_leaf()
            self.refuse_change()
            self.through[task] = grad

    def refuse_change(self) -> None:
        """Raise where the alias hid from torch that a view was changed that must not be."""
        if self.is_one_of_several and self.is_changed:
            raise GradientError(
                f"`{self.address}` is one of several views made at once (chunk, split, unbind) "
                "and was changed in place after the module returned it, which torch refuses."
            )

    def check(self, grad: Tensor | None) -> None:
        """Run when the gradient of the original, or of its base, is there."""
        if not self.is_changed or grad is None:
            return
        through = self.through.pop(graph_task_id(), None)
        if not self._is_all(grad.detach(), through):
            raise GradientError(
                f"`{self.address}` is a view or an unchanged input of its module, it was changed "
                "in place after the module returned it, and the tensor it shares memory with is "
                "used elsewhere: its gradient cannot be observed without changing the model's. "
                "Ask for the gradient of the next module's input, or let the module return a new "
                "tensor."
            )

    def _is_all(self, total: Tensor, through: Tensor | None) -> bool:
        if through is not None and through.dtype != total.dtype:
            return False  # a view as another type
        whole = torch.empty_strided(*self.root, dtype=total.dtype, device=total.device)
        part = whole.copy_(total).as_strided(*self.place)
        wanted = torch.zeros_like(part) if through is None else through.detach()
        is_same = (part == wanted) | (part.isnan() & wanted.isnan())
        part.zero_()
        return bool(is_same.all()) and not bool(whole.any())
