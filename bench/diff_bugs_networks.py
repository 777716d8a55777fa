"""Bugs in the forward of convolutions, recurrences, mixers, and an encoder with a decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diff_cases import Side, bug, override, replace_module
from torch import nn


@bug("translator", "decoder.1")
def attention_to_itself(model):
    """A decoder that looks at itself where it should look at the encoder"""

    def forward(self, x, memory, bias):
        x = x + self.attn(self.norm1(x), mask=bias)
        y = self.norm2(x)
        x = x + self.cross(y, y)
        return x + self.ff(self.norm3(x))

    override(model.decoder[1], forward=forward)
    return model


@bug("translator", "bias_in")
def distances_backwards(model):
    """Distances with the wrong sign"""

    def forward(self, length):
        place = torch.arange(length)
        distance = (place[:, None] - place[None]).clamp(-self.most, self.most) + self.most
        return self.table(distance).permute(2, 0, 1)[None]

    override(model.bias_in, forward=forward)
    return model


@bug("translator", "")
def unscaled_logits(model):
    """A shared table without its factor before the head"""
    return override(model, score=lambda self, x: self.head(x))


@bug("translator", "decoder.0.attn")
def decoder_sees_later(model):
    """A decoder without a causal mask"""
    model.decoder[0].attn.later = None
    return model


@bug("translator", "encoder.1.attn")
def bias_ignored(model):
    """Attention that leaves the bias out"""
    override(
        model.encoder[1].attn,
        weigh=lambda self, q, k, mask: self.hide(q @ k.mT, None).softmax(-1),
    )
    return model


@bug("resnet", "stages.1.conv1")
def other_padding(model):
    """A border of mirrored pixels where zeros are right"""
    conv = model.stages[1].conv1
    other = nn.Conv2d(12, 24, 3, stride=2, padding=1, padding_mode="reflect")
    other.load_state_dict(conv.state_dict())
    return replace_module(model, "stages.1.conv1", other)


@bug("resnet", "pool")
def largest_for_mean(model):
    """The largest pixel where the mean is right"""
    return replace_module(model, "pool", nn.AdaptiveMaxPool2d(1))


@bug("resnet", "stages.1.bn1")
def norm_in_eval(model):
    """A batch norm that uses its running statistics in training"""
    model.stages[1].bn1.eval()
    return model


@bug("resnet", "stages.0.bn2")
def epsilon_of_batch_norm(model):
    """An epsilon of 1e-3 where 1e-5 is right"""
    model.stages[0].bn2.eps = 1e-3
    return model


@bug("resnet", "stages.1")
def missing_relu(model):
    """A block without its last ReLU"""

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return y + self.shortcut(x)

    override(model.stages[1], forward=forward)
    return model


@bug("resnet", "stages.1.shortcut.1")
def shortcut_without_norm(model):
    """A way around without its norm"""
    model.stages[1].shortcut[1] = nn.Identity()
    return model


@bug("resnet", "stages.2.conv2")
def flipped_kernel(model):
    """A convolution in the sense of the mathematicians"""
    conv = model.stages[2].conv2
    conv.weight = nn.Parameter(conv.weight.detach().flip(-1, -2))
    return model


@bug("resnet", "")
def colours_reversed(model):
    """Blue, green, red"""
    base = type(model).forward
    return override(model, forward=lambda self, x: base(self, x.flip(1)))


@bug("resnet", "", direction="input")
def other_images(model):
    """Images that were scaled by another standard deviation"""
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    return Side(model, (images,))


@bug("resnet_in_eval", "stages.2.bn2")
def stale_statistics(model):
    """Running statistics of an older checkpoint"""
    model.stages[2].bn2.running_var *= 1.1
    return model


@bug("cells", "cell")
def gates_in_another_order(model):
    """Gates of a cell read as input, cell, forget, output"""

    def forward(self, x, hidden, cell):
        i, g, f, o = (self.wide(x) + self.deep(hidden)).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell

    override(model.cell, forward=forward)
    return model


@bug("cells", "")
def other_first_state(model):
    """A first state of ones"""
    return override(model, start=lambda self, x: x.new_ones(x.shape[0], self.width))


@bug("lstm", "rnn")
def gates_of_weights(model):
    """Weights of an LSTM from a library with another order of gates"""
    with torch.no_grad():
        for name in ("weight_ih_l1", "weight_hh_l1", "bias_ih_l1", "bias_hh_l1"):
            i, f, g, o = getattr(model.rnn, name).clone().chunk(4)
            getattr(model.rnn, name).copy_(torch.cat([i, g, f, o]))
    return model


@bug("lstm", "")
def read_backwards(model):
    """Texts read from their end"""
    base = type(model).read
    return override(model, read=lambda self, x: base(self, x.flip(1)))


@bug("gru", "rnn")
def bias_of_gru(model):
    """One of the two biases of a GRU's new gate lost"""
    with torch.no_grad():
        model.rnn.bias_hh_l0[32:] = 0
    return model


@bug("gru", "")
def directions_exchanged(model):
    """States of the way back before those of the way there"""

    def read(self, x):
        states, _ = self.rnn(x)
        there, back = states.chunk(2, -1)
        return torch.cat([back, there], -1)

    return override(model, read=read)


@bug("mixer", "")
def patches_by_columns(model):
    """Patches counted by columns"""

    def forward(self, x):
        x = self.blocks(self.patches(x).mT.flatten(2).mT)
        return self.head(self.norm(x).mean(1))

    return override(model, forward=forward)


@bug("mixer", "")
def mean_before_norm(model):
    """The mean taken before the norm, so that shapes differ too"""

    def forward(self, x):
        x = self.blocks(self.patches(x).flatten(2).mT)
        return self.head(self.norm(x.mean(1)))

    return override(model, forward=forward)


@bug("mixer", "blocks.1")
def norm_of_the_wrong_branch(model):
    """The second norm used twice"""

    def forward(self, x):
        x = x + self.across(self.norm2(x).mT).mT
        return x + self.along(self.norm2(x))

    override(model.blocks[1], forward=forward)
    return model


@bug("unet", "ups.0.larger")
def corners_aligned(model):
    """An image made larger with its corners aligned"""
    model.ups[0].larger.align_corners = True
    return model


@bug("unet", "ups.1")
def joined_the_other_way(model):
    """The image from the way down put last"""

    def forward(self, x, skip, time):
        return self.convs(torch.cat([self.larger(x), skip], 1), time)

    override(model.ups[1], forward=forward)
    return model


@bug("unet", "downs.1.norm1")
def other_groups(model):
    """A norm of two groups where four are right"""
    model.downs[1].norm1.num_groups = 2
    return model


@bug("unet", "middle")
def time_after_activation(model):
    """The time added before the activation"""

    def forward(self, x, time):
        x = self.act(self.norm1(self.conv1(x)) + self.time(time)[:, :, None, None])
        return self.act(self.norm2(self.conv2(x)))

    override(model.middle, forward=forward)
    return model


@bug("unet", "")
def waves_exchanged(model):
    """Cosines of the time before its sines"""

    def tell(self, times):
        sines, cosines = type(self).__mro__[1].tell(self, times).chunk(2, -1)
        return torch.cat([cosines, sines], -1)

    return override(model, tell=tell)


@bug("unet", "pool")
def sum_for_mean(model):
    """Images made smaller by another count of pixels"""
    override(model.pool, forward=lambda self, x: F.avg_pool2d(x, 2) * 1.001)
    return model
