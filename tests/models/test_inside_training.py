"""Variables and operations in `generate`, in training loops and under gradient checkpointing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from model_runs import (
    Run,
    assert_no_trace,
    assert_same_run,
    checkpoint_layers,
    keep_layers,
    step,
)
from tiny_models import Example, tokens
from tiny_transformers import TRANSFORMERS, make_gpt2, make_llama, make_t5
from torch import Tensor, nn

import hookline as hl

NEW_TOKENS = 4

# A model, a module in it that every token runs, and a variable of it that is one tensor.
GENERATING: dict[str, tuple[Callable[[], Any], str, str]] = {
    "gpt2": (make_gpt2, "transformer.h.0.attn", "@attention_interface.attn_weights[4]"),
    "gpt2 mlp": (make_gpt2, "transformer.h.1.mlp", "@hidden_states[2]"),
    "llama": (make_llama, "model.layers.0.self_attn", "@eager_attention_forward.attn_weights[3]"),
    "llama sdpa": (lambda: make_llama("sdpa"), "model.layers.1.self_attn", "@query_states[1]"),
    "llama mlp": (make_llama, "model.layers.1.mlp", "/mul"),
    "t5": (make_t5, "decoder.block.0.layer.1.EncDecAttention", "@attn_output[1]"),
}


@pytest.fixture(params=GENERATING)
def generating(request: pytest.FixtureRequest) -> tuple[Any, str, str]:
    make, path, name = GENERATING[request.param]
    torch.manual_seed(1)
    return make().eval(), path, name


def generate(model: Any) -> Any:
    torch.manual_seed(4)
    ids = tokens(2, 5)
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        output_logits=True,
        return_dict_in_generate=True,
    )


def same(a: Any, b: Any) -> bool:
    return a.sequences.equal(b.sequences) and all(map(Tensor.equal, a.logits, b.logits))


def test_capture_of_everything_inside_leaves_generate_as_it_is(
    generating: tuple[Any, str, str],
) -> None:
    model, path, name = generating
    plain = generate(model)
    with warnings.catch_warnings():
        # Parts that no token needs: the dropout of eager attention, an embedding's other name.
        warnings.filterwarnings("ignore", category=hl.HooklineWarning)
        with hl.capture(model, "**@**", "**/*", path + name, clone=True) as got:
            watched = generate(model)
    assert same(watched, plain)
    assert len(got.values(path + name)) == NEW_TOKENS
    assert_no_trace(model)
    assert same(generate(model), plain)


def test_capture_inside_has_one_value_for_each_token(generating: tuple[Any, str, str]) -> None:
    model, path, name = generating
    where = path + name
    with hl.capture(model, where) as got:
        generate(model)
    assert [call.number for call in got.calls] == list(range(NEW_TOKENS))
    for call, value in zip(got.calls, got.values(where), strict=True):
        assert call[where].equal(value)


def test_edit_inside_reaches_every_token_of_generate(generating: tuple[Any, str, str]) -> None:
    """An identity edit changes nothing; zeros change every token; nothing stays behind."""
    model, path, name = generating
    where = path + name
    plain = generate(model)
    with hl.edit(model, {where: lambda value, at: value.clone()}):
        assert same(generate(model), plain)
    with hl.edit(model, {where: hl.zero()}), hl.capture(model, where) as got:
        zeroed = generate(model)
    assert not any(value.any() for value in got.values(where))
    assert len(got.values(where)) == NEW_TOKENS
    assert not any(map(Tensor.equal, zeroed.logits, plain.logits))
    assert_no_trace(model)
    assert same(generate(model), plain)


def test_edit_of_one_call_inside_changes_generate_from_that_token_on(
    generating: tuple[Any, str, str],
) -> None:
    model, path, name = generating
    plain = generate(model)
    with hl.edit(model, {path + name: hl.zero()}, calls=2):
        edited = generate(model)
    unchanged = [a.equal(b) for a, b in zip(edited.logits, plain.logits, strict=True)]
    assert unchanged[:2] == [True, True]
    assert not unchanged[2]


def train(example: Example, watch: Callable[[nn.Module], Any] | None = None) -> Any:
    """Train for three steps and put the weights back; give losses, weights, and what was seen."""
    model = example.model
    state = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(3)
    losses = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=hl.HooklineWarning)
        with nullcontext() if watch is None else watch(model) as got:
            for _ in range(3):
                optimizer.zero_grad()
                loss = example.loss_of(model(*example.args, **example.kwargs))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
    weights = [p.detach().clone() for p in model.parameters()]
    model.load_state_dict(state)
    return [*losses, *weights], got


TRAINED = ["llama eager", "gpt2", "bert", "t5", "vit", "mixtral", "mamba"]


@pytest.mark.parametrize("name", TRAINED)
def test_training_while_everything_inside_is_captured_gives_the_same_weights(name: str) -> None:
    example = TRANSFORMERS[name]()
    plain, _ = train(example)
    watched, got = train(
        example, lambda model: hl.capture(model, "**@**", "**/*", grads=True, clone=True)
    )
    assert all(map(Tensor.equal, watched, plain))
    assert len(got.calls) == 3
    assert_no_trace(example.model)


# A variable of each, and the module inside whose output it is.
EDITED: dict[str, tuple[str, str]] = {
    "llama eager": ("model.layers.1.mlp", "@down_proj"),
    "gpt2": ("transformer.h.0.mlp", "@hidden_states[2]"),
    "bert": ("bert.encoder.layer.0.intermediate", "@hidden_states[2]"),
    "t5": ("decoder.block.1.layer.2.DenseReluDense", "@hidden_states[2]"),
    "vit": ("vit.layers.0.mlp", "@hidden_states[2]"),
}


def halve(value: Tensor, at: hl.At) -> Tensor:
    return value * torch.linspace(0, 1, value.shape[-1])


@contextmanager
def edited_by_hand(model: nn.Module, path: str, module_after: str) -> Iterator[None]:
    """Edit what a module inside gives, where the variable is just that."""
    handle = model.get_submodule(f"{path}.{module_after}").register_forward_hook(
        lambda module, args, output: output * torch.linspace(0, 1, output.shape[-1])
    )
    yield
    handle.remove()


# The module inside whose output is the variable.
SOURCES = {
    "llama eager": "down_proj",
    "gpt2": "act",
    "bert": "intermediate_act_fn",
    "t5": "act",
    "vit": "activation_fn",
}


@pytest.mark.parametrize("name", EDITED)
def test_training_with_a_variable_edited_equals_a_plain_hook_there(name: str) -> None:
    example = TRANSFORMERS[name]()
    path, variable = EDITED[name]
    plain, _ = train(example)
    by_hand, _ = train(example, lambda model: edited_by_hand(model, path, SOURCES[name]))
    edited, _ = train(example, lambda model: hl.edit(model, {path + variable: halve}))
    assert all(map(Tensor.equal, edited, by_hand))
    assert not edited[0].equal(plain[0])
    assert_no_trace(example.model)


@contextmanager
def checkpointed(model: Any, use_reentrant: bool) -> Iterator[None]:
    checkpoint_layers(model, use_reentrant=use_reentrant)
    if use_reentrant:
        model.enable_input_require_grads()
    yield
    keep_layers(model)
    for module in model.modules():  # transformers leaves its own hooks on the embeddings
        for key, hook in [*module._forward_hooks.items()]:
            if hook.__module__.startswith("transformers."):
                del module._forward_hooks[key]


def assert_close_run(found: Run, expected: Run, *, exact: bool) -> None:
    if exact:
        assert_same_run(found, expected)
        return
    assert found.loss.equal(expected.loss)
    for name, grad in expected.grads.items():
        # Torch itself sums up a reentrant region's gradients apart.
        torch.testing.assert_close(found.grads[name], grad, rtol=1e-5, atol=1e-7)


INSIDE = {
    "llama eager": "model.layers.*.self_attn@eager_attention_forward.attn_weights[3]",
    "gpt2": "transformer.h.*.attn/dropout",
    "bert": "bert.encoder.layer.*.attention.self@attention_interface.attn_weights[3]",
    "t5": "encoder.block.*.layer.0.SelfAttention/softmax",
    "vit": "vit.layers.*.mlp@hidden_states[2]",
}

both_kinds = pytest.mark.parametrize("use_reentrant", [False, True])


@both_kinds
@pytest.mark.parametrize("name", INSIDE)
def test_edit_inside_a_checkpointed_model_gives_the_same_gradients(
    name: str, use_reentrant: bool
) -> None:
    example = TRANSFORMERS[name]()
    model = example.model
    edits = {INSIDE[name]: halve}
    plain = step(example)
    without = step(example, hl.edit(model, edits))
    assert not without.loss.equal(plain.loss)
    with checkpointed(model, use_reentrant):
        edited = step(example, hl.edit(model, edits))
    assert_close_run(edited, without, exact=not use_reentrant)
    assert_no_trace(model)


@both_kinds
@pytest.mark.parametrize("name", INSIDE)
def test_gradient_edit_inside_a_checkpointed_model_gives_the_same_gradients(
    name: str, use_reentrant: bool
) -> None:
    example = TRANSFORMERS[name]()
    model = example.model
    edits = {f"{INSIDE[name]}:grad": hl.scale(0.5)}
    plain = step(example)
    without = step(example, hl.edit(model, edits))
    assert any(
        grad is not None and not grad.equal(plain.grads[name])  # type: ignore[arg-type]
        for name, grad in without.grads.items()
    )
    with checkpointed(model, use_reentrant):
        edited = step(example, hl.edit(model, edits))
    assert_close_run(edited, without, exact=not use_reentrant)


@both_kinds
@pytest.mark.parametrize("name", INSIDE)
def test_capture_inside_a_checkpointed_model_has_the_same_values_and_gradients(
    name: str, use_reentrant: bool
) -> None:
    example = TRANSFORMERS[name]()
    model = example.model
    without = step(example, hl.capture(model, INSIDE[name], grads=True)).got.tensors()
    with checkpointed(model, use_reentrant):
        plain = step(example)
        watched = step(example, hl.capture(model, INSIDE[name], grads=True))
        everything = step(example, hl.capture(model, "**@**", "**/*", grads=True, clone=True))
    assert_same_run(watched, plain)
    assert_same_run(everything, plain)
    found = watched.got.tensors()
    assert found.keys() == without.keys()
    assert sum("grad" in address for address in found) == 2
    for address, tensor in without.items():
        if use_reentrant and "grad" in address:
            torch.testing.assert_close(found[address], tensor, rtol=1e-5, atol=1e-7)
        else:
            assert found[address].equal(tensor), address


@both_kinds
def test_backward_after_the_block_of_a_checkpointed_edit_is_right(use_reentrant: bool) -> None:
    """The recompute happens when the edit is gone: it must still run edited."""
    example = TRANSFORMERS["llama eager"]()
    model = example.model
    edits = {INSIDE["llama eager"]: halve}
    without = step(example, hl.edit(model, edits))
    with checkpointed(model, use_reentrant):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        with hl.edit(model, edits):
            loss = model(**example.kwargs).loss
        loss.backward()
        del loss  # a reentrant region needs the edit as long as its graph lives
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, without.grads[name], rtol=1e-5, atol=1e-7)
    assert_no_trace(model)
