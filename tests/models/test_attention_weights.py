"""Attention weights by address equal what a model returns when it is asked for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from model_runs import assert_no_trace, step
from tiny_models import numbers
from tiny_transformers import TRANSFORMERS
from torch import Tensor, nn

import hookline as hl


class Place(NamedTuple):
    """Attention modules of a model, and which part of its output has their weights."""

    model: str
    pattern: str
    expected: Callable[[Any], tuple[Tensor, ...]]


def _place(model: str, pattern: str, name: str = "attentions") -> Place:
    return Place(model, pattern, lambda output: getattr(output, name))


# All call `eager_attention_forward` through a variable named `attention_interface`.
THROUGH_INTERFACE = [
    _place("llama eager", "model.layers.*.self_attn"),
    _place("mistral", "model.layers.*.self_attn"),
    _place("gemma", "model.layers.*.self_attn"),
    _place("phi", "model.layers.*.self_attn"),
    _place("mixtral", "model.layers.*.self_attn"),
    _place("opt", "model.decoder.layers.*.self_attn"),
    _place("gpt2", "transformer.h.*.attn"),
    _place("bert", "bert.encoder.layer.*.attention.self"),
    _place("distilbert", "distilbert.transformer.layer.*.attention"),
    _place("t5", "encoder.block.*.layer.0.SelfAttention", "encoder_attentions"),
    _place("t5", "decoder.block.*.layer.0.SelfAttention", "decoder_attentions"),
    _place("t5", "decoder.block.*.layer.1.EncDecAttention", "cross_attentions"),
    _place("bart", "model.encoder.layers.*.self_attn", "encoder_attentions"),
    _place("bart", "model.decoder.layers.*.encoder_attn", "cross_attentions"),
    _place("whisper", "model.encoder.layers.*.self_attn", "encoder_attentions"),
    _place("whisper", "model.decoder.layers.*.self_attn", "decoder_attentions"),
    _place("whisper", "model.decoder.layers.*.encoder_attn", "cross_attentions"),
    _place("vit", "vit.layers.*.attention"),
    _place("wav2vec2", "wav2vec2.encoder.layers.*.attention"),
    Place("clip", "text_model.encoder.layers.*.self_attn", lambda o: o.text_model_output[2]),
    Place("clip", "vision_model.encoder.layers.*.self_attn", lambda o: o.vision_model_output[2]),
]

# Where the weights are computed in the module's own forward, or by an operation.
IN_FORWARD = [
    (_place("deberta", "deberta.encoder.layer.*.attention.self"), "@attention_probs[-1]"),
    (_place("falcon", "transformer.h.*.self_attention"), "@attention_scores[-1]"),
    (_place("gpt2", "transformer.h.*.attn"), "/dropout"),
    (_place("llama eager", "model.layers.*.self_attn"), "/dropout"),
    (_place("bert", "bert.encoder.layer.*.attention.self"), "/dropout"),
    (_place("vit", "vit.layers.*.attention"), "/softmax"),
    (_place("t5", "encoder.block.*.layer.0.SelfAttention", "encoder_attentions"), "/dropout"),
    (_place("falcon", "transformer.h.*.self_attention"), "/softmax"),
]


def check(place: Place, name: str, *, training: bool) -> None:
    """Compare the weights of every layer, with dropout and without."""
    example = TRANSFORMERS[place.model]()
    model = example.model.train(training)
    kwargs = example.kwargs
    torch.manual_seed(8)
    # Of a copy: transformers leaves hooks of its own on a model that was asked.
    expected = place.expected(copy.deepcopy(model)(**kwargs, output_attentions=True))
    torch.manual_seed(8)
    with hl.capture(model, place.pattern + name) as got:
        model(**kwargs)
    addresses = hl.sites(model, place.pattern + name).addresses
    assert len(addresses) == len(expected) == 2
    for address, weights in zip(addresses, expected, strict=True):
        found = got[address]
        assert found.shape == weights.shape
        assert found.equal(weights)
    assert_no_trace(model)


def show(place: Place) -> str:
    return f"{place.model} {place.pattern}"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("helper", ["attention_interface", "eager_attention_forward"])
@pytest.mark.parametrize("place", THROUGH_INTERFACE, ids=show)
def test_weights_inside_a_called_function_are_what_the_model_returns(
    place: Place, helper: str, training: bool
) -> None:
    check(place, f"@{helper}.attn_weights[-1]", training=training)


@pytest.mark.parametrize("place", THROUGH_INTERFACE, ids=show)
def test_weights_given_back_are_what_the_model_returns(place: Place) -> None:
    check(place, "@attn_weights", training=True)


@pytest.mark.parametrize(("place", "name"), IN_FORWARD)
def test_weights_in_forward_are_what_the_model_returns(place: Place, name: str) -> None:
    check(place, name, training=False)


@pytest.mark.parametrize("helper", ["attention_interface", "eager_attention_forward"])
def test_gradient_of_weights_is_what_retain_grad_gives(helper: str) -> None:
    """The model hands its weights out, so torch itself can say what their gradient is."""
    example = TRANSFORMERS["llama eager"]()
    output = example.model(**example.kwargs, output_attentions=True)
    for weights in output.attentions:
        weights.retain_grad()
    output.loss.backward()
    addresses = [f"model.layers.{i}.self_attn@{helper}.attn_weights[-1]" for i in range(2)]
    got = step(example, hl.capture(example.model, *addresses, grads=True)).got
    for address, weights in zip(addresses, output.attentions, strict=True):
        assert got[address].equal(weights)
        assert got[address].grad.equal(weights.grad)


def test_both_names_of_a_called_function_give_one_value() -> None:
    example = TRANSFORMERS["llama eager"]()
    path = "model.layers.1.self_attn"
    helpers = ("attention_interface", "eager_attention_forward")
    where = [f"{path}@{helper}.attn_weights" for helper in helpers]
    with hl.capture(example.model, *where) as got:
        example.model(**example.kwargs)
    first, second = (got.values(address) for address in where)
    assert len(first) == len(second) == 4  # scores, masked, normalized, dropped
    assert all(map(Tensor.equal, first, second))


def test_variable_that_another_attention_has_not_is_refused() -> None:
    """With sdpa there are no weights to be seen, and that is said."""
    example = TRANSFORMERS["llama sdpa"]()
    where = "model.layers.0.self_attn@attention_interface.attn_weights[-1]"
    with (
        pytest.raises(hl.NoSuchSite, match="what is called there is `sdpa_attention_forward`"),
        hl.capture(example.model, where),
    ):
        example.model(**example.kwargs)
    assert_no_trace(example.model)


def test_function_that_is_not_called_is_reported() -> None:
    example = TRANSFORMERS["llama sdpa"]()
    where = "model.layers.0.self_attn@eager_attention_forward.attn_weights[-1]"
    with (
        pytest.warns(hl.HooklineWarning, match="never assigned"),
        hl.capture(example.model, where) as got,
    ):
        example.model(**example.kwargs)
    with pytest.raises(hl.NotCaptured, match="eager_attention_forward"):
        got[where]


ATTENTIONS: dict[str, Callable[[], tuple[nn.MultiheadAttention, list[Tensor]]]] = {
    "self": lambda: (nn.MultiheadAttention(8, 2), [numbers(5, 3, 8)] * 3),
    "batch first": lambda: (
        nn.MultiheadAttention(8, 4, batch_first=True, dropout=0.3),
        [numbers(3, 5, 8)] * 3,
    ),
    "cross": lambda: (
        nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True),
        [numbers(3, 5, 8), numbers(3, 4, 6), numbers(3, 4, 4)],
    ),
    "unbatched": lambda: (nn.MultiheadAttention(8, 2, add_zero_attn=True), [numbers(5, 8)] * 3),
}


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_weights_inside_torchs_own_attention_are_what_it_returns(name: str, grads: bool) -> None:
    attention, given = ATTENTIONS[name]()
    torch.manual_seed(2)
    output, expected = attention(*given, average_attn_weights=False)
    expected.retain_grad()
    (output.square().sum() + expected.square().sum()).backward()
    variable = "@multi_head_attention_forward.attn_output_weights"
    torch.manual_seed(2)
    with hl.capture(attention, variable, grads=grads) as got:
        again, weights = attention(*given, average_attn_weights=False)
        (again.square().sum() + weights.square().sum()).backward()
    assert again.equal(output)
    found = got.values(variable)
    assert len(found) >= 3  # scores, normalized, by head
    assert found[-1].equal(expected)
    assert found[1 if attention.dropout == 0 else 2].view_as(expected).equal(expected)
    if grads:
        assert found[-1].grad.equal(expected.grad)
        assert found[1].grad.shape == found[1].shape
    assert_no_trace(attention)


def test_averaged_weights_are_what_is_returned_by_default() -> None:
    attention, given = ATTENTIONS["batch first"]()
    torch.manual_seed(2)
    with hl.capture(attention, "@multi_head_attention_forward.attn_output_weights[-1]") as got:
        _, weights = attention(*given)
    assert got["@multi_head_attention_forward.attn_output_weights[-1]"].equal(weights)


def test_operation_inside_torchs_own_attention_is_opaque_and_that_is_said() -> None:
    """`F.multi_head_attention_forward` is one operation: what it calls is not the module's own."""
    attention, given = ATTENTIONS["self"]()
    with (
        pytest.warns(hl.HooklineWarning, match="`/multi_head_attention_forward`"),
        hl.capture(attention, "/softmax"),
    ):
        attention(*given)
