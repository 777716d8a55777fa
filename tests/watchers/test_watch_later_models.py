"""Models that join a watch that is running, and calls of parts that it is told of."""

from __future__ import annotations

from pathlib import Path

import torch
from small_models import Net, is_clean
from torch import nn
from trainings import batches

import hookline as hl


def train(*models: nn.Module, steps: int = 3) -> None:
    """Train models one after the other in each step."""
    optimizer = torch.optim.SGD([one for model in models for one in model.parameters()], 0.1)
    for batch in batches(5, 3, count=steps):
        optimizer.zero_grad()
        sum(model(batch).square().sum() for model in models).backward()
        optimizer.step()


def test_a_watch_may_begin_without_a_model(tmp_path: Path) -> None:
    model = Net()
    with hl.watch({}, tmp_path / "run") as watched:
        watched.add_model(model, "")
        train(model)
    run = hl.open_run(tmp_path / "run")
    assert run.series("fc1", "count").values.tolist() == [20.0] * 3
    assert run.series("fc1.weight:update", "count").values.tolist() == [12.0] * 3
    assert run.series("fc1:output.grad", "count").values.tolist() == [20.0] * 3
    assert run.model["type"] == "Net"
    assert any("forward" in "".join(one["lines"]) for one in run.document("sources").values())
    assert is_clean(model)


def test_a_second_model_has_its_name_before_its_addresses(tmp_path: Path) -> None:
    first, second = Net(), nn.Linear(3, 2)
    with hl.watch(first, tmp_path / "run") as watched:
        train(first)
        watched.add_model(second, "late")
        train(first, second)
    run = hl.open_run(tmp_path / "run")
    counts = run.series("late", "count").values
    assert (counts == 10).tolist() == [False] * 3 + [True] * 3
    assert (run.series("late.weight:update", "count").values == 6).tolist()[3:] == [True] * 3
    assert run.series("fc1", "count").values.tolist() == [20.0] * 6
    assert set(run.model) == {"", "late"}
    assert is_clean(second)


def test_an_optimizer_that_was_not_ours_is_once_its_model_has_come() -> None:
    first, second = Net(), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(second.parameters(), 0.1)
    with hl.watch(first) as watched:
        second(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        watched.add_model(second, "late")
        second(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert watched.series("late.weight:grad", "count").values.tolist() == [6.0]


def test_in_a_step_that_is_not_watched_a_model_joins_quietly() -> None:
    model = Net()
    with hl.watch({}, every=3) as watched:
        for number in range(6):
            if number == 1:
                watched.add_model(model, "")
            train(model, steps=1)
    assert is_clean(model)
    assert watched.series("fc1", "count").values.size in (1, 2)


def test_a_model_that_cannot_be_listened_at_is_noted_and_its_weights_are_measured() -> None:
    model = Net()
    scripted = torch.jit.script(model)
    with hl.watch({}) as watched:
        watched.add_model(scripted, "net")
        train(scripted)
    assert watched.series("net.fc1.weight:update", "count").values.tolist() == [12.0] * 3
    assert any("`net` is not listened at" in one and "Script" in one for one in watched.notes)


def test_a_compiled_model_is_listened_at() -> None:
    compiled = torch.compile(Net(), backend="eager")
    with hl.watch({}) as watched:
        watched.add_model(compiled, "net")
        train(compiled)
    assert watched.series("net.fc1:output.grad", "count").values.size == 3
    assert watched.notes == []


def test_a_model_without_a_wanted_site_is_noted() -> None:
    with hl.watch(Net(), sites="fc1") as watched:
        watched.add_model(nn.Linear(2, 2), "other")
    assert any("`other` is not listened at" in one for one in watched.notes)


class Parts(nn.Module):
    """Two parts that a script calls by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 4), Log()


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x - x.detach())


def test_a_part_that_is_called_by_itself_can_be_run_again() -> None:
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model) as watched:
        for number in range(3):
            hidden = model.encode(torch.ones(1, 3))
            if number == 2:
                watched.note_call(model.decode, (hidden,), {}, prefix="decode.")
                hidden = model.decode(hidden)
            hidden.sum().backward()
            optimizer.step()
    found = watched.findings[0]
    assert (found.site, found.step) == ("decode/log", 2)
