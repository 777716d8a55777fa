"""Which steps are watched under a budget, what is reported of the cost, notes and the line."""

from __future__ import annotations

import io
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_models import Net, Twice
from torch import Tensor, nn
from trainings import batches

import hookline as hl
from hookline.runs import SiteFacts, StepRecord
from hookline.watchers import progress, stepping
from hookline.watchers.pacing import Pace
from hookline.watchers.progress import ProgressLine


def run_pace(pace: Pace, steps: int, *, plain: float, added: float) -> list[int]:
    """Let steps pass that take so long, and longer when watched; give the watched ones."""
    watched = []
    for step in range(steps):
        due = pace.is_due(step)
        pace.add(plain + added * due, added * due / 2, was_watched=due)
        if due:
            watched.append(step)
    return watched


@pytest.mark.parametrize("every", [1, 3, 10])
def test_without_a_budget_the_stride_is_kept(every: int) -> None:
    assert run_pace(Pace(every, budget=None), 31, plain=1, added=5) == list(range(0, 31, every))


@pytest.mark.parametrize(
    ("added", "budget", "stride"),
    [(0.3, 0.03, 10), (0.1, 0.03, 4), (0.02, 0.03, 1), (3.0, 0.01, 300), (1e9, 0.01, 1000)],
)
def test_the_stride_follows_the_measured_cost(added: float, budget: float, stride: int) -> None:
    pace = Pace(1, budget=budget)
    run_pace(pace, 40, plain=1.0, added=added)
    assert pace.stride == stride


@pytest.mark.parametrize("added", [0.001, 0.05, 0.3, 2.0])
def test_the_whole_run_stays_within_the_budget(added: float) -> None:
    pace = Pace(1, budget=0.05)
    steps = 5000
    watched = run_pace(pace, steps, plain=1.0, added=added)
    assert len(watched) * added / steps <= 0.05 * 1.1
    assert len(watched) >= min(steps * 0.9, 0.05 / added * steps * 0.8)
    overhead = pace.cost().overhead
    assert overhead is not None
    assert overhead == pytest.approx(len(watched) * added / steps, rel=0.05)


@pytest.mark.parametrize("added", [0.2, 0.5])
def test_free_steps_are_watched_whatever_they_cost_and_not_paid_for(added: float) -> None:
    steps, free = 2000, 110
    watched = run_pace(Pace(1, budget=0.05, free=free), steps, plain=1.0, added=added)
    assert watched[:free] == list(range(free))
    later = [one for one in watched if one >= free]
    assert later[0] <= free + 2
    assert len(later) * added / (steps - free) <= 0.05 * 1.1
    assert len(later) >= 0.05 / added * (steps - free) * 0.8


def test_free_steps_go_on_until_they_have_cost_ten_seconds() -> None:
    watched = run_pace(Pace(1, budget=0.05, free=100), 3000, plain=0.1, added=0.04)
    assert watched[:499] == list(range(499))
    assert len(watched) < 1100


def test_a_budget_after_free_steps_leaves_no_long_gap() -> None:
    watched = run_pace(Pace(1, budget=0.05, free=100), 2000, plain=1.0, added=3.0)
    gaps = [later - earlier for earlier, later in pairwise(watched)]
    assert max(gaps) == 20


@pytest.mark.parametrize(("added", "extras"), [(0.3, 0.0), (2.0, 0.0), (0.1, 1.0), (0.02, 4.0)])
def test_what_learning_cost_is_paid_back(added: float, extras: float) -> None:
    """Some hundred steps, and the run as a whole is within the budget, extras and all."""
    pace = Pace(1, budget=0.05)
    spent, watched, steps = 0.0, 0, 600
    for step in range(steps):
        due = pace.is_due(step)
        had_extras = due and watched % 10 == 0
        cost = due * added + had_extras * extras
        pace.add(1.0 + cost, cost / 2, was_watched=due, had_extras=had_extras)
        spent, watched = spent + cost, watched + due
    assert spent <= 0.05 * steps * (1 + 1e-9)
    assert spent >= 0.05 * steps * 0.6
    overhead = pace.cost().overhead
    assert overhead is not None
    assert overhead == pytest.approx(spent / steps, rel=0.01)


def test_steps_that_all_have_extras_are_the_usual_ones() -> None:
    pace = Pace(1, budget=0.1)
    watched = []
    for step in range(300):
        due = pace.is_due(step)
        pace.add(1.0 + due, due / 2, was_watched=due, had_extras=due)
        if due:
            watched.append(step)
    assert pace.stride == 10
    assert {b - a for a, b in pairwise(watched) if a > 100} == {10}
    assert pace.cost().ratio == pytest.approx(2.0)
    assert pace.cost().overhead == pytest.approx(len(watched) / 300)


def test_one_slow_step_is_not_taken_for_the_cost_of_extras() -> None:
    """Where every step is watched, a step that compiles may be one with extras."""
    pace = Pace(1, budget=None)
    for step in range(20):
        had_extras = step % 10 == 0
        seconds = 5.0 if step == 10 else 1.0
        pace.add(seconds, 0.3 if had_extras else 0.2, was_watched=True, had_extras=had_extras)
    assert pace.cost().overhead == pytest.approx((18 * 0.2 + 2 * 0.3) / (20 * 0.8))


def test_the_ratio_leaves_extras_out_and_the_overhead_does_not() -> None:
    pace = Pace(2, budget=None)
    for step in range(40):
        is_watched, had_extras = pace.is_due(step), step % 20 == 10
        cost = 0.5 * is_watched + 3.0 * had_extras
        pace.add(1.0 + cost, 0.1, was_watched=is_watched, had_extras=had_extras)
    cost_told = pace.cost()
    assert cost_told.ratio == pytest.approx(1.5)
    assert (cost_told.watched, cost_told.with_extras) == (20, 2)
    assert cost_told.overhead == pytest.approx((20 * 0.5 + 2 * 3.0) / 40)


def test_the_pace_recovers_when_watching_becomes_cheap() -> None:
    pace = Pace(1, budget=0.05)
    run_pace(pace, 300, plain=1.0, added=1.0)
    assert pace.stride == 20
    for step in range(300, 1500):
        due = pace.is_due(step)
        pace.add(1.0 + 0.01 * due, 0.0, was_watched=due)
    assert pace.stride == 1


def test_a_budget_never_watches_more_often_than_asked() -> None:
    watched = run_pace(Pace(4, budget=0.5), 400, plain=1.0, added=0.001)
    gaps = {later - earlier for earlier, later in pairwise(watched)}
    assert min(gaps) >= 4


def test_cost_says_what_was_measured() -> None:
    pace = Pace(2, budget=None)
    assert "too few to tell the cost" in str(pace.cost())
    run_pace(pace, 20, plain=1.0, added=0.5)
    cost = pace.cost()
    assert (cost.steps, cost.watched, cost.stride) == (20, 10, 2)
    assert cost.ratio == pytest.approx(1.5)
    assert cost.overhead == pytest.approx(0.25)
    assert str(cost) == (
        "watched 10 of 20 steps; a watched step takes 1.500x (against plain steps), "
        "the whole run 1.250x"
    )
    alone = Pace(1, budget=None)
    run_pace(alone, 10, plain=1.0, added=1.0)
    assert alone.cost().ratio == pytest.approx(2.0 / 1.5)
    assert "by hookline's own time" in str(alone.cost())


def test_a_budget_adapts_to_what_watching_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still but for the model: a second a step, half more when watched."""
    now = 0.0
    monkeypatch.setattr(stepping, "time", SimpleNamespace(perf_counter=lambda: now))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hooked = []
    with hl.watch(model, budget=0.1) as watched:
        for batch in batches(5, 3, count=60):
            loss = model(batch).sum()
            hooked.append(bool(model.fc1._forward_hooks))
            now += 1.5 if hooked[-1] else 1.0
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watched.cost.stride == 5
    late = [step for step, is_hooked in enumerate(hooked) if is_hooked and step > 20]
    assert {b - a for a, b in pairwise(late)} == {5}
    assert watched.cost.ratio == pytest.approx(1.5)


def test_the_run_keeps_the_cost_and_the_notes(tmp_path: Path) -> None:
    class Half(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(3, 3)

    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, tmp_path / "run") as watched:
        for batch in batches(5, 3):
            model(batch).sum().backward()
            optimizer.step()
    assert watched.notes == ["never ran while it was watched: `spare:output`"]
    run = hl.open_run(tmp_path / "run")
    assert run.document("notes") == {"notes": watched.notes}
    assert run.cost["steps"] == run.cost["watched"] == 4
    assert 0 < run.cost["own_seconds"] < run.cost["watched_seconds"]
    assert run.model["parameters"] == sum(one.numel() for one in model.parameters())
    assert run.document("watch")["sites"] == "**"
    assert run.environment["packages"]["torch"] == torch.__version__


def test_nothing_is_noted_where_everything_ran() -> None:
    model = Twice()
    with hl.watch(model) as watched:
        model(torch.randn(2, 3))
    assert watched.notes == []


def test_the_representation_says_how_it_stands(tmp_path: Path) -> None:
    model = Net()
    watched = hl.watch(model)
    assert repr(watched) == "<hl.watch in memory, open, step 0, 0 sites>"
    model(torch.randn(2, 3))
    watched.step()
    assert repr(watched) == "<hl.watch in memory, open, step 1, 4 sites>"
    watched.close()
    assert repr(watched) == "<hl.watch in memory, closed, step 1, 4 sites>"
    with hl.watch(model, tmp_path / "run") as second:
        assert str(tmp_path / "run") in repr(second)


SITES = [SiteFacts(number, f"fc{number}:output", "value") for number in range(12)]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def show_steps(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
    """Show five steps, so many seconds apart."""
    now = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    line = ProgressLine(stream)
    for step in range(5):
        line.show(StepRecord(step, time.time(), 0.1, {"loss": 2.0 / (step + 1)}, []), SITES)
        now += seconds
    line.end("done")


def test_the_line_is_written_over_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Screen()
    show_steps(stream, monkeypatch, seconds=1.0)
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    # Each clears the line first, so that nothing of a longer one before is left on the screen.
    first, *lines = text.rstrip("\n").split("\r\x1b[K")
    assert first == ""
    assert lines[0] == "hookline: step 0 · loss 2 · 12 sites\r"
    assert lines[-1] == "hookline: step 4 · 1 steps/s · loss 0.4 · 12 sites · done"
    assert all(line.endswith("\r") for line in lines[:-1]), "a print would land behind the line"


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    show_steps(stream, monkeypatch, seconds=6.0)
    lines = stream.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == [
        "hookline: step 0",
        "hookline: step 2",
        "hookline: step 4",
        "hookline: step 4",
    ]
    assert "\r" not in stream.getvalue()


def test_the_line_is_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, progress=True) as watched:
        for batch in batches(5, 3):
            loss: Tensor = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            watched.log(loss=loss)
    said = capsys.readouterr()
    assert said.out == ""
    assert "hookline: step 3" in said.err
    assert "watched 4 of 4 steps" in said.err


def test_a_stream_that_is_closed_does_not_end_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    model = Net()
    watched = hl.watch(model, progress=True)
    stream.close()
    for _ in range(3):
        model(torch.randn(2, 3))
        watched.step()
    watched.close()
    assert len(watched.series("fc1").steps) == 3


def test_a_logged_tensor_is_a_number(tmp_path: Path) -> None:
    model = Net()
    with hl.watch(model, tmp_path / "run") as watched:
        model(torch.randn(2, 3))
        watched.log(
            loss=torch.tensor(1.25, requires_grad=True),
            half=torch.tensor([0.5], dtype=torch.bfloat16),
            count=torch.tensor(3),
            bad=torch.tensor(float("nan")),
            blown=torch.tensor(float("inf")),
            huge=float("inf"),
            endless=torch.tensor(float("-inf")),
            flag=True,
        )
        with pytest.raises(ValueError, match="loss is a tensor of 2 numbers"):
            watched.log(loss=torch.zeros(2))
    run = hl.open_run(tmp_path / "run")
    found = {name: run.scalar(name).values.tolist()[0] for name in run.scalars}
    assert found["loss"] == 1.25
    assert found["half"] == 0.5
    assert found["count"] == 3
    assert found["bad"] != found["bad"]
    assert found["huge"] == float("inf")
    assert found["blown"] == float("inf")
    assert found["endless"] == float("-inf")
    assert found["flag"] == 1


def test_numbers_alone_make_a_step(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, tmp_path / "run", every=10) as watched:
        for number, batch in enumerate(batches(5, 3)):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            watched.log(loss=float(number))
    assert hl.open_run(tmp_path / "run").scalar("loss").values.tolist() == [0.0, 1.0, 2.0, 3.0]
