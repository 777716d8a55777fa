"""Steps are judged while a training runs: what is found, where it comes from, what follows."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Net, is_clean
from torch import Tensor, nn
from torch.optim import Optimizer
from trainings import batches, compare

import hookline as hl
from hookline._errors import BadTraining
from hookline.replays import Origin
from hookline.rules import Finding, Rule


class Breaking(nn.Module):
    """A model whose fourth call takes the root of a number below zero."""

    def __init__(self, bad_call: int = 4) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 2)
        self.dropout = nn.Dropout(0.5)
        self.calls, self.bad_call = 0, bad_call

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.dropout(self.fc1(x))
        if self.calls == self.bad_call:
            h = torch.sqrt(-1 - h.square())
        out: Tensor = self.fc2(h)
        return out


class SteepRoot(nn.Module):
    """A model whose forward is fine, and whose third backward is not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.fc(x)
        if self.calls == 3:
            h = h * 0
        return torch.sqrt(h * h).sum()


def train(model: nn.Module, steps: int = 6) -> list[Tensor]:
    """Train for some steps; give the losses."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for batch in batches(5, 3, count=steps):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


class Loud(Rule):
    """Find something in every step from one on."""

    name = "loud"
    severity = "error"

    def __init__(self, first: int = 2) -> None:
        self.first = first

    def see(self, step: Any) -> Any:
        if step.number >= self.first:
            yield self.find(step, "fc1", message=f"loud at step {step.number}.", hint="Hush.")


def test_a_healthy_training_has_no_findings() -> None:
    model = Net()
    with hl.watch(model) as watched:
        train(model)
    assert watched.findings == []
    assert watched.verdict == f"No findings in 6 steps of {len(watched.history.sites())} sites."
    assert (str(watched.findings), repr(watched.findings)) == ("no findings", "<no findings>")


def test_a_nan_is_traced_to_its_operation_while_the_training_runs(tmp_path: Path) -> None:
    model = Breaking()
    with hl.watch(model, tmp_path / "run") as watched:
        train(model)
    assert is_clean(model)
    found = watched.findings[0]
    assert (found.rule, found.severity, found.site, found.step) == (
        "non-finite",
        "error",
        "/sqrt",
        3,
    )
    assert "test_watch_findings.py:" in found.source
    assert found.more["origin"]["cause"] == "operation"
    assert "/sqrt made the first NaN at step 3" in watched.verdict
    stored = hl.open_run(tmp_path / "run").findings
    assert [Finding.from_dict(one) for one in stored] == list(watched.findings)
    assert "non-finite" in str(watched.findings)
    assert "<table" in watched._repr_html_()


def test_a_nan_of_backward_is_traced_to_its_operation() -> None:
    model = SteepRoot()
    with hl.watch(model) as watched:
        train(model)
    origin = watched.findings[0].more["origin"]
    assert (origin["operation"], origin["is_backward"]) == ("SqrtBackward0", True)
    assert watched.findings[0].step == 2


def test_looking_for_the_operation_changes_no_bit() -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
        losses = []
        for batch in batches(5, 3, count=6):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses

    watched = compare(Breaking, loop)
    assert watched.findings[0].site == "/sqrt"
    compare(SteepRoot, loop)


def test_without_replay_the_module_is_named_and_nothing_is_run_again() -> None:
    model = Breaking()
    with hl.watch(model, replay=False) as watched:
        train(model)
    assert model.calls == 6
    assert "origin" not in watched.findings[0].more
    assert watched.findings[0].step == 3


def test_a_step_that_no_optimizer_ends_is_looked_at_when_the_watch_ends() -> None:
    model = Breaking(bad_call=1)
    with hl.watch(model) as watched:
        model(torch.randn(5, 3))
    assert watched.findings[0].site == "/sqrt"


def test_a_loss_that_is_not_finite_is_noticed_between_watched_steps() -> None:
    model = Breaking()
    with hl.watch(model, every=5) as watched:
        train(model)
    found = watched.findings[0]
    assert (found.step, found.site) == (3, "/sqrt")


def test_others_are_asked_where_no_call_shows_it() -> None:
    model = Net()
    asked = []

    def ask() -> None:
        asked.append(1)

    with hl.watch(model) as watched:
        watched.origin_seekers.append(ask)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(6):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 3)).sum()
            (loss * float("nan") if number == 3 else loss).backward()
            optimizer.step()
    assert 1 <= len(asked) <= 3
    assert watched.findings[0].step == 3


def test_overflowing_gradients_under_a_scaler_are_not_looked_into() -> None:
    model = Net()
    asked: list[int] = []
    with hl.watch(model) as watched:
        watched.origin_seekers.append(lambda: asked.append(1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
        for batch in batches(5, 3, count=3):
            optimizer.zero_grad()
            scaler.scale(model(batch).square().sum() * 1e30).backward()
            scaler.step(optimizer)
            scaler.update()
    assert watched.scalar("skipped").values.tolist() == [1.0, 1.0, 1.0]
    assert not asked
    assert watched.findings == []


def test_raise_stops_a_nan_before_the_weights_have_it() -> None:
    model = Breaking()
    with (
        pytest.raises(BadTraining, match="/sqrt made the first NaN at step 3") as caught,
        hl.watch(model, on_finding="raise") as watched,
    ):
        train(model)
    assert caught.value.finding.rule == "non-finite"
    assert all(one.isfinite().all() for one in model.parameters())
    assert watched.scalar("partial").values[-1] == 1
    assert is_clean(model)


def test_raise_stops_a_closure_before_the_weights_have_it() -> None:
    model = Breaking()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.randn(5, 3)).square().mean()
        loss.backward()
        return loss

    with hl.watch(model, on_finding="raise"):
        for _ in range(3):
            optimizer.step(closure)
        with pytest.raises(BadTraining, match="/sqrt"):
            optimizer.step(closure)
    assert all(one.isfinite().all() for one in model.parameters())


def test_who_goes_on_after_an_error_was_raised_is_not_stopped_again() -> None:
    model = Breaking()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    raised = 0
    with hl.watch(model, on_finding="raise") as watched:
        for batch in batches(5, 3, count=6):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            try:
                optimizer.step()
            except BadTraining:
                raised += 1
                optimizer.zero_grad()
                model.bad_call = -1
    assert raised == 1
    assert all(one.isfinite().all() for one in model.parameters())
    assert watched.step_number == 5


def test_raise_waits_for_the_next_step_with_what_is_found_later() -> None:
    model = Net()
    watched = hl.watch(model, on_finding="raise", rules=[Loud()])
    train(model, 3)
    watched.flush()
    with pytest.raises(BadTraining, match=r"loud at step 2\. Hush\."):
        train(model, 1)
    train(model, 1)  # it is said once
    watched.close()
    assert watched.step_number == 3


def test_what_is_found_at_the_very_end_is_raised_there() -> None:
    model = Net()
    with (
        pytest.raises(BadTraining, match="loud at step 2"),
        hl.watch(model, on_finding="raise", rules=Loud()),
    ):
        train(model, 3)


def test_an_error_of_the_training_comes_before_a_finding() -> None:
    model = Net()
    with (
        pytest.raises(RuntimeError, match="mat1 and mat2"),
        hl.watch(model, on_finding="raise", rules=Loud(0)),
    ):
        model(torch.randn(2, 7))


def test_dump_keeps_the_batch(tmp_path: Path) -> None:
    model = Breaking()
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    with hl.watch(model, tmp_path / "run", on_finding="dump"):
        train(model)
    run = hl.open_run(tmp_path / "run")
    dump = run.tensors["finding-non-finite-step-3"]
    assert dump.keys() == ["call0.0"]
    assert torch.equal(dump["call0.0"], seen[3])
    assert dump.facts["finding"]["rule"] == "non-finite"


def test_a_warning_is_not_dumped(tmp_path: Path) -> None:
    rule = Loud()
    rule.severity = "warning"  # type: ignore[misc]
    model = Net()
    with hl.watch(model, tmp_path / "run", on_finding="dump", rules=rule) as watched:
        train(model)
    assert [one.severity for one in watched.findings] == ["warning"]
    assert not hl.open_run(tmp_path / "run").tensors


def test_an_operation_that_is_not_found_is_noted() -> None:
    """A forward that does something else the second time cannot be looked into."""
    calls = itertools.count()

    class Fickle(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (math.nan if next(calls) == 3 else 1.0)

    model = Fickle()
    with hl.watch(model) as watched:
        lost = Origin("", cause="not reproduced", why="it was gone")
        watched.origin_seekers.append(lambda: lost)
        train(model)
    (note,) = [one for one in watched.notes if "was not found" in one]
    assert note.endswith("not finite was not found: it was gone")


def test_a_function_gets_each_finding_and_may_look_back() -> None:
    model, told = Net(), []

    def tell(finding: Finding) -> None:
        told.append((finding.rule, len(watched.findings), watched.verdict))

    with hl.watch(model, on_finding=tell, rules=[Loud()]) as watched:
        train(model)
    assert told == [("loud", 1, "loud at step 2.")]


def test_a_function_that_fails_is_told_nothing_more() -> None:
    model, told = Net(), []

    def tell(finding: Finding) -> None:
        told.append(finding)
        raise KeyError("on purpose")

    rules = [Loud(1), type("Louder", (Loud,), {"name": "louder"})(2)]
    with (
        pytest.warns(hl.HooklineWarning, match="gets no more findings: KeyError") as said,
        hl.watch(model, on_finding=tell, rules=rules) as watched,
    ):
        train(model)
    assert (len(told), len(watched.findings), len(said)) == (1, 2, 1)


def test_rules_can_be_left_out() -> None:
    model = Breaking()
    with hl.watch(model, rules=False) as watched:
        train(model)
    assert watched.findings == []
    assert watched.verdict == "Nothing was judged: rules=False."


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"rules": "all"}, TypeError, "give True, False, or a list of rules"),
        ({"rules": [Loud]}, TypeError, "derived from hl.Rule"),
        ({"on_finding": "stop"}, ValueError, "give one of 'continue', 'raise', 'dump'"),
        ({"units_every": -1}, ValueError, "units_every=-1"),
    ],
)
def test_wrong_arguments_are_refused(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        hl.watch(Net(), **options)


def test_findings_are_written_when_they_come(tmp_path: Path) -> None:
    model = Net()
    with hl.watch(model, tmp_path / "run", rules=[Loud()]) as watched:
        train(model, 4)
        watched.flush()
        assert [one["rule"] for one in hl.open_run(tmp_path / "run").findings] == ["loud"]
