"""From any tensor to plain numbers that can be measured: what it holds, in memory as it is.

Views, complex, sparse, nested, quantized and distributed tensors all come out as one plain strided
tensor of real numbers, copied only where there is no other way. What holds no numbers that could
be measured is named in an error. Knows no statistics.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hookline._errors import UnsupportedTensor

PLAIN = frozenset({Tensor, nn.Parameter})
"""Classes of tensors that hold their numbers themselves."""

_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
_FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NEAR_MAXIMUM = 8.0
_FLOAT4_LIMITS = (1.0, 6.0 / _NEAR_MAXIMUM)
_NO_LIMITS = (0.0, math.inf)
SHORTEST_RUN = 16
"""Runs of fewer elements are gathered slower than copied, on a CPU."""

# float32 and float64 hold these exactly, so nothing of them is lost by converting.
_EXACT_IN_FLOAT32 = {
    dtype
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "uint16",
    )
    if (dtype := getattr(torch, name, None)) is not None
}
_MEASURABLE = {
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.uint32,
    torch.uint64,
    *_EXACT_IN_FLOAT32,
}
_disabled_dispatch: Any = torch._C._disabled_torch_dispatch_impl


@dataclass(frozen=True, slots=True)
class Prepared:
    """The numbers of a tensor as one plain strided tensor."""

    values: Tensor
    """Real numbers; dense in memory, unless `run` says otherwise."""
    limits: tuple[float, float]
    """Tiny and huge: the smallest normal number and an eighth of the largest, of its own dtype."""
    repeats: int = 1
    """How many times each number stands in the tensor (an expanded one holds them once)."""
    zeros: int = 0
    """How many zeros a sparse tensor has besides."""
    positions: Tensor | None = None
    """Where in the tensor the numbers stand, if a sparse one was asked for in order."""
    run: tuple[int, int] | None = None
    """Numbers that lie side by side, and from one such run to the next; None: all do."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let operations run unseen: no graph, no function modes, no dispatch modes."""
    with (
        # First, because a function mode would see the next one too.
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
        torch._C._DisableTorchDispatch(),
    ):
        yield


@dataclass(frozen=True, slots=True)
class Layout:
    """How the elements of a tensor lie in memory."""

    is_dense: bool
    """Whether they fill a stretch of memory, in whatever order."""
    run: tuple[int, int] | None
    """Else: how many lie side by side, and from one such run to the next, if that says it all."""
    repeated: tuple[int, ...]
    """Dimensions along which the tensor repeats itself, the last first; all else is without."""
    repeats: int
    """How many times each element stands there."""


@lru_cache(maxsize=4096)
def find_layout(shape: tuple[int, ...], strides: tuple[int, ...], ordered: bool) -> Layout:
    """Find how elements lie, in logical order if `ordered` and else in that of memory."""
    dims = list(zip(shape, strides, strict=True))
    repeated: list[int] = []
    if not ordered:
        repeated = [dim for dim, (size, step) in enumerate(dims) if size > 1 and step == 0]
    repeats = math.prod(shape[dim] for dim in repeated)
    # From the innermost dimension outwards.
    kept = [dims[dim] for dim in reversed(range(len(dims))) if dim not in repeated]
    kept = [(size, step) for size, step in kept if size != 1]
    if not ordered:
        kept.sort(key=lambda dim: dim[1])
    inner, outer, spacing = 1, 1, 0
    is_regular = True
    for size, step in kept:
        if outer == 1 and step == inner:
            inner *= size
        elif outer == 1:
            outer, spacing = size, step
        elif step == spacing * outer:
            outer *= size
        else:
            is_regular = False
    is_dense = is_regular and outer == 1
    run = (inner, spacing) if is_regular and outer > 1 else None
    return Layout(is_dense, run, tuple(reversed(repeated)), repeats)


def prepare(tensor: Tensor, *, ordered: bool = False, shortest_run: int = 0) -> Prepared:
    """Give the numbers of a tensor, in logical order if `ordered` and else as they lie in memory.

    With `shortest_run`, runs of that many numbers come out as they lie instead of as a copy.
    """
    with torch._C.DisableTorchFunction():
        plain = _unwrap(tensor)
    with undisturbed():
        own = plain.dtype
        plain = _to_real(plain.detach())
        limits = _FLOAT4_LIMITS if own is _FLOAT4 else limits_of(plain.dtype)
        if plain.layout is not torch.strided:
            return _prepare_sparse(plain, limits, ordered=ordered)
        _check_memory(plain)
        found = find_layout(plain.shape, plain.stride(), ordered)
        for dim in found.repeated:
            plain = plain.select(dim, 0)
        is_kept = found.run is not None and 0 < shortest_run <= found.run[0]
        if not found.is_dense and not is_kept:
            plain = plain.contiguous()
        return Prepared(plain, limits, found.repeats, run=found.run if is_kept else None)


def prepare_update(
    before: Tensor, after: Tensor, grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Give a parameter before and after, and its gradient, as numbers in one order and dtype."""
    given = [before, after] if grad is None else [before, after, grad]
    with torch._C.DisableTorchFunction():
        if any(tensor.shape != before.shape for tensor in given):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
            raise ValueError(
                f"A parameter before, after and its gradient differ in shape: {shapes}."
            )
        given = [_unwrap(tensor) for tensor in given]
    with undisturbed():
        whole = [x if x.layout is torch.strided else x.detach().to_dense() for x in given]
        numbers = [widen(prepare(tensor, ordered=True).values) for tensor in whole]
        if len({tensor.dtype for tensor in numbers}) > 1:
            numbers = [tensor.to(torch.float64) for tensor in numbers]
    return numbers[0], numbers[1], None if grad is None else numbers[2]


def flatten(values: Tensor) -> Tensor:
    """Give dense numbers as a vector, in the order of memory and without a copy."""
    return values.as_strided((values.numel(),), (1,))


def widen(values: Tensor) -> Tensor:
    """Give numbers in a dtype that arithmetic knows, each with its own value.

    Integers beyond 2**53 are rounded to float64, as they are wherever they are measured.
    """
    if values.dtype in _EXACT_IN_FLOAT32:
        return values.to(torch.float32)
    if values.dtype in (torch.uint32, torch.uint64):
        return values.to(torch.float64)
    return values


def _unwrap(tensor: Tensor) -> Tensor:
    """Give the plain tensor inside a distributed, nested or harmless subclass."""
    while type(tensor) not in PLAIN:
        inner = _inside(tensor)
        if inner is None:
            raise UnsupportedTensor(
                f"A `{type(tensor).__name__}` holds no numbers that hookline can read. Measure "
                "the plain tensors it is made of, or leave this site out."
            )
        tensor = inner
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise UnsupportedTensor(
            "A tensor inside `torch.func` (vmap, grad, jvp) stands for many values or for none "
            "yet. Measure what the transformed function returns."
        )
    if tensor.is_meta:
        raise UnsupportedTensor(
            "A tensor on the meta device has a shape and no values. Measure a model that is "
            "materialized: `model.to_empty(device=...)` and its initialization."
        )
    return tensor


def _inside(tensor: Tensor) -> Tensor | None:
    """Give what a subclass wraps; None for one that is not understood."""
    wrapper: Any = tensor
    inner: Tensor
    if _is_a(tensor, "torch.distributed.tensor", "DTensor"):
        inner = wrapper._local_tensor
        return inner
    if _is_a(tensor, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
        inner = wrapper.wait()
        return inner
    if _is_a(tensor, "torch.nested._internal.nested_tensor", "NestedTensor"):
        if wrapper._lengths is not None:
            # Between its rows such a tensor has elements that are not part of it.
            return torch.cat([part.detach().reshape(-1) for part in tensor.unbind()])
        inner = wrapper._values
        return inner
    is_lazy = nn.parameter.is_lazy(tensor)
    if type(tensor).__torch_dispatch__ is _disabled_dispatch and not is_lazy:
        # A subclass that only renames or annotates: its numbers are its own.
        with torch._C.DisableTorchFunction():
            return tensor.detach().as_subclass(Tensor)
    return None


def _is_a(tensor: Tensor, module: str, name: str) -> bool:
    """Tell whether a tensor is of a class that only matters once its module is imported."""
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(tensor, found)


def _to_real(tensor: Tensor) -> Tensor:
    """Give the numbers of one tensor as real numbers of a dtype that can be measured."""
    if tensor.is_nested:
        return torch.cat([_to_real(part.reshape(-1)) for part in tensor.unbind()])
    if tensor.is_mkldnn:
        return tensor.to_dense()
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.dtype is _FLOAT4:
        packed = tensor.view(torch.uint8).flatten()
        table = [*_FLOAT4_VALUES, *(-value for value in _FLOAT4_VALUES)]
        nibbles = torch.stack([packed & 15, packed >> 4], dim=1)
        return torch.tensor(table, device=tensor.device)[nibbles.flatten().long()]
    if tensor.is_complex():
        if tensor.layout is not torch.strided:
            raise UnsupportedTensor(
                f"A sparse tensor of {tensor.dtype} is not measured. Measure its values: "
                "`tensor.coalesce().values()`."
            )
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in _MEASURABLE:
        raise UnsupportedTensor(
            f"A tensor of {tensor.dtype} is not measured: torch does not compute with it. "
            "Unpack it first, for example to torch.int8."
        )
    return tensor.resolve_neg()


@cache
def limits_of(dtype: torch.dtype) -> tuple[float, float]:
    """Give the smallest normal number of a dtype and an eighth of its largest."""
    if not dtype.is_floating_point:
        return _NO_LIMITS
    info = torch.finfo(dtype)
    return info.tiny, info.max / _NEAR_MAXIMUM


def _check_memory(tensor: Tensor) -> None:
    """Refuse a tensor whose memory was given back, as sharding does between uses."""
    if not tensor.numel():
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < end:
        raise UnsupportedTensor(
            f"The memory of this tensor of shape {tuple(tensor.shape)} was freed (a sharded "
            "parameter between its uses). Measure it while the module that owns it runs."
        )


def _prepare_sparse(tensor: Tensor, limits: tuple[float, float], *, ordered: bool) -> Prepared:
    """Give the numbers of a sparse tensor, the zeros it leaves out, and where its numbers are."""
    if tensor.layout is not torch.sparse_coo:
        tensor = tensor.to_sparse_coo()
    tensor = tensor.coalesce()
    values = tensor.values().contiguous()
    zeros = tensor.numel() - values.numel()
    if not ordered:
        return Prepared(values, limits, zeros=zeros)
    shape = tensor.shape[: tensor.sparse_dim()]
    tail = math.prod(tensor.shape[tensor.sparse_dim() :])
    rows = torch.zeros(values.shape[0], dtype=torch.int64, device=tensor.device)
    for indices, size in zip(tensor.indices(), shape, strict=True):
        rows = rows * size + indices
    within = torch.arange(tail, device=tensor.device)
    positions = (rows[:, None] * tail + within).flatten()
    return Prepared(values, limits, zeros=zeros, positions=positions)
