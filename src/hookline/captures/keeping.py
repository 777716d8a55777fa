"""How a tensor is kept: aliased or copied, whole or in part, where, as what, within a budget."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hookline._errors import OutOfBudget, UnsupportedModel
from hookline._torch import is_capturing_cuda_graph, is_functorch_active, unwrap_functorch
from hookline.addresses import is_inside, parse_port
from hookline.captures.spreading import gather
from hookline.captures.transfers import Transfer, Transfers, can_travel

Clone = bool | Literal["auto"]
Reduce = str | Callable[[Tensor], Tensor] | None

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda t: _as_float(t).mean(),
    "std": lambda t: _as_float(t).std(correction=0),
    "norm": lambda t: torch.linalg.vector_norm(_as_float(t)),
    "absmax": lambda t: t.abs().amax(),
    "min": lambda t: t.amin(),
    "max": lambda t: t.amax(),
    "sum": lambda t: t.sum(),
}


def _as_float(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()


# Modules whose value was once found overwritten: from then on it is copied when it is captured.
_overwritten: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def remember_overwritten(module: nn.Module | None, port: str) -> None:
    """Have the value at this port copied from now on."""
    if module is not None:
        _overwritten.setdefault(module, set()).add(port)


def has_overwritten() -> bool:
    """Tell whether any captured value was overwritten before it was read."""
    return bool(_overwritten)


def was_overwritten(module: nn.Module, port: str) -> bool:
    """Tell whether a value captured here was overwritten before it was read."""
    known = _overwritten.get(module, ())
    if not known or not is_inside(port):
        return port in known
    # `@h[1]` was overwritten, and `@h` or `@*` is asked for.
    asked = parse_port(port)
    found = [parse_port(other) for other in known if is_inside(other)]
    return any(
        one.mark == asked.mark and one.is_input == asked.is_input and asked.matches(one.name)
        for one in found
    )


class Kept:
    """One tensor as it was kept, with the version it had."""

    __slots__ = ("__weakref__", "is_in_graph", "is_read", "tensor", "transfer", "version")

    def __init__(
        self, tensor: Tensor, is_in_graph: bool = False, transfer: Transfer | None = None
    ) -> None:
        self.tensor = tensor
        """What is kept; not to be looked into while it is on its way from a device."""
        self.version = tensor._version
        self.is_in_graph = is_in_graph
        self.transfer = transfer
        """What brings it to the host; None when it is there."""
        self.is_read = False
        """Whether somebody was given the tensor."""

    def arrive(self) -> Tensor:
        """Give the tensor once it is there, to be looked into."""
        transfer = self.transfer
        if transfer is not None:
            transfer.wait()
            self.transfer = None
        return self.tensor

    @property
    def is_overwritten(self) -> bool:
        return self.tensor._version != self.version


@dataclass(slots=True)
class Keeper:
    """Keep tensors as the options of a capture say."""

    keep_graph: bool = False
    clone: Clone = "auto"
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    select: Any = None
    reduce: Reduce = None
    max_bytes: int | None = None
    full: bool = False
    _held: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)
    """What counts against `max_bytes`, as long as somebody holds it."""
    _change: Callable[[Tensor], Tensor] | None = None
    """Select and reduce in one step; None when values are kept whole."""
    _transfers: Transfers | None = None
    """What brings values from a device to the host, where that was asked for."""

    def __post_init__(self) -> None:
        reduce = self.reduce
        if isinstance(reduce, str):
            if reduce not in _REDUCTIONS:
                raise ValueError(
                    f"reduce={reduce!r} is unknown; give a function of a tensor, or one of "
                    f"{', '.join(_REDUCTIONS)}"
                )
            reduce = _REDUCTIONS[reduce]
        select = self.select
        if self.clone not in (True, False, "auto"):
            raise ValueError(f"clone={self.clone!r} must be True, False or 'auto'")
        # A copy that autograd knows of has to be one of torch's own.
        if self.is_for_host and not self.keep_graph:
            self._transfers = Transfers()
        if select is None and reduce is None:
            return
        steps: list[Callable[[Tensor], Tensor]] = []
        if select is not None:
            steps.append(select if callable(select) else lambda tensor: tensor[select])
        if reduce is not None:
            steps.append(reduce)

        def change(tensor: Tensor) -> Tensor:
            for step in steps:
                tensor = step(tensor)
            return tensor

        self._change = change

    def copies(self, has_inplace: bool) -> bool:
        """Tell whether every value is copied in a model that has in-place modules or not."""
        return self.clone is True or (self.clone == "auto" and has_inplace and not self.keep_graph)

    @property
    def is_for_host(self) -> bool:
        """Whether values are to lie in the host's memory."""
        return self.device is not None and torch.device(self.device).type == "cpu"

    def rest(self) -> None:
        """Give back what was only needed while values came in."""
        if self._transfers is not None:
            self._transfers.rest()

    @property
    def is_plain(self) -> bool:
        """Whether tensors are kept as they are, detached."""
        return (
            self._change is None
            and self.device is None
            and self.dtype is None
            and self.max_bytes is None
            and not self.full
            and not self.keep_graph
        )

    def keep(
        self, tensor: Tensor, where: Callable[[], str], *, copy: bool, alias: bool = True
    ) -> Kept:
        """Keep one tensor; `copy` says that its memory may be written to later.

        `where` gives the tensor's address, which only an error needs. `alias=False` keeps the very
        object, which has no graph.
        """
        if tensor.is_cuda and is_capturing_cuda_graph(tensor):
            raise UnsupportedModel(
                f"`{where()}` runs while a CUDA graph is recorded: a replay would overwrite what "
                "is captured. Capture outside torch.cuda.graph, or copy into a buffer of yours."
            )
        value = tensor if self.keep_graph or not alias else tensor.detach()
        if is_functorch_active():
            value = unwrap_functorch(value)
        shares_memory = True
        transfer = None
        whole = gather(value, is_full=self.full, keep_graph=self.keep_graph)
        if whole is not value:
            value, shares_memory = whole, False
        if self._change is not None:
            value, shares_memory = self._reduced(value, where)
        if self.max_bytes is not None:
            self._spend(value, where)
        if self._transfers is not None and can_travel(value):
            value, transfer = self._transfers.bring(value, self.dtype)
            shares_memory = False
        elif self.device is not None or self.dtype is not None:
            # Parameters that are loaded for each call have no data in between.
            device = None if value.is_meta else self.device
            moved = value.to(device=device, dtype=self.dtype)
            shares_memory = shares_memory and moved is value
            value = moved
        is_copied = shares_memory and copy
        if value.is_inference() or (is_copied and torch.is_inference_mode_enabled()):
            with torch.inference_mode(False):
                value = value.clone()
        elif is_copied:
            value = value.clone()
        if self.max_bytes is not None:
            self._held.append((weakref.ref(value), value.numel() * value.element_size()))
        return Kept(value, self.keep_graph, transfer)

    def _reduced(self, value: Tensor, where: Callable[[], str]) -> tuple[Tensor, bool]:
        assert self._change is not None
        with torch.set_grad_enabled(self.keep_graph and torch.is_grad_enabled()):
            try:
                new = self._change(value)
            except Exception as error:
                error.add_note(f"in select/reduce of a capture at `{where()}`")
                raise
            if not isinstance(new, Tensor):
                raise TypeError(
                    f"select/reduce at `{where()}` gave {type(new).__qualname__}, not a tensor"
                )
            whole = new is value or (
                new.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
            )
            if whole and new.numel() < value.numel():
                new, whole = new.clone(), False  # a slice would keep all of its storage alive
        return new, whole

    def _spend(self, value: Tensor, where: Callable[[], str]) -> None:
        size = value.numel() * (self.dtype or value.dtype).itemsize
        assert self.max_bytes is not None
        self._held = [one for one in self._held if one[0]() is not None]
        used = sum(held for _, held in self._held)
        if used + size > self.max_bytes:
            raise OutOfBudget(
                f"capturing `{where()}` ({size:,} bytes) would pass max_bytes={self.max_bytes:,} "
                f"({used:,} held). Name fewer sites, keep less of each with select= or "
                "reduce=, use last=True, or call got.clear() between calls."
            )
