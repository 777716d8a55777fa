"""Ablate one attention head by address: the same bits as a model whose code was edited by hand."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from model_runs import Run, assert_no_trace, assert_same_run, step
from tiny_models import Example, numbers, squares
from tiny_transformers import TRANSFORMERS
from torch import Tensor, nn

import hookline as hl

KEEP_HEAD = torch.tensor([False, True]).view(1, 2, 1, 1)
"""Weights are (batch, head, query, key); head 0 goes."""


def ablate(weights: Tensor) -> Tensor:
    return torch.where(KEEP_HEAD, weights, torch.zeros(()))


def edit_source(function: Callable[..., Any], line: str, new: str, **names: Any) -> FunctionType:
    """Copy a function with another line before one of its own, which stands in it once."""
    source = inspect.getsource(function)
    assert source.count(line) == 1
    namespace = {**function.__globals__, **names}  # type: ignore[attr-defined]
    exec(compile(source.replace(line, new + line), "<edited by hand>", "exec"), namespace)
    copy: FunctionType = namespace[function.__name__]
    return copy


class Case(NamedTuple):
    """An attention module, and the addresses in it that have the weights after dropout."""

    path: str
    names: tuple[str, ...]


CASES = {
    "llama eager": Case(
        "model.layers.1.self_attn",
        (
            "@attention_interface.attn_weights[3]",
            "@eager_attention_forward.attn_weights[3]",
            "/dropout",
            "/matmul[1]:input[0]",
        ),
    ),
    "gpt2": Case("transformer.h.0.attn", ("@attention_interface.attn_weights[4]", "/dropout[0]")),
    "bert": Case(
        "bert.encoder.layer.1.attention.self",
        ("@eager_attention_forward.attn_weights[3]", "/dropout", "/matmul[1]:input[0]"),
    ),
    "t5": Case(
        "encoder.block.0.layer.0.SelfAttention",
        ("@attention_interface.attn_weights[3]", "/dropout"),
    ),
}

ACTIONS: dict[str, Any] = {
    "function": lambda value, at: ablate(value),
    "mask": hl.mask(KEEP_HEAD),
    "scale": hl.scale(KEEP_HEAD.float()),
    "zero of a row": hl.zero().where(rows=0, row_dim=1),
}


def edit_by_hand(
    example: Example, case: Case, monkeypatch: pytest.MonkeyPatch, line: str, new: str
) -> Run:
    """Run with a copy of the eager attention function that edits the weights in code."""
    target = example.model.get_submodule(case.path)
    home = inspect.getmodule(type(target))
    assert home is not None
    copy = edit_source(home.eager_attention_forward, line, new, ablate=ablate, target=target)
    with monkeypatch.context() as patched:
        patched.setattr(home, "eager_attention_forward", copy)
        return step(example)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model, case in CASES.items() for name in case.names]
)
def test_ablated_head_equals_code_edited_by_hand(
    model: str, name: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, case = TRANSFORMERS[model](), CASES[model]
    plain = step(example)
    line = "    attn_output = torch.matmul(attn_weights"
    new = "    attn_weights = ablate(attn_weights) if module is target else attn_weights\n"
    by_hand = edit_by_hand(example, case, monkeypatch, line, new)
    edited = step(example, hl.edit(example.model, {case.path + name: ACTIONS[action]}))
    assert_same_run(edited, by_hand)
    assert not edited.loss.equal(plain.loss)
    assert_same_run(step(example), plain)
    assert_no_trace(example.model)


def test_gradient_edit_inside_equals_code_edited_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the gradient through one head's weights, and leave the forward as it is."""
    example, case = TRANSFORMERS["bert"](), CASES["bert"]
    plain = step(example)
    line = "    attn_output = torch.matmul(attn_weights"
    new = "    module is target and attn_weights.register_hook(ablate)\n"
    by_hand = edit_by_hand(example, case, monkeypatch, line, new)
    for name in ("@attention_interface.attn_weights[3]:grad", "/dropout:grad"):
        edited = step(example, hl.edit(example.model, {case.path + name: hl.mask(KEEP_HEAD)}))
        assert_same_run(edited, by_hand)
        assert edited.loss.equal(plain.loss)
    weight = f"{case.path}.query.weight"
    assert by_hand.grads[weight] is not None
    assert not torch.equal(by_hand.grads[weight], plain.grads[weight])


def test_capture_beside_an_edit_sees_what_flows_on() -> None:
    example, case = TRANSFORMERS["llama eager"](), CASES["llama eager"]
    where = case.path + case.names[0]
    output = f"{case.path}@eager_attention_forward.attn_output[0]"
    with (
        hl.edit(example.model, {where: hl.mask(KEEP_HEAD)}),
        hl.capture(example.model, where, output) as after,
        hl.capture(example.model, where, before_edits=True) as before,
    ):
        example.model(**example.kwargs)
    assert not after[where][:, 0].any()
    assert not after[output][:, 0].any()
    assert before[where][:, 0].sum(-1).allclose(torch.ones(()))
    assert after[where].equal(ablate(before[where]))


def test_patched_weights_of_another_run_give_its_attention() -> None:
    example = TRANSFORMERS["llama eager"]()
    model = example.model
    where = "model.layers.0.self_attn@eager_attention_forward.attn_weights[3]"
    other = {**example.kwargs, "input_ids": example.kwargs["input_ids"].flip(1)}
    with hl.capture(model, where) as clean:
        model(**other)
    with hl.edit(model, {where: hl.patch(clean)}), hl.capture(model, where) as seen:
        model(**example.kwargs)
    assert seen[where].equal(clean[where])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("action", ["function", "mask", "scale"])
def test_ablated_head_of_torchs_own_attention_equals_code_edited_by_hand(
    action: str, batch_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the function the weights are (batch * heads, query, key)."""
    model = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=batch_first).train()
    x = numbers(3, 5, 8).requires_grad_()
    example = Example(model, (x, x, x), {}, lambda out: squares(out[0]) + squares(out[1]))
    plain = step(example)
    copy = edit_source(
        F.multi_head_attention_forward,
        "        attn_output = torch.bmm(attn_output_weights, v)\n",
        "        attn_output_weights = ablate(attn_output_weights.view(bsz, 2, tgt_len, -1))"
        ".view(bsz * 2, tgt_len, -1)\n",
        ablate=ablate,
    )
    with monkeypatch.context() as patched:
        patched.setattr(F, "multi_head_attention_forward", copy)
        by_hand = step(example)
    batch = 3 if batch_first else 5
    keep = KEEP_HEAD.expand(batch, 2, 1, 1).reshape(-1, 1, 1)
    actions = {
        "function": lambda value, at: value * keep,
        "mask": hl.mask(keep),
        "scale": hl.scale(keep.float()),
    }
    where = "@multi_head_attention_forward.attn_output_weights[2]"  # scores, softmax, dropout
    edited = step(example, hl.edit(model, {where: actions[action]}))
    assert_same_run(edited, by_hand)
    assert not edited.loss.equal(plain.loss)
    assert_same_run(step(example), plain)
    assert_no_trace(model)


class Attention(nn.Module):
    """Attention as one writes it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def edit(self, probs: Tensor) -> Tensor:
        return probs

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (one.view(b, t, 2, 4).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(4)
        probs = F.dropout(scores.softmax(-1), 0.1, self.training)
        mixed = (self.edit(probs) @ v).transpose(1, 2).reshape(b, t, 8)
        return self.out(mixed)


class EditedAttention(Attention):
    def edit(self, probs: Tensor) -> Tensor:
        return ablate(probs)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", ["@probs", "@probs[-1]", "/dropout", "/matmul[1]", "@edit.probs"])
def test_ablated_head_of_a_written_attention_equals_a_subclass(name: str, action: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Attention(), nn.Tanh())
    x = numbers(3, 5, 8).requires_grad_()
    example = Example(model, (x,), {}, squares)
    plain = step(example)
    model[1].__class__ = EditedAttention
    by_hand = step(example)
    model[1].__class__ = Attention
    edited = step(example, hl.edit(model, {f"1{name}": ACTIONS[action]}))
    assert_same_run(edited, by_hand)
    assert not edited.loss.equal(plain.loss)
    assert_same_run(step(example), plain)
    assert_no_trace(model)


def test_edit_of_the_last_call_is_refused() -> None:
    """Which is the last is known when the forward is over, and then it is too late."""
    model = nn.Sequential(Attention())
    with pytest.raises(hl.NoSuchSite, match="Count from the start"):
        hl.edit(model, {"0/matmul[-1]": hl.zero()})
    assert_no_trace(model)
