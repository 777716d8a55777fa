"""`hl.diff` of a run against a model: the stored inputs and random states are played again."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from planted_gpt import (
    detached,
    epsilon,
    loss_of,
    make_gpt,
    make_words,
    missing_residual,
    tanh_gelu,
)

from hookline.comparisons import diff
from hookline.recordings import record
from hookline.runs import open_run


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record the model in training, with dropout, and all tensors."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    record(make_gpt(training=True), folder, (make_words(),), loss=loss_of, tensors=True)
    return folder


@pytest.fixture(scope="module")
def sketched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record the model without tensors."""
    folder = tmp_path_factory.mktemp("sketched") / "run"
    record(make_gpt(training=True), folder, (make_words(),), loss=loss_of)
    return folder


def test_same_model_agrees_with_its_run(baseline: Path, sketched: Path) -> None:
    """Dropout draws what it drew then."""
    model = make_gpt(training=True)
    torch.manual_seed(123)
    for folder in (baseline, sketched):
        found = diff(folder, model, loss=loss_of)
        assert found.same
        assert found.agree_to == 0
    assert diff(model, open_run(baseline), loss=loss_of).same


@pytest.mark.parametrize(
    ("plant", "path"),
    [(tanh_gelu, "blocks.1.mlp.act"), (epsilon, "blocks.1.ln2"), (missing_residual, "blocks.1")],
)
def test_changed_model_is_found_in_either_order(
    baseline: Path, sketched: Path, plant: object, path: str
) -> None:
    model = make_gpt(training=True)
    plant(model)  # type: ignore[operator]
    for folder in (baseline, sketched):
        assert diff(folder, model, loss=loss_of).first == path
        assert diff(model, folder, loss=loss_of).first == path


def test_detached_branch_is_found_against_a_run(sketched: Path) -> None:
    model = make_gpt(training=True)
    detached(model)
    found = diff(sketched, model, loss=loss_of)
    assert (found.first, found.direction) == ("blocks.1", "backward")


def test_kept_tensors_are_grafted(baseline: Path, sketched: Path) -> None:
    model = make_gpt(training=True)
    tanh_gelu(model)
    found = diff(baseline, model, loss=loss_of)
    assert found.graft is not None
    assert found.graft["verdict"] == "itself"
    assert found.graft["error"] == pytest.approx(found.introduced, rel=0.1)
    assert diff(sketched, model, loss=loss_of).graft is None


def test_inputs_may_be_given_anew(baseline: Path) -> None:
    model = make_gpt(training=True)
    found = diff(baseline, model, (make_words().flip(0),), loss=loss_of)
    assert (found.same, found.direction) == (False, "input")


def test_two_runs(baseline: Path, tmp_path: Path) -> None:
    model = make_gpt(training=True)
    tanh_gelu(model)
    record(model, tmp_path / "b", (make_words(),), loss=loss_of)
    found = diff(baseline, tmp_path / "b")
    assert (found.same, found.first) == (False, "blocks.1.mlp.act")
    with pytest.raises(TypeError, match="`inputs` is for models"):
        diff(baseline, tmp_path / "b", (make_words(),))


def test_run_without_inputs_says_so(tmp_path: Path) -> None:
    model = make_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Odd:
        def __init__(self, words: torch.Tensor) -> None:
            self.words = words

    plain = model.forward
    model.forward = lambda odd: plain(odd.words)  # type: ignore[method-assign]
    with record(model, tmp_path / "run"):
        loss_of(model(Odd(make_words()))).backward()
        optimizer.step()
    with pytest.raises(ValueError, match="holds no inputs"):
        diff(tmp_path / "run", copy.deepcopy(model), loss=loss_of)


def test_step_of_a_training_is_played_again(tmp_path: Path) -> None:
    """The first step of a run is that of the model it started from."""
    model = make_gpt(training=True)
    started = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path / "run"):
        for _ in range(3):
            loss_of(model(make_words())).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = diff(tmp_path / "run", started, loss=loss_of)
    assert found.same
    assert found.step == 0
    tanh_gelu(started)
    assert diff(tmp_path / "run", started, loss=loss_of).first == "blocks.1.mlp.act"
