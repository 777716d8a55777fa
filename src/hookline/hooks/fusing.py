"""When torch runs a transformer layer as one fused kernel, which hooks on it switch off."""

from __future__ import annotations

import torch
from torch import nn


def may_fuse(layer: nn.TransformerEncoderLayer) -> bool:
    """Tell whether torch would fuse this layer but for hookline's hooks.

    These are the conditions of `TransformerEncoderLayer.forward` in torch 2.11 to 2.15, without
    those that depend on the call: its input, its masks, autocast and grad mode.
    """
    try:
        return _fits(layer)
    except AttributeError:  # a part was swapped for something that torch's forward cannot use
        return False


def _fits(layer: nn.TransformerEncoderLayer) -> bool:
    attention = layer.self_attn
    if (
        type(layer).forward is not nn.TransformerEncoderLayer.forward
        or not torch.backends.mha.get_fastpath_enabled()
        or layer.training
        or not attention.batch_first
        or attention.in_proj_bias is None
        or not attention._qkv_same_embed_dim
        or not layer.activation_relu_or_gelu
        or layer.norm1.eps != layer.norm2.eps
        or attention.num_heads % 2 == 1
        or any(_has_other_hooks(module) for module in layer.modules())
    ):
        return False
    owners = (attention, attention.out_proj, layer.norm1, layer.norm2, layer.linear1, layer.linear2)
    # Not by attribute: reading a parametrized weight would compute it.
    tensors = [one for owner in owners for one in owner._parameters.values() if one is not None]
    if torch.overrides.has_torch_function(tuple(tensors)):
        return False
    own_backend = torch.utils.backend_registration._privateuse1_backend_name
    return all(tensor.device.type in ("cpu", "cuda", "xpu", own_backend) for tensor in tensors)


def _has_other_hooks(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not type(hook).__module__.startswith("hookline.") for hook in hooks)
