"""Changes of the way something is computed, which a comparison has to call the same."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from diff_cases import Side, benign, make_reference, override, replace_module
from diff_models import GPT, Attention, Encoder, FusedAttention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint


def _by_torch(self, q, k, v, mask):
    """Attend by torch's function, in any order that it likes."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=self.later is not None)


def _by_hand(self, q, k, v, mask):
    """Attend step by step, with the scale on the queries."""
    scores = (q / math.sqrt(q.shape[-1])) @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def _each(model: nn.Module, kind: type[nn.Module], **methods) -> nn.Module:
    """Give all modules of a class other methods."""
    for module in list(model.modules()):
        if type(module) is kind:
            override(module, **methods)
    return model


@benign("gpt")
def torch_attention(model):
    """torch's attention where the other is written out"""
    return _each(model, Attention, attend=_by_torch)


@benign("encoder")
def attention_by_hand(model):
    """Attention written out where the other is torch's"""
    return _each(model, FusedAttention, attend=_by_hand)


@benign("encoder")
def math_attention(model):
    """torch's attention by its plain kernel"""
    base = FusedAttention.attend

    def attend(self, q, k, v, mask):
        with sdpa_kernel(SDPBackend.MATH):
            return base(self, q, k, v, mask)

    return _each(model, FusedAttention, attend=attend)


@benign("deep_gpt")
def torch_attention_in_a_deep_model(model):
    """The same over 24 blocks"""
    return _each(model, Attention, attend=_by_torch)


@benign("gpt")
def attention_by_einsum(model):
    """Products written by einsum"""

    def attend(self, q, k, v, mask):
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
        weights = self.hide(scores, mask).softmax(-1)
        return torch.einsum("bhij,bhjd->bhid", weights, v)

    return _each(model, Attention, attend=attend)


@benign("gpt")
def attention_head_by_head(model):
    """One head after the other"""
    base = Attention.attend

    def attend(self, q, k, v, mask):
        parts = zip(q.split(1, 1), k.split(1, 1), v.split(1, 1), strict=True)
        return torch.cat([base(self, *part, mask) for part in parts], 1)

    return _each(model, Attention, attend=attend)


@benign("gpt")
def softmax_in_float64(model):
    """Attention that is more precise inside"""
    base = Attention.attend

    def attend(self, q, k, v, mask):
        return base(self, q.double(), k.double(), v.double(), mask).float()

    return _each(model, Attention, attend=attend)


@benign("gpt")
def split_linears(model):
    """Products summed in two halves"""

    def forward(self, x: Tensor) -> Tensor:
        (x1, x2), (w1, w2) = x.chunk(2, -1), self.weight.chunk(2, -1)
        y = x1 @ w1.mT + x2 @ w2.mT
        return y if self.bias is None else y + self.bias

    return _each(model, nn.Linear, forward=forward)


@benign("gpt")
def product_and_bias(model):
    """A product, and then the bias"""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.mT
        return y if self.bias is None else y + self.bias

    return _each(model, nn.Linear, forward=forward)


@benign("mixer")
def linears_as_convolutions(model):
    """Linear layers as convolutions of one place"""

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv1d(x.mT if x.dim() == 3 else x[..., None], self.weight[..., None], self.bias)
        return y.mT if x.dim() == 3 else y[..., 0]

    return _each(model, nn.Linear, forward=forward)


@benign("gpt")
def norms_by_hand(model):
    """Layer norms in other steps"""

    def forward(self, x: Tensor) -> Tensor:
        mean, square = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(square - mean**2 + self.eps) * self.weight + self.bias

    return _each(model, nn.LayerNorm, forward=forward)


@benign("gpt")
def batch_in_halves(model):
    """Blocks that take half of the batch at a time"""

    def attend(self, q, k, v, mask):
        halves = zip(q.chunk(2), k.chunk(2), v.chunk(2), strict=True)
        return torch.cat([Attention.attend(self, *half, mask) for half in halves])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(half, self.weight, self.bias) for half in x.chunk(2)])

    return _each(_each(model, Attention, attend=attend), nn.Linear, forward=forward)


class _Halves(nn.Module):
    """Calls a model for each half of the batch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self.module(half) for half in ids.chunk(2)])


@benign("gpt")
def model_in_halves(model):
    """The whole model called for each half of the batch"""
    return _Halves(model)


class _Threads(nn.Module):
    """Calls a model with two threads."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            return self.module(*args)
        finally:
            torch.set_num_threads(threads)


@benign("resnet")
def two_threads(model):
    """Two threads where the other has one"""
    return _Threads(model)


@benign("gpt")
def against_float64(model):
    """The same in float64"""
    return model.double()


@benign("resnet")
def images_against_float64(model):
    """Convolutions in float64"""
    (images,) = make_reference("resnet").inputs
    return Side(model.double(), (images.double(),))


@benign("gpt_with_dropout")
def checkpointed(model):
    """Blocks computed again for the backward"""
    base = type(model.blocks[0]).forward
    for block in model.blocks:
        override(
            block,
            forward=lambda self, x: checkpoint(lambda y: base(self, y), x, use_reentrant=False),
        )
    return model


@benign("gpt")
def checkpointed_from_outside(model):
    """Blocks checkpointed where they are called, the reentrant way"""

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))

    return override(model, forward=forward)


@benign("gpt_with_sgd")
def compiled(model):
    """Compiled, as far as the graph"""
    return torch.compile(model, backend="aot_eager")


@benign("resnet")
def channels_last(model):
    """Channels last in memory"""
    (images,) = make_reference("resnet").inputs
    model = model.to(memory_format=torch.channels_last)
    return Side(model, (images.contiguous(memory_format=torch.channels_last),))


@benign("gpt")
def contiguous_copies(model):
    """Copies of what would be views"""
    base = Attention.split
    return _each(model, Attention, split=lambda self, x: base(self, x).contiguous())


@benign("resnet")
def in_place_relu(model):
    """ReLU in place"""
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = True
    return model


@benign("resnet")
def wrapped_as_parallel(model):
    """Wrapped as DataParallel wraps"""
    return nn.DataParallel(model)


@benign("gpt_with_dropout")
def dropout_of_the_same_seed(model):
    """The same model with dropout again"""
    return model


class _Renamed(nn.Module):
    """The GPT with other names of the outer parts."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.wte, self.wpe, self.h = model.tokens, model.places, model.blocks
        self.ln_f, self.lm_head = model.norm, model.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@benign("gpt")
def renamed(model):
    """Other names, and a dropout of nothing left out"""
    return _Renamed(model)


class _SplitAttention(nn.Module):
    """Attention with three projections that were one."""

    def __init__(self, fused: FusedAttention) -> None:
        super().__init__()
        self.heads = fused.heads
        width = fused.out.in_features
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.out = fused.out
        parts = (self.q_proj, self.k_proj, self.v_proj)
        for number, part in enumerate(parts):
            rows = slice(number * width, (number + 1) * width)
            part.weight = nn.Parameter(fused.qkv.weight.detach()[rows].clone())
            part.bias = nn.Parameter(fused.qkv.bias.detach()[rows].clone())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


@benign("encoder")
def projections_apart(model: Encoder):
    """Three projections where the other has one"""
    for layer in model.layers:
        layer.attention = _SplitAttention(layer.attention)
    return model


@benign("gpt")
def branches_in_another_order(model):
    """Values projected before keys, keys before queries"""

    def forward(self, x, memory=None, mask=None):
        memory = x if memory is None else memory
        v, k, q = self.v(memory), self.k(memory), self.q(x)
        mixed = self.attend(self.split(q), self.split(k), self.split(v), mask)
        return self.out(self.merge(mixed))

    return _each(model, Attention, forward=forward)


@benign("gpt")
def activation_as_function(model):
    """GELU as a function where the other has a module"""
    for block in model.blocks:
        override(block.mlp, forward=lambda self, x: self.down(F.gelu(self.up(x))))
    return model


@benign("mixture")
def places_from_one(model):
    """Rotary embeddings that count from one, which changes no score"""

    def turn(self, x):
        angles = (torch.arange(x.shape[-2]) + 1)[:, None] * self.rates
        left, right = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    return _each(model, type(model.layers[0].attn), turn=turn)


@benign("lstm")
def lstm_by_hand(model):
    """An LSTM written out"""

    def run(self, x, layer, end):
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        w, u, b, c = (getattr(self, f"{name}_l{layer}{end}") for name in names)
        hidden = cell = x.new_zeros(x.shape[0], self.hidden_size)
        states = []
        for place in range(x.shape[1]):
            i, f, g, o = (F.linear(x[:, place], w, b) + F.linear(hidden, u, c)).chunk(4, -1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            states.append(hidden)
        return torch.stack(states, 1), hidden, cell

    def forward(self, x):
        lasts = []
        for layer in range(2):
            there = run(self, x, layer, "")
            back = run(self, x.flip(1), layer, "_reverse")
            lasts += [there[1:], back[1:]]
            x = torch.cat([there[0], back[0].flip(1)], -1)
        hidden, cell = (torch.stack(states) for states in zip(*lasts, strict=True))
        return x, (hidden, cell)

    override(model.rnn, forward=forward)
    return model


@benign("gpt_with_adamw")
def optimizer_by_loops(model):
    """AdamW parameter by parameter"""
    make = make_reference("gpt_with_adamw").optimizer
    return Side(model, optimizer=lambda parameters: make(parameters, foreach=False))


@benign("gpt_with_adamw")
def torch_attention_with_adamw(model):
    """An update of gradients that differ in their last bits"""
    return _each(model, Attention, attend=_by_torch)


@benign("gpt_with_sgd")
def parameters_in_another_order(model):
    """An optimizer that was given two groups of the same settings"""
    make = make_reference("gpt_with_sgd").optimizer

    def two(parameters):
        listed = list(parameters)
        return make([{"params": listed[1::2]}, {"params": listed[::2]}])

    return Side(model, optimizer=two)


@benign("mixture")
def unused_parameter(model):
    """A module more, which nothing calls"""
    return replace_module(model, "spare", nn.Linear(3, 3))
