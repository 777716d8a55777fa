"""Capture everything inside every forward of real architectures: nothing changes, all is there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from model_runs import (
    Run,
    assert_no_trace,
    assert_same_run,
    assert_same_tensors,
    plain_hooks,
    step,
    tensors_of,
)
from tiny_models import Example, causal
from tiny_transformers import TRANSFORMERS, make_mixtral
from torch import Tensor, nn
from torch_layers import TORCH_LAYERS

import hookline as hl

MODELS: dict[str, Callable[[], Example]] = {**TRANSFORMERS, **TORCH_LAYERS}

VARIABLES, OPERATIONS = "**@**", "**/*"


class Twin:
    """A model that is run plain and watched, each time from the same weights and buffers."""

    def __init__(self, name: str = "", make: Callable[[], Example] | None = None) -> None:
        self.example = (make or MODELS[name])()
        self.model = self.example.model
        step(self.example)  # makes lazy layers
        self._state = copy.deepcopy(self.model.state_dict())

    def run(self, watch: Any = None) -> tuple[Run, dict[str, Any]]:
        """Run one step; give it and the weights and buffers afterwards."""
        self.model.load_state_dict(self._state)
        return step(self.example, watch), copy.deepcopy(self.model.state_dict())

    def check(self, *where: str, **options: Any) -> hl.Captured:
        """Capture and compare with a run before and a run after, to the bit."""
        plain, plain_state = self.run()
        watched, state = self.run(hl.capture(self.model, *where, **options))
        assert_same_run(watched, plain)
        assert_same_tensors([*state.values()], [*plain_state.values()])
        assert_no_trace(self.model)
        assert_same_run(self.run()[0], plain)
        return watched.got

    def outputs(self) -> dict[str, list[list[Tensor]]]:
        """Give the outputs of each module as plain hooks see them, one entry for each visit."""
        with plain_hooks(self.model) as seen:
            self.run()
        # Patterns pass over what makes a parameter when it is read.
        return {name: found for name, found in seen.items() if "parametrizations" not in name}

    def classes_that_run(self) -> set[type[nn.Module]]:
        return {type(self.model.get_submodule(name)) for name in self.outputs()}


@pytest.fixture(params=MODELS)
def twin(request: pytest.FixtureRequest) -> Twin:
    return Twin(request.param)


def classes_in(model: nn.Module, got: hl.Captured, mark: str) -> set[type[nn.Module]]:
    """List the classes of modules of which a variable or an operation was captured."""
    return {
        type(model.get_submodule(visit.path))
        for visit in got
        if any(port.startswith(mark) for port, _ in visit._record.trees)
    }


@pytest.mark.parametrize("grads", [False, True])
def test_capturing_all_variables_leaves_every_bit_as_it_is(twin: Twin, grads: bool) -> None:
    got = twin.check(VARIABLES, grads=grads)
    assert classes_in(twin.model, got, "@") == twin.classes_that_run() != set()


@pytest.mark.parametrize("grads", [False, True])
def test_capturing_all_operations_leaves_every_bit_as_it_is(twin: Twin, grads: bool) -> None:
    got = twin.check(OPERATIONS, grads=grads)
    assert classes_in(twin.model, got, "/")


def test_variables_and_operations_together_leave_every_bit_as_it_is(twin: Twin) -> None:
    got = twin.check(VARIABLES, OPERATIONS, "**", inputs=True, grads=True, clone=True)
    compared = 0
    for visit in got:
        returned, output = tensors_of(visit["@return"]), tensors_of(visit.output)
        assert_same_tensors(returned, output)
        # T5's bias, which comes second, is used inside the module too: `@return` hears of that.
        for inner, outer in zip(returned[:1], output[:1], strict=True):
            if inner.grad is not None:
                assert outer.grad is not None
                assert inner.grad.equal(outer.grad)
                compared += 1
    assert compared


def test_sweep_meets_many_classes() -> None:
    """Count what the tests above go through, so that they cannot pass by matching nothing."""
    pairs = set()
    for name, make in MODELS.items():
        model = make().model
        paths = {address.partition("@")[0] for address in hl.sites(model, VARIABLES).addresses}
        pairs |= {(name, type(model.get_submodule(path))) for path in paths}
    assert len(pairs) >= 350
    assert len({kind for _, kind in pairs}) >= 230
    assert len(TRANSFORMERS) >= 16


def test_captured_return_is_what_a_plain_hook_saw(twin: Twin) -> None:
    seen = twin.outputs()
    got = twin.run(hl.capture(twin.model, "**@return", clone=True))[0].got
    visits = dict.fromkeys(seen, 0)
    for visit in got:
        assert_same_tensors(tensors_of(visit["@return"]), seen[visit.path][visit.visit])
        visits[visit.path] += 1
    assert visits == {name: len(found) for name, found in seen.items()}


def test_captured_arguments_are_the_inputs(twin: Twin) -> None:
    """The first value of a variable named as an argument is that argument."""
    got = twin.run(hl.capture(twin.model, "**@*[0]", "**:input", clone=True))[0].got
    compared = 0
    for visit in got:
        held = {port for port, _ in visit._record.trees}
        for name, value in visit.inputs.items():
            if f"@{name}[0]" in held:
                assert_same_tensors(tensors_of(visit[f"@{name}[0]"]), tensors_of(value))
                compared += 1
    assert compared


def test_capturing_again_keeps_what_was_overwritten() -> None:
    """Falcon adds to its variables in place: the second capture copies them."""
    twin = Twin("falcon")
    address = "transformer.h.0@mlp_output[0]"
    first = twin.run(hl.capture(twin.model, VARIABLES))[0].got
    with pytest.raises(hl.Overwritten, match="copies it there from now on"):
        first.tensors()
    second = twin.run(hl.capture(twin.model, VARIABLES))[0].got
    assert second[address].equal(second["transformer.h.0.mlp@return"])
    assert (
        second.tensors().keys()
        == twin.run(hl.capture(twin.model, VARIABLES, clone=True))[0].got.tensors().keys()
    )


def test_forward_in_whose_place_another_function_runs_is_reported() -> None:
    """Mixtral's experts are wrapped, and the wrapper may call a fused function in their place."""
    twin = Twin(make=lambda: causal(make_mixtral(experts="grouped_mm")))
    got = twin.check(VARIABLES, OPERATIONS, grads=True)
    experts = "model.layers.0.mlp.experts"
    assert not any(port.startswith("@") for port, _ in got[experts]._record.trees)
    assert any(port.startswith("/") for port, _ in got[experts]._record.trees)
    with (
        pytest.warns(hl.HooklineWarning, match="another function ran in place of its forward"),
        hl.capture(twin.model, f"{experts}@final_hidden_states"),
    ):
        twin.model(**twin.example.kwargs)


HELPERS = {
    "llama eager": "**.self_attn@eager_attention_forward.*",
    "llama sdpa": "**.self_attn@attention_interface.*",
    "gpt2": "**.attn@eager_attention_forward.*",
    "whisper": "**.self_attn@attention_interface.*",
    "attention": "@multi_head_attention_forward.*",
    "encoder": "**.self_attn@multi_head_attention_forward.*",
    "cross attention": "@multi_head_attention_forward.*",
}


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("name", HELPERS)
def test_variables_of_called_functions_leave_every_bit_as_it_is(name: str, grads: bool) -> None:
    twin = Twin(name)
    got = twin.check(HELPERS[name], grads=grads, clone=True)
    helper = HELPERS[name].partition("@")[2].removesuffix(".*")
    ports = [port for visit in got for port, _ in visit._record.trees]
    assert len(ports) > 5
    assert all(port.startswith(f"@{helper}.") for port in ports)


def test_gradient_of_a_variable_is_what_retain_grad_gives() -> None:
    """Whisper's encoder layer, with its forward written out by hand."""
    twin = Twin("whisper")
    layer = twin.model.model.encoder.layers[0]
    kept: dict[str, Tensor] = {}
    original = type(layer).forward

    def forward(this: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        residual = hidden_states
        hidden_states = kept["1"] = this.self_attn_layer_norm(hidden_states)
        hidden_states, _ = this.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        kept["2"] = hidden_states
        dropped = nn.functional.dropout(hidden_states, p=this.dropout, training=this.training)
        kept["3"] = dropped
        hidden_states = kept["4"] = residual + dropped
        for tensor in kept.values():
            tensor.retain_grad()
        residual = hidden_states
        hidden_states = this.final_layer_norm(hidden_states)
        hidden_states = this.activation_fn(this.fc1(hidden_states))
        hidden_states = nn.functional.dropout(hidden_states, this.activation_dropout, this.training)
        hidden_states = nn.functional.dropout(this.fc2(hidden_states), this.dropout, this.training)
        return residual + hidden_states

    layer.forward = forward.__get__(layer)
    by_hand, _ = twin.run()
    del layer.forward
    assert type(layer).forward is original
    watched, _ = twin.run(hl.capture(twin.model, "model.encoder.layers.0@*", grads=True))
    assert_same_run(watched, by_hand)
    for number, tensor in kept.items():
        found = watched.got[f"model.encoder.layers.0@hidden_states[{number}]"]
        assert found.equal(tensor)
        assert tensor.grad is not None
        assert found.grad.equal(tensor.grad), number
