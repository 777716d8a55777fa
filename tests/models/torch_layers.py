"""Torch's own layers, each with a call: attention, recurrence, convolutions, norms, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny_models import Example, Tagger, make_encoder, make_packed, numbers, squares, tokens
from torch import Tensor, nn


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Example:
    return Example(module.train(), args, kwargs, _sum_of_squares)


def _sum_of_squares(output: Any) -> Tensor:
    """Make a loss of every tensor that has a gradient, however nested."""
    if isinstance(output, Tensor):
        return squares(output) if output.requires_grad else torch.zeros(())
    return sum((_sum_of_squares(one) for one in output), torch.zeros(()))


def _given(*shape: int) -> Tensor:
    return numbers(*shape).requires_grad_()


def _image() -> Tensor:
    return _given(2, 4, 6, 6)


def make_convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(6, 4, 2, stride=2),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.GroupNorm(2, 4),
        nn.Dropout2d(0.2),
        nn.AdaptiveAvgPool2d(2),
        nn.Upsample(scale_factor=2),
        nn.Flatten(),
        nn.LazyLinear(5),
        nn.SiLU(),
        nn.LayerNorm(5),
        nn.RMSNorm(5),
        nn.PReLU(),
        nn.Softmax(dim=-1),
    )


class Losses(nn.Module):
    """Several losses of one prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)
        self.by_class = nn.ModuleList(
            [nn.CrossEntropyLoss(label_smoothing=0.1), nn.MultiMarginLoss()]
        )
        self.by_value = nn.ModuleList(
            [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss()]
        )
        self.nll = nn.NLLLoss()
        self.log = nn.LogSoftmax(dim=-1)
        self.divergence = nn.KLDivLoss(reduction="batchmean")

    def forward(self, x: Tensor, target: Tensor, wanted: Tensor) -> list[Tensor]:
        y = self.head(x)
        losses = [loss(y, target) for loss in self.by_class]
        losses += [loss(y, wanted) for loss in self.by_value]
        logs = self.log(y)
        return [*losses, self.nll(logs, target), self.divergence(logs, wanted)]


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6, padding_idx=3, max_norm=1.0)
        self.bag = nn.EmbeddingBag(40, 6, mode="mean")
        self.similarity = nn.CosineSimilarity(dim=-1)
        self.bilinear = nn.Bilinear(6, 6, 3)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        words, bag = self.words(ids).mean(1), self.bag(ids)
        return self.similarity(words, bag), self.bilinear(words, bag)


class Cells(nn.Module):
    """A recurrence by hand: each cell is visited once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(4, 6), nn.GRUCell(6, 6), nn.RNNCell(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros(2, 6), torch.zeros(2, 6)
        second = third = None
        for step in x:
            h, c = self.lstm(step, (h, c))
            second = self.gru(h, second)
            third = self.rnn(second, third)
        assert third is not None
        return third


TORCH_LAYERS: dict[str, Callable[[], Example]] = {
    "transformer": lambda: _call(
        nn.Transformer(8, 2, 2, 2, dim_feedforward=16, batch_first=True),
        _given(2, 5, 8),
        _given(2, 4, 8),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(4),
        tgt_is_causal=True,
    ),
    "encoder": lambda: _call(make_encoder(), _given(2, 5, 8)),
    "attention": lambda: _call(nn.MultiheadAttention(8, 2, dropout=0.1), *[_given(5, 2, 8)] * 3),
    "cross attention": lambda: _call(
        nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True, batch_first=True),
        _given(2, 5, 8),
        _given(2, 3, 6),
        _given(2, 3, 4),
    ),
    "lstm": lambda: _call(nn.LSTM(4, 6, 2, dropout=0.2), _given(5, 3, 4)),
    "gru": lambda: _call(nn.GRU(4, 6, bidirectional=True, batch_first=True), _given(3, 5, 4)),
    "rnn": lambda: _call(nn.RNN(4, 6, nonlinearity="relu"), _given(5, 4)),
    "packed lstm": lambda: _call(Tagger(nn.LSTM), make_packed()),
    "packed gru": lambda: _call(Tagger(nn.GRU), make_packed()),
    "cells": lambda: _call(Cells(), _given(3, 2, 4)),
    "convolutions": lambda: _call(make_convolutional(), _image()),
    "conv1d": lambda: _call(
        nn.Sequential(nn.Conv1d(4, 6, 3, padding="same"), nn.BatchNorm1d(6), nn.MaxPool1d(2)),
        _given(2, 4, 6),
    ),
    "conv3d": lambda: _call(
        nn.Sequential(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), nn.AvgPool3d(2)), _given(2, 2, 4, 4, 4)
    ),
    "losses": lambda: _call(Losses(), _given(3, 4), torch.tensor([0, 4, 2]), torch.rand(3, 5)),
    "embeddings": lambda: _call(Embeddings(), tokens(2, 7)),
}
