"""Healthy models that are hard to compare: low precision, noise for gradients, extreme scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diff_benign import _by_torch, _each
from diff_cases import Side, benign, example, make_reference, override
from diff_examples import _gpt, cross_entropy_to, resnet, shake, tokens
from diff_models import Attention
from diff_networks import ResNet
from torch import nn


class _Cast(nn.Module):
    """Calls a model under autocast, as trainers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args):
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(*args).float()


@example
def gpt_in_autocast() -> Side:
    """A GPT under bfloat16 autocast."""
    side = _gpt()
    return Side(_Cast(side.model), side.inputs, side.loss)


@example
def gpt_in_bfloat16() -> Side:
    """A GPT of bfloat16 weights."""
    side = _gpt()
    loss = side.loss
    return Side(side.model.bfloat16(), side.inputs, lambda out: loss(out.float()))


@example
def saturated() -> Side:
    """A GPT whose attention looks at one place only."""
    side = _gpt()
    with torch.no_grad():
        for block in side.model.blocks:
            block.attn.q.weight *= 30
    return side


@example
def faint() -> Side:
    """A GPT with a loss of a millionth."""
    side = _gpt()
    loss = side.loss
    return Side(side.model, side.inputs, lambda out: 1e-6 * loss(out))


@example
def solved() -> Side:
    """A GPT that is almost right, so that gradients almost vanish."""
    side = _gpt(depth=2)
    model = side.model
    with torch.no_grad():
        targets = model(*side.inputs).argmax(-1)
        model.norm.weight *= 6
    return Side(model, side.inputs, cross_entropy_to(targets))


@example
def loud() -> Side:
    """Convolutions whose images are a thousand times larger."""
    side = resnet()
    return Side(side.model, (1e3 * side.inputs[0],), side.loss)


@example
def deep_perceptron() -> Side:
    """Thirty layers with ReLU and no norm."""
    layers = [layer for _ in range(30) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 5))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return Side(shake(model), (torch.randn(8, 32),), cross_entropy_to(tokens(8, most=5)))


def _halved(self, x):
    (x1, x2), (w1, w2) = x.chunk(2, -1), self.weight.chunk(2, -1)
    y = x1 @ w1.mT + x2 @ w2.mT
    return y if self.bias is None else y + self.bias


def _torch_inside(model: nn.Module) -> nn.Module:
    return _each(model, Attention, attend=_by_torch)


@benign("gpt_in_autocast")
def attention_in_autocast(model):
    """torch's attention under bfloat16 autocast on both sides"""
    return _torch_inside(model)


@benign("gpt_in_bfloat16")
def attention_in_bfloat16(model):
    """torch's attention in bfloat16 on both sides"""
    return _torch_inside(model)


@benign("gpt")
def bfloat16_weights(model):
    """Weights in bfloat16 where the other has float32"""
    loss = make_reference("gpt").loss
    return Side(model.bfloat16(), loss=lambda out: loss(out.float()))


@benign("gpt")
def autocast_inside(model):
    """bfloat16 autocast in the forward of the model, float32 on the other side"""
    base = type(model).forward

    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16):
            return base(self, ids).float()

    return override(model, forward=forward)


@benign("saturated")
def saturated_attention(model):
    """Attention that is almost hard, by torch's function"""
    return _torch_inside(model)


@benign("faint")
def faint_gradients(model):
    """A loss of a millionth, attention by torch's function"""
    return _torch_inside(model)


@benign("solved")
def vanishing_gradients(model):
    """Gradients near zero, products in two halves"""
    return _each(model, nn.Linear, forward=_halved)


@benign("loud")
def loud_images(model):
    """Images a thousand times larger, channels last; biases before norms get only noise"""
    (images,) = make_reference("loud").inputs
    model = model.to(memory_format=torch.channels_last)
    return Side(model, (images.contiguous(memory_format=torch.channels_last),))


@benign("resnet")
def convolutions_by_products(model):
    """Convolutions as products of patches"""

    def forward(self, x):
        patches = F.unfold(x, self.kernel_size, padding=self.padding, stride=self.stride)
        y = self.weight.flatten(1) @ patches
        side = (x.shape[-1] + 2 * self.padding[0] - self.kernel_size[0]) // self.stride[0] + 1
        y = y.unflatten(-1, (side, side))
        return y if self.bias is None else y + self.bias[:, None, None]

    return _each(model, nn.Conv2d, forward=forward)


@benign("resnet")
def batch_norms_by_hand(model: ResNet):
    """Batch norms written out, running statistics too"""

    def forward(self, x):
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        with torch.no_grad():
            count = x.numel() / x.shape[1]
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        y = (x - mean[:, None, None]) * torch.rsqrt(var + self.eps)[:, None, None]
        return y * self.weight[:, None, None] + self.bias[:, None, None]

    return _each(model, nn.BatchNorm2d, forward=forward)


@benign("deep_perceptron")
def deep_products_in_halves(model):
    """Thirty layers, products in two halves"""
    return _each(model, nn.Linear, forward=_halved)


@benign("deep_gpt")
def deep_products_in_blocks(model):
    """24 blocks, products in two halves"""
    return _each(model, nn.Linear, forward=_halved)


@benign("hf_llama")
def llama_by_sdpa(model):
    """Llama's attention by torch's function"""
    model.set_attn_implementation("sdpa")
    return model


@benign("hf_gpt2")
def gpt2_by_sdpa(model):
    """GPT-2's attention by torch's function"""
    model.set_attn_implementation("sdpa")
    return model


@benign("hf_bert")
def bert_by_sdpa(model):
    """BERT's attention by torch's function, with masks"""
    model.set_attn_implementation("sdpa")
    return model


@benign("hf_vit")
def vit_by_sdpa(model):
    """ViT's attention by torch's function; biases of keys get only noise"""
    model.set_attn_implementation("sdpa")
    return model


@benign("hf_llama")
def llama_checkpointed(model):
    """Llama with its own checkpointing"""
    model.gradient_checkpointing_enable()
    return model


@benign("hf_mixtral")
def mixtral_by_products(model):
    """Mixtral's experts by grouped products, where torch has them"""
    model.set_experts_implementation("batched_mm")
    return model
