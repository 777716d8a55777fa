"""Other ways to capture, for comparison: baukit's, written again here; nnsight, TransformerLens.

The packages are imported only when asked for: nnsight changes torch for the whole process.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import models
import torch
from timing import Variant
from torch import Tensor, nn


class TraceDict(OrderedDict[str, Any]):
    """Do what baukit's class of this name does: find each layer by a walk, one hook each."""

    def __init__(
        self, model: nn.Module, layers: list[str], edit: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self.handles = []
        for layer in layers:
            module = next(one for name, one in model.named_modules() if name == layer)
            self.handles.append(module.register_forward_hook(self._make_hook(layer, edit)))

    def _make_hook(self, layer: str, edit: Callable[..., Any] | None) -> Callable[..., Any]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            if edit is not None:
                given = {"output": output, "layer": layer}
                known = inspect.getfullargspec(edit).args
                output = edit(**{name: value for name, value in given.items() if name in known})
            self[layer] = _copy(output)
            return output

        return hook

    def __enter__(self) -> TraceDict:
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self.handles:
            handle.remove()


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return type(value)({key: _copy(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)([_copy(item) for item in value])
    return value


def capture_variants(model: models.GPT, tokens: Tensor) -> tuple[list[Variant], list[str]]:
    """Make the variants of the peers that can be imported, and a line for each that cannot."""
    return _make_variants(
        [("nnsight", _nnsight), ("transformer_lens", _transformer_lens)], model, tokens
    )


def _make_variants(
    makers: list[tuple[str, Callable[[models.GPT, Tensor], list[Variant]]]],
    model: models.GPT,
    tokens: Tensor,
) -> tuple[list[Variant], list[str]]:
    variants: list[Variant] = []
    skipped = []
    for package, make in makers:
        if importlib.util.find_spec(package) is None:
            skipped.append(f"{package} is not installed here: left out.")
            continue
        try:
            variants += make(copy.deepcopy(model), tokens)
        except Exception as error:  # a peer that fails is reported, not measured
            skipped.append(f"{package} failed and is left out: {type(error).__name__}: {error}")
    return variants, skipped


def _nnsight(model: models.GPT, tokens: Tensor) -> list[Variant]:
    import nnsight

    wrapped = nnsight.NNsight(model)

    def trace() -> list[Tensor]:
        with wrapped.trace(tokens):
            saved = nnsight.save([block.output for block in wrapped.h])
        return saved

    def trace_one() -> Tensor:
        with wrapped.trace(tokens):
            saved = wrapped.h[3].output.save()
        return saved

    expected: list[Tensor] = []
    handles = [block.register_forward_hook(lambda *a: expected.append(a[2])) for block in model.h]
    model(tokens)
    for handle in handles:
        handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(trace(), expected, strict=True))
    return [
        Variant("nnsight, 12 saved", trace),
        Variant("nnsight, 1 saved", trace_one),
        Variant("nnsight, wrapped and idle", lambda: model(tokens)),
    ]


def _transformer_lens(model: models.GPT, tokens: Tensor) -> list[Variant]:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    lens = HookedTransformer(
        HookedTransformerConfig(
            n_layers=models.BLOCKS,
            d_model=models.WIDTH,
            n_ctx=models.LENGTH,
            d_head=models.WIDTH // models.HEADS,
            n_heads=models.HEADS,
            d_vocab=models.VOCABULARY,
            act_fn="gelu",
            device="cpu",
        )
    )
    base = "TransformerLens, its own plain"
    return [
        Variant(base, lambda: lens(tokens), base=base),
        Variant(
            "TransformerLens, 12 cached",
            lambda: lens.run_with_cache(
                tokens, names_filter=lambda name: name.endswith("hook_resid_post")
            ),
            base=base,
        ),
    ]


def inside_variants(model: models.GPT, tokens: Tensor) -> tuple[list[Variant], list[str]]:
    """Make the variants of the peers that reach inside a forward."""
    return _make_variants([("nnsight", _nnsight_source), ("torchlens", _torchlens)], model, tokens)


def _nnsight_source(model: models.GPT, tokens: Tensor) -> list[Variant]:
    import nnsight

    wrapped = nnsight.NNsight(model)

    def trace_one() -> Tensor:
        with wrapped.trace(tokens):
            saved = wrapped.h[3].attn.source.softmax_0.output.save()
        return saved

    def trace() -> list[Tensor]:
        with wrapped.trace(tokens):
            saved = nnsight.save([block.attn.source.softmax_0.output for block in wrapped.h])
        return saved

    assert torch.equal(trace()[3], trace_one())
    return [
        Variant("nnsight .source, 1 operation", trace_one),
        Variant("nnsight .source, 12 layers' operation", trace),
    ]


def _torchlens(model: models.GPT, tokens: Tensor) -> list[Variant]:
    import torchlens

    softmax = torchlens.func("softmax")
    torchlens.record(model, tokens, save=softmax)
    return [
        Variant(
            "torchlens record, 12 softmax", lambda: torchlens.record(model, tokens, save=softmax)
        ),
        Variant("torchlens trace, everything", lambda: torchlens.trace(model, tokens)),
    ]
