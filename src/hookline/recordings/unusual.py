"""Tensors that cannot be measured as they are, and models that have nothing to measure."""

from __future__ import annotations

from torch import Tensor, nn

from hookline._errors import UnsupportedModel


def find_obstacle(tensor: Tensor) -> str | None:
    """Say why a tensor cannot be measured; None where it can."""
    if tensor.is_meta:
        return "it is on the meta device, and has no values"
    if tensor.is_nested:
        return "it is a nested tensor"
    if tensor.is_quantized:
        return "it is a quantized tensor"
    return None


def to_plain(tensor: Tensor) -> Tensor:
    """Give the values of a view that stands for others: a conjugate, a negative."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def refuse_meta(model: nn.Module) -> None:
    """Raise for a model whose weights have no values, unless somebody loads them as it runs."""
    weights = list(model.parameters())
    is_loaded = any(hasattr(one, "_hf_hook") for one in model.modules())
    if weights and all(one.is_meta for one in weights) and not is_loaded:
        raise UnsupportedModel(
            f"the parameters of `{type(model).__name__}` are on the meta device: they have shapes "
            'and no values. Give it memory with `model.to_empty(device="cpu")`, and weights.'
        )
