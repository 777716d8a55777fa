"""`hl.diff` of two models: the module that differs first, forward, backward and in the update."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from planted_gpt import (
    WIDTH,
    Gpt,
    detached,
    dropout_on,
    epsilon,
    exchange_forward,
    extra_factor,
    loss_of,
    make_gpt,
    make_words,
    missing_bias,
    missing_residual,
    softmax_dim,
    tanh_gelu,
    wrong_backward,
    wrong_scale,
)
from torch import Tensor, nn

from hookline.comparisons import diff
from hookline.comparisons.baselines import replace_run


@pytest.mark.parametrize(
    ("plant", "path", "direction"),
    [
        (tanh_gelu, "blocks.1.mlp.act", "forward"),
        (epsilon, "blocks.1.ln2", "forward"),
        (missing_residual, "blocks.1", "forward"),
        (wrong_scale, "blocks.1.attn", "forward"),
        (softmax_dim, "blocks.1.attn", "forward"),
        (extra_factor, "blocks.1.mlp", "forward"),
        (dropout_on, "blocks.1.mlp.drop", "forward"),
        (missing_bias, "blocks.1.mlp.fc2", "forward"),
        (detached, "blocks.1", "backward"),
        (wrong_backward, "blocks.1.mlp.act", "backward"),
    ],
)
def test_diff_names_the_module_and_the_direction(
    plant: Callable[[Gpt], None], path: str, direction: str
) -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    plant(b)
    found = diff(a, b, (make_words(),), loss=loss_of)
    assert (found.same, found.first, found.direction) == (False, path, direction)
    assert found.graft is not None
    assert found.graft["verdict"] == "itself"


def test_small_constant_in_the_code_is_found_where_all_before_is_equal() -> None:
    """No setting tells, and the floor of a deep site allows it: but nothing else differs."""

    def forward(self: nn.LayerNorm, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (WIDTH,), self.weight, self.bias, 2.3e-5)

    a = make_gpt()
    b = copy.deepcopy(a)
    exchange_forward(b.blocks[2].ln2, forward)
    found = diff(a, b, (make_words(),), loss=loss_of)
    assert (found.first, found.direction) == ("blocks.2.ln2", "forward")
    assert found.introduced is not None
    assert found.introduced < found.limit
    assert "eps=1e-05 here, 2.3e-05 there" in found.causes


def test_diff_of_a_model_and_its_copy_is_the_same() -> None:
    a = make_gpt(training=True)
    found = diff(a, copy.deepcopy(a), make_words(), loss=loss_of)
    assert found.same
    assert found.first is None
    assert found.agree_to == 0


def test_diff_of_a_model_with_itself() -> None:
    a = make_gpt()
    assert diff(a, a, {"words": make_words()}, loss=loss_of).same


def test_diff_says_operation_line_and_cause_in_its_sentence() -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    tanh_gelu(b)
    found = diff(a, b, (make_words(),), loss=loss_of)
    assert found.operation == "blocks.1.mlp.act/gelu"
    assert "planted_gpt.py:" in found.source
    assert "blocks.1.mlp.act" in found.sentence
    assert found.sentence.count("'tanh' there") == 1


def test_diff_of_optimizers_is_in_the_update() -> None:
    """Both models get one optimizer from the function; it may tell them apart."""
    a = make_gpt()
    b = copy.deepcopy(a)
    own = {id(one) for one in b.blocks[1].ln1.parameters()}

    def make(parameters: Any) -> torch.optim.Optimizer:
        groups = [{"params": [one], "lr": 0.2 if id(one) in own else 0.1} for one in parameters]
        return torch.optim.SGD(groups, lr=0.1)

    found = diff(a, b, (make_words(),), loss=loss_of, optimizer=make)
    assert (found.direction, found.first) == ("update", "blocks.1.ln1")


def test_diff_without_loss_compares_the_forward_alone() -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    detached(b)
    assert diff(a, b, (make_words(),)).same


def test_diff_takes_a_pair_of_losses_and_other_inputs() -> None:
    class Wrapped(nn.Module):
        def __init__(self, gpt: Gpt) -> None:
            super().__init__()
            self.gpt = gpt

        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"logits": self.gpt(batch["words"])}

    a = make_gpt()
    b = Wrapped(copy.deepcopy(a))
    found = diff(
        a,
        b,
        (make_words(),),
        inputs_b=({"words": make_words()},),
        loss=(loss_of, lambda out: loss_of(out["logits"])),
    )
    assert found.same
    tanh_gelu(b.gpt)
    found = diff(
        a,
        b,
        (make_words(),),
        inputs_b=({"words": make_words()},),
        loss=(loss_of, lambda out: loss_of(out["logits"])),
    )
    assert (found.first, found.first_b) == ("blocks.1.mlp.act", "gpt.blocks.1.mlp.act")


def test_diff_allows_what_it_is_told() -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    tanh_gelu(b)
    assert diff(a, b, (make_words(),), tolerance=0.1).same
    assert not diff(a, b, (make_words(),), tolerance=1e-9).same
    assert diff(a, b, (make_words(),), allow={"**": 0.1}).same


@pytest.mark.parametrize("training", [False, True])
def test_diff_leaves_models_as_they_were(training: bool) -> None:
    a = make_gpt(training=training)
    b = copy.deepcopy(a)
    missing_residual(b)
    loss_of(a(make_words())).backward()
    states = [copy.deepcopy(one.state_dict()) for one in (a, b)]
    grads = [one.grad for one in a.parameters()]
    flags = [module.training for module in a.modules()]
    keys = [set(vars(module)) for module in a.modules()]
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    diff(a, b, (make_words(),), loss=loss_of, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
    for model, state in zip((a, b), states, strict=True):
        assert all(torch.equal(state[name], one) for name, one in model.state_dict().items())
    assert all(one.grad is old for one, old in zip(a.parameters(), grads, strict=True))
    assert all(one.grad is None for one in b.parameters())
    assert [module.training for module in a.modules()] == flags
    assert [set(vars(module)) for module in a.modules()] == keys
    assert not any(module._forward_hooks for module in [*a.modules(), *b.modules()])
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]
    assert np.random.get_state()[1].tolist() == random_states[2]


def test_diff_leaves_inputs_as_they_were() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    x = torch.ones(3)
    assert diff(InPlace(), InPlace(), (x,)).same
    assert x.tolist() == [1, 1, 1]


def test_diff_of_two_models_wants_inputs() -> None:
    model = make_gpt()
    with pytest.raises(TypeError, match=r"give them: `hl.diff\(a, b, \(x,\)\)`"):
        diff(model, model)


def test_diff_refuses_what_is_neither_model_nor_run() -> None:
    with pytest.raises(TypeError, match="compares models and runs"):
        diff(make_gpt(), 3, (make_words(),))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a function of the model's output"):
        diff(make_gpt(), make_gpt(), (make_words(),), loss=3)


def test_error_of_a_model_keeps_its_type_and_says_which_it_was() -> None:
    class Broken(nn.Module):
        def forward(self, words: Tensor) -> Tensor:
            raise KeyError("missing")

    with pytest.raises(KeyError) as caught:
        diff(make_gpt(), Broken(), (make_words(),))
    assert any("model B (Broken)" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError) as wrong:
        diff(make_gpt(), make_gpt(), (make_words(), make_words()))
    assert any("model A (Gpt)" in note for note in wrong.value.__notes__)


def test_nan_on_one_side_is_the_first_difference() -> None:
    a = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[1].bias[0] = torch.nan
    found = diff(a, b, (torch.randn(2, 4),))
    assert (found.same, found.first) == (False, "1")
    with torch.no_grad():
        a[1].bias[0] = torch.nan
    assert diff(a, b, (torch.randn(2, 4),)).same


def test_floors_of_another_model_of_a_count_as_the_same() -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    tanh_gelu(b)
    assert not diff(a, b, (make_words(),), loss=loss_of).same
    assert diff(a, b, (make_words(),), loss=loss_of, calibrate=copy.deepcopy(b)).same


def test_without_confirm_nothing_is_grafted() -> None:
    a = make_gpt()
    b = copy.deepcopy(a)
    tanh_gelu(b)
    found = diff(a, b, (make_words(),), confirm=False)
    assert (found.first, found.graft, found.operation) == ("blocks.1.mlp.act", None, None)


def test_replace_run_loses_nothing_when_interrupted(tmp_path: Any) -> None:
    folder = tmp_path / "baseline"
    folder.mkdir()
    (folder / "rank-00000.sqlite").write_text("old")
    (folder / "run.json").write_text("{}")

    def interrupt(place: Any) -> None:
        place.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_run(folder, interrupt)
    assert (folder / "rank-00000.sqlite").read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["baseline"]


def test_replace_run_refuses_a_folder_that_is_no_run(tmp_path: Any) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds other files"):
        replace_run(tmp_path, lambda place: place.mkdir())
    assert (tmp_path / "notes.txt").exists()
