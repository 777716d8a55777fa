"""Bugs that were written after the judge was: other places, precisions and wrappings."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from diff_cases import Side, bug, example, make_reference, override, replace_module
from diff_examples import _gpt, cross_entropy_to, shake, tokens
from diff_models import VOCABULARY
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class _TorchEncoder(nn.Module):
    """torch's own encoder, whose attention has no modules inside that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Tensor:
        """Classify by the mean."""
        return self.head(self.encoder(self.words(ids)).mean(1))


@example
def torch_encoder() -> Side:
    """torch's TransformerEncoder."""
    return Side(shake(_TorchEncoder()), (tokens(4, 8),), cross_entropy_to(tokens(4, most=5)))


@example
def autoencoder() -> Side:
    """A sequence of convolutions, made small and large again."""
    model = nn.Sequential(
        OrderedDict(
            down=nn.Sequential(
                nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ELU()
            ),
            middle=nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8), nn.ELU()
            ),
            up=nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
        )
    )
    images = torch.rand(4, 3, 12, 12)
    return Side(shake(model), (images,), lambda out: F.mse_loss(out, images))


@example
def gpt_in_float64() -> Side:
    """A GPT in float64."""
    side = _gpt(depth=2)
    return Side(side.model.double(), side.inputs, side.loss)


@example
def gpt_without_loss() -> Side:
    """A GPT of which only the forward is compared."""
    side = _gpt()
    side.model.eval()
    return Side(side.model, side.inputs)


@bug("torch_encoder", "encoder.layers.1")
def torch_norm_first(model):
    """torch's layer told to put norms first"""
    model.encoder.layers[1].norm_first = True
    return model


@bug("torch_encoder", "encoder.layers.2.self_attn")
def torch_attention_weights(model):
    """Queries and keys of torch's attention exchanged"""
    with torch.no_grad():
        weight = model.encoder.layers[2].self_attn.in_proj_weight
        weight.copy_(torch.cat([weight[32:64], weight[:32], weight[64:]]))
    return model


@bug("torch_encoder", "encoder.layers.0.self_attn")
def torch_attention_heads(model):
    """torch's attention with two heads"""
    attention = model.encoder.layers[0].self_attn
    attention.num_heads, attention.head_dim = 2, 16
    return model


@bug("torch_encoder", "encoder.layers.1")
def torch_activation(model):
    """torch's layer with GELU"""
    model.encoder.layers[1].activation = F.gelu
    return model


@bug("autoencoder", "middle.1")
def order_in_a_sequence(model):
    """The activation before the norm"""
    middle = model.middle
    model.middle = nn.Sequential(middle[0], middle[2], middle[1])
    return model


@bug("autoencoder", "middle.0")
def dilation(model):
    """A convolution with holes"""
    conv = model.middle[0]
    conv.dilation, conv.padding, conv._reversed_padding_repeated_twice = (2, 2), (2, 2), [2] * 4
    return model


@bug("autoencoder", "up")
def kernel_of_transposed(model):
    """A transposed convolution whose kernel was loaded the other way around"""
    model.up.weight = nn.Parameter(model.up.weight.detach().flip(-1))
    return model


@bug("autoencoder", "down.2")
def alpha_of_elu(model):
    """ELU with another alpha"""
    model.down[2].alpha = 1.01
    return model


@bug("autoencoder", "down.1")
def nan_in_a_weight(model):
    """One weight that is not a number"""
    with torch.no_grad():
        model.down[1].weight[3] = torch.nan
    return model


@bug("gpt", "blocks.1.norm2")
def epsilon_in_the_code(model):
    """An epsilon of 1e-4 written into the forward, where no setting shows it"""
    override(
        model.blocks[1].norm2,
        forward=lambda self, x: F.layer_norm(x, (32,), self.weight, self.bias, 1e-4),
    )
    return model


@bug("gpt", "blocks.2.mlp")
def hook_before(model):
    """A hook that changes what a module is given"""
    model.blocks[2].mlp.register_forward_pre_hook(lambda module, args: (1.01 * args[0],))
    return model


@bug("gpt", "")
def scaled_tokens(model):
    """Tokens made larger by the root of the width"""

    def embed(self, ids):
        places = self.places(torch.arange(ids.shape[1]))
        return self.drop(self.tokens(ids) * math.sqrt(32) + places)

    return override(model, embed=embed)


@bug("gpt", "")
def block_twice(model):
    """The second block run twice"""

    def forward(self, ids):
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x = block(x)
        return self.head(self.norm(x))

    return override(model, forward=forward)


@bug("gpt", "blocks.1")
def changed_in_place(model):
    """A residual that is changed in place before it is used again"""

    def forward(self, x):
        y = self.attn(self.norm1(x))
        x = x.clone()
        z = x
        x += y
        return z + y + self.mlp(self.norm2(x))

    override(model.blocks[1], forward=forward)
    return model


@bug("gpt", "blocks.2.attn")
def other_heads(model):
    """Two heads where four are right"""
    model.blocks[2].attn.heads = 2
    return model


class _LowRank(nn.Module):
    """A layer with a correction of low rank beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the correction."""
        return self.layer(x) + 0.1 * self.up(self.down(x))


@bug("gpt", "blocks.1.attn.v")
def adapter_left_on(model):
    """A layer with an adapter that should have been taken off"""
    return replace_module(model, "blocks.1.attn.v", _LowRank(model.blocks[1].attn.v))


@bug("gpt", "blocks.3.mlp.up")
def quantised_weight(model):
    """A weight that went through eight bits"""
    up = model.blocks[3].mlp.up
    scale = up.weight.detach().abs().max() / 127
    up.weight = nn.Parameter((up.weight.detach() / scale).round() * scale)
    return model


@bug("gpt", "blocks.0.attn")
def inverted_mask(model):
    """A mask that hides what came earlier"""

    def hide(self, scores, mask):
        size = scores.shape[-1]
        return scores.masked_fill(self.later[:size, :size].mT, -torch.inf)

    override(model.blocks[0].attn, hide=hide)
    return model


@bug("gpt", "blocks.2.attn")
def dropout_as_function(model):
    """A dropout in attention that is always on"""
    override(
        model.blocks[2].attn,
        attend=lambda self, q, k, v, mask: F.dropout(self.weigh(q, k, mask), 0.1) @ v,
    )
    return model


@bug("gpt_with_dropout", "drop")
def all_in_eval(model):
    """A model in eval where training is right"""
    return model.eval()


@bug("gpt", "blocks.2.mlp.act")
def wrapped_with_a_bug(model):
    """GELU by tanh in a model that is wrapped"""
    model.blocks[2].mlp.act.approximate = "tanh"
    return nn.DataParallel(model)


@bug("gpt", "blocks.1")
def checkpointed_with_a_bug(model):
    """A block without a residual, checkpointed"""

    def body(self, x):
        return self.mlp(self.norm2(x + self.attn(self.norm1(x))))

    override(
        model.blocks[1],
        forward=lambda self, x: checkpoint(lambda y: body(self, y), x, use_reentrant=False),
    )
    return model


@bug("gpt_in_bfloat16", "blocks.2.attn")
def scale_in_bfloat16(model):
    """Another scale, where everything is bfloat16"""

    def weigh(self, q, k, mask):
        return self.hide(q @ k.mT, mask).softmax(-1)

    override(model.blocks[2].attn, weigh=weigh)
    return model


@bug("gpt_in_bfloat16", "blocks.1")
def residual_in_bfloat16(model):
    """A missing residual, where everything is bfloat16"""
    override(
        model.blocks[1],
        forward=lambda self, x: self.mlp(self.norm2(x + self.attn(self.norm1(x)))),
    )
    return model


@bug("gpt_in_autocast", "module.blocks.2")
def residual_in_autocast(model):
    """A missing residual under autocast"""
    override(
        model.module.blocks[2],
        forward=lambda self, x: self.mlp(self.norm2(x + self.attn(self.norm1(x)))),
    )
    return model


@bug("gpt_in_float64", "blocks.1.norm1")
def tiny_in_float64(model):
    """A difference of 1e-9 in float64"""
    base = type(model.blocks[1].norm1).forward
    override(model.blocks[1].norm1, forward=lambda self, x: base(self, x) * (1 + 1e-6))
    return model


@bug("gpt_without_loss", "blocks.2.mlp.down")
def bias_without_loss(model):
    """A bias lost, where only the forward is compared"""
    model.blocks[2].mlp.down.bias = None
    return model


@bug("cells", "cell")
def bug_of_later_visits(model):
    """A cell that forgets half as soon as there is something to remember"""
    base = type(model.cell).forward

    def forward(self, x, hidden, cell):
        return base(self, x, hidden, cell * (0.5 if hidden.any() else 1.0))

    override(model.cell, forward=forward)
    return model


@bug("mixture", "layers.1.moe.experts.2.act")
def one_expert_otherwise(model):
    """One expert with another activation"""
    return replace_module(model, "layers.1.moe.experts.2.act", nn.SiLU())


@bug("translator", "")
def places_of_the_decoder(model):
    """The decoder given the encoder's bias"""

    def forward(self, source, target):
        x, bias = self.tokens(source), self.bias_in(source.shape[1])
        for layer in self.encoder:
            x = layer(x, bias)
        memory, x = self.norm_in(x), self.tokens(target)
        bias = self.bias_in(target.shape[1])
        for layer in self.decoder:
            x = layer(x, memory, bias)
        return self.score(self.norm_out(x))

    return override(model, forward=forward)


@bug("unet", "")
def skips_moved(model):
    """Skips that are one pixel off"""

    def forward(self, x, times):
        time, skips = self.tell(times), []
        for down in self.downs:
            skips.append(down(x, time))
            x = self.pool(skips[-1])
        x = self.middle(x, time)
        for up in self.ups:
            x = up(x, skips.pop().roll(1, -1), time)
        return self.last(x)

    return override(model, forward=forward)


@bug("gpt", "blocks.0.attn.q", direction="backward")
def gradient_of_a_projection(model):
    """A projection that sends half of its gradient back"""

    def forward(self, x):
        half = 0.5 * x
        return F.linear(half + half.detach(), self.weight, self.bias)

    override(model.blocks[0].attn.q, forward=forward)
    return model


@bug("gpt", "blocks.2.norm2", direction="parameter gradient")
def bias_detached(model):
    """A norm whose bias gets no gradient"""

    def forward(self, x):
        return F.layer_norm(x, (32,), self.weight, self.bias.detach(), self.eps)

    override(model.blocks[2].norm2, forward=forward)
    return model


@bug("encoder", "layers.1.ff.up", direction="parameter gradient")
def gradient_of_a_weight_rounded(model):
    """The gradient of one weight rounded to bfloat16"""
    model.layers[1].ff.up.weight.register_hook(lambda grad: grad.bfloat16().float())
    return model


@bug("unet", "ups.0", direction="backward")
def skip_detached(model):
    """A skip detached where it is joined"""

    def forward(self, x, skip, time):
        return self.convs(torch.cat([skip.detach(), self.larger(x)], 1), time)

    override(model.ups[0], forward=forward)
    return model


@bug("resnet", "stages.0", direction="backward")
def shortcut_detached(model):
    """A way around without a gradient"""

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x).detach())

    override(model.stages[0], forward=forward)
    return model


@bug("gpt_with_sgd", "", direction="update")
def twice_the_rate(model):
    """All updates twice as large"""
    make = make_reference("gpt_with_sgd").optimizer
    return Side(model, optimizer=lambda parameters: make(parameters, lr=0.2))
