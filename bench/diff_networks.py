"""Small networks of other kinds: convolutions, recurrences, mixers, an encoder with a decoder."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from diff_models import VOCABULARY, Attention, Perceptron, RMSNorm
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms, around which the input goes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.bn1, self.relu = nn.BatchNorm2d(outputs), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Add the way around."""
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A classifier of images."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.pool1 = nn.MaxPool2d(3, stride=2, padding=1)
        self.stages = nn.Sequential(
            ResidualBlock(width, width),
            ResidualBlock(width, 2 * width, stride=2),
            ResidualBlock(2 * width, 2 * width),
        )
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits of the classes."""
        x = self.pool1(F.relu(self.bn(self.conv(x))))
        return self.fc(self.pool(self.stages(x)).flatten(1))


class Cell(nn.Module):
    """One step of an LSTM, written out."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.wide, self.deep = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Give the next hidden state and cell."""
        i, f, g, o = (self.wide(x) + self.deep(hidden)).chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell


class CellTagger(nn.Module):
    """Tags tokens by a cell that is called for each of them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.words, self.width = nn.Embedding(VOCABULARY, width), width
        self.cell, self.head = Cell(width, width), nn.Linear(width, 6)

    def start(self, x: Tensor) -> Tensor:
        """Give the first state."""
        return x.new_zeros(x.shape[0], self.width)

    def forward(self, ids: Tensor) -> Tensor:
        """Give the logits of the tags."""
        x = self.words(ids)
        hidden = cell = self.start(x)
        states = []
        for place in range(ids.shape[1]):
            hidden, cell = self.cell(x[:, place], hidden, cell)
            states.append(hidden)
        return self.head(torch.stack(states, 1))


class Tagger(nn.Module):
    """Tags tokens by torch's recurrent layers, in both directions."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.rnn = kind(width, width, num_layers=2, bidirectional=True, batch_first=True)
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 6)

    def read(self, x: Tensor) -> Tensor:
        """Give the states of all places."""
        states, _ = self.rnn(x)
        return states

    def forward(self, ids: Tensor) -> Tensor:
        """Give the logits of the tags."""
        return self.head(self.norm(self.read(self.words(ids))))


class MixerBlock(nn.Module):
    """Mixes places, then channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.across = nn.LayerNorm(width), Perceptron(places, 32)
        self.norm2, self.along = nn.LayerNorm(width), Perceptron(width, 48)

    def forward(self, x: Tensor) -> Tensor:
        """Add both."""
        x = x + self.across(self.norm1(x).mT).mT
        return x + self.along(self.norm2(x))


class Mixer(nn.Module):
    """A classifier of images without attention or large convolutions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(MixerBlock(9, width) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits of the classes."""
        x = self.blocks(self.patches(x).flatten(2).mT)
        return self.head(self.norm(x).mean(1))


class Double(nn.Module):
    """Two convolutions with group norms, moved by a time."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
        )
        self.time = nn.Linear(16, outputs)
        self.conv2, self.norm2 = (
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
        )
        self.act = nn.SiLU()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Convolve, add the time, convolve."""
        x = self.act(self.norm1(self.conv1(x))) + self.time(time)[:, :, None, None]
        return self.act(self.norm2(self.conv2(x)))


class Up(nn.Module):
    """Makes an image larger and joins it with one from the way down."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.larger = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.convs = Double(inputs, outputs)

    def forward(self, x: Tensor, skip: Tensor, time: Tensor) -> Tensor:
        """Join, the image from the way down first."""
        return self.convs(torch.cat([skip, self.larger(x)], 1), time)


class UNet(nn.Module):
    """Foresees the noise of an image at a time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.downs = nn.ModuleList([Double(3, width), Double(width, 2 * width)])
        self.pool, self.middle = nn.AvgPool2d(2), Double(2 * width, 4 * width)
        self.ups = nn.ModuleList([Up(6 * width, 2 * width), Up(3 * width, width)])
        self.last = nn.Conv2d(width, 3, 1)

    def tell(self, times: Tensor) -> Tensor:
        """Give waves of the times."""
        waves = times[:, None] * torch.exp(-math.log(1e3) * torch.arange(8) / 8)
        return torch.cat([waves.sin(), waves.cos()], -1)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """Go down, and up again."""
        time, skips = self.tell(times), []
        for down in self.downs:
            skips.append(down(x, time))
            x = self.pool(skips[-1])
        x = self.middle(x, time)
        for up in self.ups:
            x = up(x, skips.pop(), time)
        return self.last(x)


class DistanceBias(nn.Module):
    """A bias of attention by the distance of two places."""

    def __init__(self, heads: int = 4, most: int = 6) -> None:
        super().__init__()
        self.table, self.most = nn.Embedding(2 * most + 1, heads), most

    def forward(self, length: int) -> Tensor:
        """Give the bias of each head, [1, head, place, place]."""
        place = torch.arange(length)
        distance = (place[None] - place[:, None]).clamp(-self.most, self.most) + self.most
        return self.table(distance).permute(2, 0, 1)[None]


class BiasedAttention(Attention):
    """Attention with a bias, which the scores are not divided for, as T5 does."""

    def weigh(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Make the weights of the values; the mask is the bias."""
        scores = self.hide(q @ k.mT, None)
        return (scores if mask is None else scores + mask).softmax(-1)


class EncoderLayer(nn.Module):
    """A layer of the encoder."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.attn = RMSNorm(width), BiasedAttention(width)
        self.norm2, self.ff = RMSNorm(width), Perceptron(width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Add attention, then the perceptron."""
        x = x + self.attn(self.norm1(x), mask=bias)
        return x + self.ff(self.norm2(x))


class DecoderLayer(nn.Module):
    """A layer of the decoder, which also looks at what was encoded."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.attn = RMSNorm(width), BiasedAttention(width, is_causal=True)
        self.norm2, self.cross = RMSNorm(width), BiasedAttention(width)
        self.norm3, self.ff = RMSNorm(width), Perceptron(width)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        """Add attention, attention to the memory, and the perceptron."""
        x = x + self.attn(self.norm1(x), mask=bias)
        x = x + self.cross(self.norm2(x), memory)
        return x + self.ff(self.norm3(x))


class Translator(nn.Module):
    """An encoder and a decoder with one table of tokens, as T5 has."""

    def __init__(self, depth: int = 2, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.width = nn.Embedding(VOCABULARY, width), width
        self.bias_in, self.bias_out = DistanceBias(), DistanceBias()
        self.encoder = nn.ModuleList(EncoderLayer(width) for _ in range(depth))
        self.decoder = nn.ModuleList(DecoderLayer(width) for _ in range(depth))
        self.norm_in, self.norm_out = RMSNorm(width), RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight)
        self.head.weight = self.tokens.weight

    def score(self, x: Tensor) -> Tensor:
        """Give the logits, made smaller because the table is shared."""
        return self.head(x * self.width**-0.5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Give the logits of the next tokens of the target."""
        x, bias = self.tokens(source), self.bias_in(source.shape[1])
        for layer in self.encoder:
            x = layer(x, bias)
        memory, x = self.norm_in(x), self.tokens(target)
        bias = self.bias_out(target.shape[1])
        for layer in self.decoder:
            x = layer(x, memory, bias)
        return self.score(self.norm_out(x))
