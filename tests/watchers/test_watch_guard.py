"""An error inside hookline is said once; the training goes on, with the very same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Net, is_clean
from torch import Tensor, nn
from torch.optim import Optimizer
from trainings import Outcome, assert_same, batches, finish

import hookline as hl
from hookline.rules import Judge, Rule
from hookline.runs import RecentSteps
from hookline.watchers.attaching import Attachment
from hookline.watchers.pacing import Pace
from hookline.watchers.recording import Recorder
from hookline.watchers.seeking import Seeker
from hookline.watchers.units import UnitLog
from hookline.watchers.weights import Weights


class Failing:
    """Stand in for a method: fail from the third call on."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own
        self.calls = 0

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls >= 3:
                raise KeyError("on purpose")
            return self.own(instance, *args, **kwargs)

        return call


BROKEN = [
    (Recorder, "measure_now"),
    (Recorder, "new_site"),
    (Recorder, "add_loss"),
    (Recorder, "find_bad"),
    (Recorder, "end_step"),
    (Recorder, "start_step"),
    (Weights, "before"),
    (Weights, "after"),
    (Weights, "owns_any"),
    (Attachment, "begin_step"),
    (Seeker, "keep"),
    (Seeker, "note_output"),
    (Seeker, "hold"),
    (UnitLog, "look"),
    (UnitLog, "take"),
    (Pace, "is_due"),
    (RecentSteps, "write"),
]


def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """Train with dropout, so that random numbers tell."""
    losses = []
    for batch in batches(5, 3, count=8):
        optimizer.zero_grad()
        loss = nn.functional.dropout(model(batch), 0.3).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses


def make() -> tuple[nn.Module, Optimizer]:
    """Make a model and its optimizer, the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(Net(), nn.ReLU())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.fixture(scope="module")
def plain() -> Outcome:
    """Train without a watch."""
    model, optimizer = make()
    return finish(train(model, optimizer), model, optimizer)


@pytest.mark.parametrize(("owner", "name"), BROKEN, ids=lambda one: getattr(one, "__name__", one))
def test_whatever_fails_is_said_once_and_changes_nothing(
    owner: type, name: str, plain: Outcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, optimizer = make()
    monkeypatch.setattr(owner, name, Failing(getattr(owner, name)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with hl.watch(model, tmp_path / "run") as watched:
            outcome = finish(train(model, optimizer), model, optimizer)
    assert_same(plain, outcome)
    assert is_clean(model)
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert not hasattr(torch.autograd.backward, "__wrapped__")
    messages = [str(one.message) for one in said]
    assert len(messages) == 1, messages
    assert "the watch has stopped and the training goes on" in messages[0]
    assert "'on purpose'" in messages[0]
    assert "inside hookline" in messages[0]
    assert "strict=True" in messages[0]
    assert not watched.is_open
    assert hl.open_run(tmp_path / "run").status in ("finished", "failed")


@pytest.mark.parametrize(
    ("owner", "name"), [(Weights, "before"), (Recorder, "measure_now"), (RecentSteps, "write")]
)
def test_strict_raises_it(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    monkeypatch.setattr(owner, name, Failing(getattr(owner, name)))
    with pytest.raises(KeyError, match="on purpose"), hl.watch(model, strict=True):
        train(model, optimizer)
    assert is_clean(model)


def test_a_rule_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    class Failed(Rule):
        name = "failed"

        def see(self, step: Any) -> Any:
            raise ZeroDivisionError("on purpose")

    class Fine(Rule):
        name = "fine"

        def see(self, step: Any) -> Any:
            yield self.find(step, "", message="fine.")

    model, optimizer = make()
    with (
        pytest.warns(hl.HooklineWarning, match="`failed` failed at step 0") as said,
        hl.watch(model, tmp_path / "run", rules=[Failed(), Fine()]) as watched,
    ):
        train(model, optimizer)
    assert len(said) == 1
    assert [one.rule for one in watched.findings] == ["fine"]
    assert len(watched.history.steps) == 8
    (note,) = watched.notes
    assert note.startswith("the rule `failed` failed at step 0 and is not asked any more: ")
    assert hl.open_run(tmp_path / "run").document("notes") == {"notes": [note]}


def test_a_judge_that_fails_ends_the_judging_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    monkeypatch.setattr(Judge, "see", Failing(Judge.see))
    with (
        pytest.warns(hl.HooklineWarning, match="steps are not judged any more") as said,
        hl.watch(model) as watched,
    ):
        train(model, optimizer)
    assert len(said) == 1
    assert len(watched.history.steps) == 8
    assert watched.verdict.startswith("The judging stopped at step ")
    assert "steps are not judged any more" in watched.notes[0]


def test_errors_of_the_training_are_its_own() -> None:
    model, _ = make()
    with pytest.raises(RuntimeError, match="mat1 and mat2"), hl.watch(model):
        model(torch.randn(2, 7))
    assert is_clean(model)


def test_a_replay_that_fails_changes_nothing(
    plain: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("on purpose")

    monkeypatch.setattr("hookline.watchers.seeking.find_origin_apart", fail)
    monkeypatch.setattr(Recorder, "find_bad", lambda self, is_scaled: {"value"})
    model, optimizer = make()
    with pytest.warns(hl.HooklineWarning, match="the watch has stopped") as said, hl.watch(model):
        outcome = finish(train(model, optimizer), model, optimizer)
    assert_same(plain, outcome)
    assert len(said) == 1
    assert is_clean(model)
