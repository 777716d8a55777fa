"""Descend: the operation of a module that differs, its line, and what it is called with."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import planted_gpt
import pytest
import torch
from planted_gpt import (
    Gpt,
    WrongRelu,
    detached,
    dropout_on,
    epsilon,
    exchange_forward,
    extra_factor,
    loss_of,
    make_gpt,
    make_words,
    missing_residual,
    softmax_dim,
    tanh_gelu,
    wrong_backward,
    wrong_scale,
)
from torch import Tensor, nn
from torch.nn import functional as F

from hookline.comparisons.calling import StepCall
from hookline.comparisons.descending import Descent, descend
from hookline.comparisons.grafting import make_graft

LINES = inspect.getsource(planted_gpt).splitlines()


def line_of(text: str, number: int = 0) -> str:
    """Give where a line of the model stands."""
    found = [at for at, line in enumerate(LINES, 1) if text in line]
    return f"planted_gpt.py:{found[number]}"


def descend_into(
    a: nn.Module, b: nn.Module, path: str, *, inputs: Any = None, backward: bool = False
) -> Descent | None:
    args = (make_words(),) if inputs is None else inputs
    call = StepCall(args, {}, loss_of if inputs is None else lambda out: out.square().sum())
    graft = make_graft((a, b), (path, path), (call, call), backward=backward)
    error = graft.error("backward" if backward else "forward")
    return descend(graft, backward=backward, limit=2e-5, error=error)


@pytest.mark.parametrize(
    ("plant", "path", "operation", "line", "causes"),
    [
        (
            tanh_gelu,
            "blocks.1.mlp.act",
            "blocks.1.mlp.act/gelu",
            ("self.drop(self.fc2(self.act(self.fc1(x))))", 0),
            ("approximate='none' here, 'tanh' there",),
        ),
        (
            epsilon,
            "blocks.1.ln2",
            "blocks.1.ln2/layer_norm",
            ("return x + self.mlp(self.ln2(x))", 0),
            ("eps=1e-05 here, 1e-06 there",),
        ),
        (
            wrong_scale,
            "blocks.1.attn",
            "blocks.1.attn/mul",
            ("scaled = scores * (1 / math.sqrt(WIDTH // HEADS))", 0),
            ("other=0.353553 here, 0.176777 there",),
        ),
        (
            softmax_dim,
            "blocks.1.attn",
            "blocks.1.attn/softmax",
            ("weights = masked.softmax(-1)", 0),
            ("dim=-1 here, -2 there",),
        ),
        (
            dropout_on,
            "blocks.1.mlp.drop",
            "blocks.1.mlp.drop/dropout",
            ("self.drop(self.fc2(self.act(self.fc1(x))))", 0),
            ("training=False here, True there",),
        ),
    ],
)
def test_descend_names_operation_line_and_arguments(
    plant: Callable[[Gpt], None],
    path: str,
    operation: str,
    line: tuple[str, int],
    causes: tuple[str, ...],
) -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    plant(b)
    found = descend_into(a, b, path)
    assert found is not None
    assert found.operation == operation
    assert found.source.endswith(line_of(*line))
    assert found.causes == causes


def test_descend_names_what_is_missing_in_b() -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    missing_residual(b)
    found = descend_into(a, b, "blocks.1")
    assert found is not None
    assert found.operation == "blocks.1/add[1]"
    assert found.source.endswith(line_of("return x + self.mlp(self.ln2(x))"))
    assert "`add` only in A" in found.causes[0]


def test_descend_names_what_b_has_besides() -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    extra_factor(b)
    found = descend_into(a, b, "blocks.1.mlp")
    assert found is not None
    assert found.operation == "blocks.1.mlp/mul"
    assert found.source_b.endswith(line_of("* 1.01"))
    assert "`mul` only in B" in found.causes[0]


def test_descend_names_the_variable() -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    wrong_scale(b)
    found = descend_into(a, b, "blocks.1.attn")
    assert found is not None
    assert found.variable == "blocks.1.attn@scaled"


def test_descend_in_backward_finds_where_the_gradient_stops() -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    detached(b)
    found = descend_into(a, b, "blocks.1", backward=True)
    assert found is not None
    assert found.operation == "blocks.1/detach"
    assert found.source_b.endswith(line_of("self.ln1(x).detach()"))


def test_descend_in_backward_names_an_autograd_function() -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    wrong_backward(b)
    found = descend_into(a, b, "blocks.1.mlp.act", backward=True)
    assert found is not None
    assert found.operation == "blocks.1.mlp.act/gelu"
    assert found.causes == ("`gelu` here, `WrongRelu` there",)


class Through(nn.Module):
    """A function between two layers and a residual around it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc(x).sin()
        return hidden + self.function(hidden).cos()


def test_descend_in_backward_finds_one_of_several_that_take_a_value() -> None:
    """The gradient of a value is a sum: of those that take it, the one written otherwise."""
    a, b = Through(F.gelu), Through(WrongRelu.apply)
    b.load_state_dict(a.state_dict())
    found = descend_into(a, b, "", inputs=(torch.randn(5, 6),), backward=True)
    assert found is not None
    assert found.operation == "/gelu"
    assert found.causes == ("`gelu` here, `WrongRelu` there",)


class Fused(nn.Module):
    """Attention by torch's fused operation."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale).tanh()


class Plain(nn.Module):
    """The same in pieces."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
        return (weights @ v).tanh()


def test_descend_names_the_operation_that_is_written_in_pieces_there() -> None:
    qkv = tuple(torch.randn(2, 4, 6, 8) for _ in range(3))
    found = descend_into(Fused(0.5), Plain(), "", inputs=qkv)
    assert found is not None
    assert found.operation == "/scaled_dot_product_attention"


def test_descend_finds_nothing_where_pieces_come_to_the_same() -> None:
    qkv = tuple(torch.randn(2, 4, 6, 8) for _ in range(3))
    call = StepCall(qkv)
    graft = make_graft((Fused(), Plain()), ("", ""), (call, call))
    assert graft.error("forward") < 1e-6


def test_descend_sees_what_is_changed_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.mul_(self.value)
            y[0] = 0.0
            return y.relu()

    x = torch.randn(4, 3)
    found = descend_into(InPlace(1.5), InPlace(2.5), "", inputs=(x,))
    assert found is not None
    assert found.operation == "/mul_"
    assert found.causes == ("other=1.5 here, 2.5 there",)


def test_descend_blames_no_child_that_was_given_another_value() -> None:
    """The child comes first among what differs, but what it was given differs already."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x * 1.01))
        return x + self.mlp(self.ln2(x))

    a = make_gpt()
    b = copy.deepcopy(a)
    exchange_forward(b.blocks[1], forward)
    found = descend_into(a, b, "blocks.1")
    assert found is not None
    assert found.operation == "blocks.1/mul"
