"""Bugs in the forward of transformers that are written out in the bench."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from diff_cases import bug, override, replace_module
from torch import nn


@bug("gpt", "blocks.2.attn")
def attention_scale(model):
    """Scores divided by the size of a head, and not by its root"""
    attn = model.blocks[2].attn
    override(
        attn, weigh=lambda self, q, k, mask: self.hide(q @ k.mT / q.shape[-1], mask).softmax(-1)
    )
    return model


@bug("gpt", "blocks.1.attn")
def mask_off_by_one(model):
    """A causal mask that lets one later place through"""
    model.blocks[1].attn.later = torch.ones(16, 16, dtype=torch.bool).triu(2)
    return model


@bug("gpt", "blocks.3.attn")
def mask_missing(model):
    """No causal mask"""
    override(model.blocks[3].attn, hide=lambda self, scores, mask: scores)
    return model


@bug("gpt", "blocks.2.mlp.act")
def tanh_gelu(model):
    """GELU by tanh"""
    model.blocks[2].mlp.act.approximate = "tanh"
    return model


@bug("gpt", "blocks.1.mlp")
def tanh_gelu_in_a_function(model):
    """GELU by tanh, called as a function where the other has a module"""
    override(
        model.blocks[1].mlp,
        forward=lambda self, x: self.down(F.gelu(self.up(x), approximate="tanh")),
    )
    return model


@bug("gpt", "blocks.0.mlp.act")
def relu_for_gelu(model):
    """Another activation"""
    return replace_module(model, "blocks.0.mlp.act", nn.ReLU())


@bug("gpt", "blocks.2.mlp.down")
def missing_bias(model):
    """A layer without its bias"""
    model.blocks[2].mlp.down.bias = None
    return model


@bug("gpt", "blocks.2.norm2")
def norm_epsilon(model):
    """An epsilon of 1e-6 where 1e-5 is right"""
    model.blocks[2].norm2.eps = 1e-6
    return model


@bug("gpt", "blocks.1.norm1")
def norm_without_affine(model):
    """A norm without weight and bias"""
    return replace_module(model, "blocks.1.norm1", nn.LayerNorm(32, elementwise_affine=False))


@bug("gpt", "blocks.1.attn")
def swapped_heads(model):
    """Heads put together in another order"""
    override(
        model.blocks[1].attn, merge=lambda self, x: x[:, [1, 0, 2, 3]].transpose(1, 2).flatten(2)
    )
    return model


@bug("gpt", "blocks.0.attn")
def heads_split_otherwise(model):
    """Channels given to heads in turns"""
    override(
        model.blocks[0].attn,
        split=lambda self, x: x.unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2),
    )
    return model


@bug("gpt", "blocks.3.attn.q")
def transposed_weight(model):
    """A square weight stored the other way around"""
    q = model.blocks[3].attn.q
    q.weight = nn.Parameter(q.weight.detach().T.contiguous())
    return model


@bug("gpt", "blocks.1.attn.q")
def swapped_weights(model):
    """Weights of queries and keys exchanged when they were loaded"""
    attn = model.blocks[1].attn
    attn.q.weight, attn.k.weight = attn.k.weight, attn.q.weight
    return model


@bug("gpt", "blocks.2.attn")
def swapped_queries_and_keys(model):
    """Scores of keys against queries"""
    override(
        model.blocks[2].attn,
        attend=lambda self, q, k, v, mask: self.weigh(k, q, mask) @ v,
    )
    return model


@bug("gpt", "blocks.0.attn")
def softmax_of_the_wrong_dimension(model):
    """Weights that sum to one over queries"""

    def weigh(self, q, k, mask):
        return self.hide(q @ k.mT / math.sqrt(q.shape[-1]), mask).softmax(-2)

    override(model.blocks[0].attn, weigh=weigh)
    return model


@bug("gpt", "blocks.1.attn")
def clipped_scores(model):
    """Scores kept between -0.5 and 0.5"""

    def weigh(self, q, k, mask):
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).clamp(-0.5, 0.5)
        return self.hide(scores, mask).softmax(-1)

    override(model.blocks[1].attn, weigh=weigh)
    return model


@bug("gpt", "blocks.2.attn")
def cast_in_attention(model):
    """Attention in bfloat16, its result back in float32"""

    def attend(self, q, k, v, mask):
        q, k, v = (x.bfloat16() for x in (q, k, v))
        return (self.weigh(q, k, mask) @ v).float()

    override(model.blocks[2].attn, attend=attend)
    return model


@bug("gpt", "blocks.3.norm2")
def norm_in_half(model):
    """A norm that goes through float16"""

    def forward(self, x):
        return F.layer_norm(x, (32,), self.weight, self.bias, self.eps).half().float()

    override(model.blocks[3].norm2, forward=forward)
    return model


@bug("gpt", "blocks.2.mlp.up")
def weight_through_half(model):
    """A weight that was stored in float16"""
    up = model.blocks[2].mlp.up
    up.weight = nn.Parameter(up.weight.detach().half().float())
    return model


@bug("gpt", "blocks.1.mlp.up")
def one_wrong_element(model):
    """One element of a weight is off by 0.01"""
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[5, 7] += 0.01
    return model


@bug("gpt", "blocks.3.mlp.down")
def weight_not_loaded(model):
    """A layer as it was initialised"""
    model.blocks[3].mlp.down.reset_parameters()
    return model


@bug("gpt", "blocks.1")
def missing_residual(model):
    """A block that does not add its input to the perceptron's output"""

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm1(x)))
        return self.drop(self.mlp(self.norm2(x)))

    override(model.blocks[1], forward=forward)
    return model


@bug("gpt", "blocks.2")
def norm_after_the_branch(model):
    """A norm behind the perceptron, and not before it"""

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.norm2(self.mlp(x)))

    override(model.blocks[2], forward=forward)
    return model


@bug("gpt", "blocks.3")
def parallel_branches(model):
    """Perceptron and attention side by side"""

    def forward(self, x):
        return x + self.drop(self.attn(self.norm1(x))) + self.drop(self.mlp(self.norm2(x)))

    override(model.blocks[3], forward=forward)
    return model


@bug("gpt", "")
def places_off_by_one(model):
    """Places counted from one"""

    def embed(self, ids):
        return self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1]) + 1))

    return override(model, embed=embed)


@bug("gpt", "")
def permuted_batch(model):
    """Two texts exchanged after the second block"""

    def forward(self, ids):
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x[[1, 0, 2, 3]] if number == 2 else x)
        return self.head(self.norm(x))

    return override(model, forward=forward)


@bug("gpt", "")
def skipped_block(model):
    """The third block left out"""

    def forward(self, ids):
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = x if number == 2 else block(x)
        return self.head(self.norm(x))

    return override(model, forward=forward)


@bug("gpt", "")
def missing_last_norm(model):
    """No norm before the head"""

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    return override(model, forward=forward)


@bug("gpt", "")
def scaled_logits(model):
    """Logits made smaller by a hundredth"""
    base = type(model).forward
    return override(model, forward=lambda self, ids: 0.99 * base(self, ids))


@bug("gpt", "blocks.2.mlp")
def hook_left_on(model):
    """A forward hook from an experiment, which steers"""
    model.blocks[2].mlp.register_forward_hook(lambda module, args, output: output + 0.01)
    return model


@bug("gpt_in_eval", "blocks.2.drop")
def dropout_left_on(model):
    """A dropout that stayed in training"""
    model.blocks[2].drop.train()
    return model


@bug("gpt_with_dropout", "blocks.1.drop")
def other_dropout(model):
    """A dropout of 0.2 where 0.1 is right"""
    model.blocks[1].drop.p = 0.2
    return model


@bug("encoder", "")
def padding_ignored(model):
    """Empty places attended to"""
    return override(model, make_mask=lambda self, ids: (ids >= 0)[:, None, None, :])


@bug("encoder", "embeddings.norm")
def tiny_epsilon(model):
    """An epsilon of 1e-5 where 1e-12 is right"""
    model.embeddings.norm.eps = 1e-5
    return model


@bug("encoder", "embeddings")
def segments_ignored(model):
    """All tokens in the first segment"""

    def forward(self, ids, segments):
        places = self.places(torch.arange(ids.shape[1]))
        first = self.segments(torch.zeros_like(segments))
        return self.drop(self.norm(self.words(ids) + places + first))

    override(model.embeddings, forward=forward)
    return model


@bug("encoder", "")
def mean_for_first(model):
    """The mean over places where the first is right"""
    return override(model, pool=lambda self, x: x.mean(1))


@bug("encoder", "layers.1.attention")
def order_in_fused_projection(model):
    """One projection read as keys, queries, values"""
    base = type(model.layers[1].attention).project

    def project(self, x):
        q, k, v = base(self, x)
        return k, q, v

    override(model.layers[1].attention, project=project)
    return model


@bug("encoder", "layers.0.attention")
def scale_of_torch_attention(model):
    """torch's attention told another scale"""

    def attend(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.4)

    override(model.layers[0].attention, attend=attend)
    return model


@bug("encoder", "layers.2")
def norms_first(model):
    """Norms before the branches"""

    def forward(self, x, mask=None):
        x = x + self.drop1(self.attention(self.norm1(x), mask))
        return x + self.drop2(self.ff(self.norm2(x)))

    override(model.layers[2], forward=forward)
    return model


@bug("mixture", "layers.1.attn")
def base_of_turning(model):
    """Rotary embeddings with a base of 500000"""
    attn = model.layers[1].attn
    attn.theta = 5e5
    attn.rates = attn.theta ** -(torch.arange(0, 8, 2) / 8)
    return model


@bug("mixture", "layers.0.attn")
def turning_in_pairs(model):
    """Neighbouring channels turned together, not the two halves"""

    def turn(self, x):
        angles = torch.arange(x.shape[-2])[:, None] * self.rates
        left, right = x[..., ::2], x[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        return torch.stack([left * cos - right * sin, right * cos + left * sin], -1).flatten(-2)

    override(model.layers[0].attn, turn=turn)
    return model


@bug("mixture", "layers.1.moe.router")
def one_expert_for_two(model):
    """One expert chosen where two are right"""
    model.layers[1].moe.router.chosen = 1
    return model


@bug("mixture", "layers.2.moe.router")
def shares_not_normalised(model):
    """Shares of the chosen experts that do not sum to one"""
    override(
        model.layers[2].moe.router,
        forward=lambda self, x: tuple(self.gate(x).softmax(-1).topk(self.chosen, -1)),
    )
    return model


@bug("mixture", "layers.0.moe")
def experts_off_by_one(model):
    """Each token goes to the expert after the one chosen"""
    base = type(model.layers[0].moe).collect
    override(
        model.layers[0].moe,
        collect=lambda self, x, shares, numbers: base(self, x, shares, (numbers + 1) % 4),
    )
    return model


@bug("mixture", "layers.1.moe.router")
def routing_in_bfloat16(model):
    """Choices made of inputs that were rounded"""
    base = type(model.layers[1].moe.router).forward
    override(model.layers[1].moe.router, forward=lambda self, x: base(self, x.bfloat16().float()))
    return model


@bug("mixture", "layers.1.norm2")
def epsilon_of_rms(model):
    """An epsilon of 1e-5 where 1e-6 is right"""
    model.layers[1].norm2.eps = 1e-5
    return model


@bug("mixture", "layers.0.norm1")
def centred_rms(model):
    """A norm that takes the mean away first"""
    base = type(model.layers[0].norm1).forward
    override(
        model.layers[0].norm1,
        forward=lambda self, x: base(self, x - x.mean(-1, keepdim=True)),
    )
    return model
