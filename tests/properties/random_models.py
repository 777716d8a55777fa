"""Random models: a grammar of specifications, what they build, and how Hypothesis draws them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from random_modules import (
    PACKINGS,
    SIZE,
    AddInplace,
    Checkpoint,
    Chunk,
    Containers,
    Cut,
    MulInplace,
    Named,
    Partly,
    Residual,
    Scale,
    Shared,
    Slice,
    SliceInplace,
    Tied,
    Transpose,
    UseAside,
    UseWeights,
    View,
)
from torch import Tensor, nn


class Spec(NamedTuple):
    """What to build: a kind, its parts, and a number that chooses a variant."""

    kind: str
    parts: tuple[Spec, ...] = ()
    variant: int = 0


def _frozen(part: nn.Module) -> nn.Module:
    return part.requires_grad_(False)


_SINGLE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(SIZE, SIZE),
    "norm": lambda: nn.LayerNorm(SIZE),
    "batchnorm": lambda: nn.BatchNorm1d(SIZE),
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "relu inplace": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.3),
    "dropout inplace": lambda: nn.Dropout(0.3, inplace=True),
    "identity": nn.Identity,
    "scale": Scale,
    "weights": UseWeights,
    "add inplace": AddInplace,
    "mul inplace": MulInplace,
    "slice inplace": SliceInplace,
    "transpose": Transpose,
    "view": View,
    "slice": Slice,
    "chunk": lambda: Chunk(inplace=False),
    "chunk inplace": lambda: Chunk(inplace=True),
    "off": lambda: nn.Dropout(0.3).eval(),
}

_AROUND: dict[str, tuple[int, Callable[[nn.Module, int], nn.Module]]] = {
    "residual": (2, lambda part, variant: Residual(part, inplace=variant == 1)),
    "shared": (2, lambda part, variant: Shared(part, 2 + variant)),
    "repeated": (1, lambda part, variant: nn.Sequential(part, nn.Tanh(), part)),
    "tied": (1, lambda part, variant: Tied(part)),
    "containers": (len(PACKINGS), Containers),
    "named": (1, lambda part, variant: Named(part)),
    "cut": (3, Cut),
    "frozen": (1, lambda part, variant: _frozen(part)),
    "checkpoint": (2, lambda part, variant: Checkpoint(part, use_reentrant=variant == 1)),
    "aside": (1, lambda part, variant: UseAside(part)),
    "partly": (1, lambda part, variant: Partly(part)),
}


class Root(nn.Module):
    """Run the body on the input, or on a fresh value, and return a tensor or a container."""

    def __init__(self, body: nn.Module, variant: int) -> None:
        super().__init__()
        self.body = body
        self.is_fresh = variant % 3 != 0
        self.packing = (variant // 3) if variant // 3 < len(PACKINGS) else None

    def forward(self, x: Tensor, *, gain: Tensor | None = None) -> Any:
        y = self.body(x * 1.0 if self.is_fresh else x)
        if gain is not None:
            y = y * gain
        return y if self.packing is None else PACKINGS[self.packing](y, x.sigmoid())


def _build_part(spec: Spec) -> nn.Module:
    if spec.kind in _SINGLE:
        return _SINGLE[spec.kind]()
    parts = [_build_part(part) for part in spec.parts]
    if spec.kind == "sequential":
        return nn.Sequential(*parts)
    return _AROUND[spec.kind][1](parts[0], spec.variant)


def build(spec: Spec, *, checkpoints: bool = True) -> Root:
    """Build the model of a specification: always the same weights, in double precision."""
    torch.manual_seed(0)
    model = Root(_build_part(spec.parts[0]), spec.variant).double()
    for module in model.modules():
        if isinstance(module, Checkpoint):
            module.is_on = checkpoints
    return model


def _extend(smaller: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    around = [
        st.builds(Spec, st.just(kind), st.tuples(smaller), st.integers(0, variants - 1))
        for kind, (variants, _) in _AROUND.items()
    ]
    several = st.lists(smaller, min_size=2, max_size=4).map(tuple)
    return st.one_of(st.builds(Spec, st.just("sequential"), several, st.just(0)), *around)


def models() -> st.SearchStrategy[Spec]:
    """Draw specifications of whole models."""
    common = ["linear", "tanh", "norm", "scale", "gelu", "dropout", "batchnorm"]
    single = st.sampled_from([Spec(kind) for kind in [*common, *_SINGLE, *common]])
    part = st.recursive(single, _extend, max_leaves=4)
    several = st.lists(part, min_size=2, max_size=4).map(tuple)
    body = st.builds(Spec, st.just("sequential"), several, st.just(0))
    variants = st.integers(0, 3 * (len(PACKINGS) + 3) - 1)
    return st.builds(Spec, st.just("root"), st.tuples(body), variants)
