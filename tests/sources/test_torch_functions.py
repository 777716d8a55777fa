"""Functions of torch and transformers: read, tapped at all their names, and the same in value."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from recording_taps import RecordingTaps
from torch import nn

from hookline.sources import NoSource, read, unwrap


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        scores = self.linear(x) @ x.transpose(-2, -1)
        probs = F.softmax(scores, dim=-1)
        return probs @ x


class NoGrad(Attention):
    @torch.no_grad()
    def forward(self, x):
        y = super().forward(x)
        return y


class Autocast(Attention):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    @torch.enable_grad()
    def forward(self, x):
        y = super().forward(x)
        return y


class Inference(Attention):
    @torch.inference_mode()
    def forward(self, x):
        y = super().forward(x)
        return y


class Uncompiled(Attention):
    @torch.compiler.disable
    def forward(self, x):
        y = super().forward(x)
        return y


@pytest.mark.parametrize("kind", [Attention, NoGrad, Autocast, Inference, Uncompiled])
def test_decorated_forward_computes_the_same(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 3, 4)
    names = set(read(kind.forward).names)
    taps = RecordingTaps(kind.forward, names)
    expected, result = model.forward(x), taps(model, x)

    assert torch.equal(result, expected)
    assert result.requires_grad == expected.requires_grad
    assert (result.dtype, result.is_inference()) == (expected.dtype, expected.is_inference())
    assert {name for name, _ in taps.seen} == names


def test_functions_called_by_a_forward_are_found():
    called = {callee.expression: callee.function for callee in read(Attention.forward).callees}

    assert called == {"self.linear": None, "x.transpose": None, "F.softmax": F.softmax}


def test_edit_reaches_the_gradients():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 3, 4)
    gradients = []
    for run in (
        model.forward,
        lambda x: RecordingTaps(Attention.forward, {"probs"}, halve)(model, x),
    ):
        run(x).sum().backward()
        gradients.append(model.linear.weight.grad)
        model.zero_grad()

    assert torch.equal(gradients[1], gradients[0] / 2)


def halve(value):
    return value / 2


def test_long_function_of_torch_is_tapped():
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    name = "multi_head_attention_forward.attn_output_weights"
    taps = RecordingTaps(nn.MultiheadAttention.forward, {name, "attn_output"})
    expected, result = attention(x, x, x), taps(attention, x, x, x)

    assert all(map(torch.equal, result, expected))
    assert len(taps.values("attn_output")) == 1
    assert [tuple(value.shape) for value in taps.values(name)][-1] == (2, 3, 3)


def test_all_names_of_a_long_function_are_tapped_without_effect():
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    names = {
        f"multi_head_attention_forward.{name}"
        for name in read(F.multi_head_attention_forward).names
    }
    taps = RecordingTaps(nn.MultiheadAttention.forward, names)

    assert all(map(torch.equal, taps(attention, x, x, x), attention(x, x, x)))
    assert len(taps.seen) > 30


def test_scripted_function_has_no_source():
    with pytest.raises(NoSource, match="it is no Python function"):
        read(torch.relu)


@pytest.mark.parametrize("name", ["attention_interface", "eager_attention_forward"])
def test_llama_attention_is_tapped_by_the_name_it_is_called_or_handed_over_by(name):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch.manual_seed(0)
    config = llama.LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=16,
        attn_implementation="eager",
    )
    model = llama.LlamaModel(config).eval()
    attention = model.layers[0].self_attn
    tokens = torch.arange(4)[None]
    expected = model(tokens).last_hidden_state
    taps = RecordingTaps(type(attention).forward, {f"{name}.attn_weights"})
    attention.forward = taps.function.__get__(attention)

    assert torch.equal(model(tokens).last_hidden_state, expected)
    assert {seen for seen, _ in taps.seen} == {f"{name}.attn_weights"}
    del attention.forward


def test_every_forward_of_llama_is_read():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    kinds = [kind for kind in vars(llama).values() if isinstance(kind, type)]
    own = [kind for kind in kinds if kind.__module__ == llama.__name__ and "forward" in vars(kind)]

    assert len(own) > 5
    for kind in own:
        names = frozenset(read(kind.forward).names)
        assert frozenset(RecordingTaps(kind.forward, names).table) == names
        assert unwrap(kind.forward)[-1].__code__.co_filename == llama.__file__
