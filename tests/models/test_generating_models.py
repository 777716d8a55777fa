"""`generate` under hookline: edits reach it, captures see each token, and nothing stays behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_runs import assert_no_trace
from tiny_models import make_gpt2, make_llama, make_t5, tokens
from torch import Tensor

import hookline as hl

NEW_TOKENS = 4

# A model, and a module in it that returns one tensor in every step.
GENERATING: dict[str, tuple[Callable[[], Any], str]] = {
    "gpt2": (make_gpt2, "transformer.h.0.mlp"),
    "llama": (make_llama, "model.layers.0.mlp"),
    "t5": (make_t5, "decoder.block.0.layer.2.DenseReluDense"),
}


@pytest.fixture(params=GENERATING)
def case(request: pytest.FixtureRequest) -> tuple[Any, str]:
    make, path = GENERATING[request.param]
    torch.manual_seed(1)
    return make().eval(), path


def generate(model: Any, **options: Any) -> Tensor:
    torch.manual_seed(4)
    ids = tokens(2, 5)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def same(a: Any, b: Any) -> bool:
    return a.sequences.equal(b.sequences) and all(map(Tensor.equal, a.logits, b.logits))


def steer(value: Tensor) -> Tensor:
    return value + torch.linspace(-3, 3, value.shape[-1])


def test_edit_of_generate_equals_a_plain_hook(case: tuple[Any, str]) -> None:
    model, path = case
    plain = generate(model)
    handle = model.get_submodule(path).register_forward_hook(lambda m, a, out: steer(out))
    by_hand = generate(model)
    handle.remove()
    with hl.edit(model, {path: lambda value, at: steer(value)}):
        edited = generate(model)
    with hl.edit(model, {path: hl.add(torch.linspace(-3, 3, 16))}):
        added = generate(model)
    assert same(edited, by_hand)
    assert same(added, by_hand)
    assert not same(edited, plain)
    assert same(generate(model), plain)
    assert_no_trace(model)


def test_capture_of_generate_has_one_call_for_each_token(case: tuple[Any, str]) -> None:
    model, path = case
    plain = generate(model)
    seen: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_hook(
        lambda module, args, output: seen.append(output.clone())
    )
    generate(model)
    handle.remove()
    with hl.capture(model, path, f"{path}:input", "") as got:
        watched = generate(model)
    assert same(watched, plain)
    assert [call.number for call in got.calls] == list(range(NEW_TOKENS))
    for call, output, logits in zip(got.calls, seen, plain.logits, strict=True):
        assert call[path].output.equal(output)
        assert call[":output.logits"][:, -1].equal(logits)
    assert_no_trace(model)


def test_capture_of_all_modules_leaves_generate_as_it_is(case: tuple[Any, str]) -> None:
    model, _ = case
    plain = generate(model)
    with warnings.catch_warnings():
        # Parts that no token needs: the dropout of eager attention, an embedding's other name.
        warnings.filterwarnings("ignore", category=hl.HooklineWarning)
        with hl.capture(model, "**", inputs=True) as got:
            watched = generate(model)
    assert same(watched, plain)
    assert len({visit.path for visit in got}) > 10
    assert same(generate(model), plain)


def test_edit_of_one_call_changes_generate_from_that_token_on(case: tuple[Any, str]) -> None:
    model, path = case
    plain = generate(model)
    with hl.edit(model, {path: lambda value, at: steer(value)}, calls=2):
        edited = generate(model)
    unchanged = [a.equal(b) for a, b in zip(edited.logits, plain.logits, strict=True)]
    assert unchanged[:2] == [True, True]
    assert not unchanged[2]
