"""What a step is, which of them are watched, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Net, is_clean
from torch import Tensor, nn
from trainings import batches

import hookline as hl


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    """Step a few times."""
    for batch in batches(5, 3, count=steps):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()


def counts(watched: hl.Watch, site: str) -> list[float | None]:
    """Give how many elements each step saw of a site, None where it saw none."""
    values = watched.series(site, "count").values
    return [None if one != one else one for one in values.tolist()]


def test_several_optimizers_one_after_the_other_make_one_step() -> None:
    model = Net()
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model.fc1, model.fc2)]
    with hl.watch(model) as watched:
        for batch in batches(5, 3):
            model(batch).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert counts(watched, "fc1") == [20.0] * 4
    assert counts(watched, "fc1.weight:update") == counts(watched, "fc1.weight") == [12.0] * 4
    assert counts(watched, "fc2.weight:update") == counts(watched, "fc2.weight:grad") == [8.0] * 4


def test_adversarial_training_of_two_models_has_a_step_for_each_turn() -> None:
    maker, judge = nn.Linear(3, 4), nn.Linear(4, 1)
    optimizers = {one: torch.optim.SGD(one.parameters(), 0.1) for one in (maker, judge)}
    with hl.watch({"maker": maker, "judge": judge}) as watched:
        for batch in batches(5, 3, count=3):
            judge(maker(batch).detach()).sum().backward()
            optimizers[judge].step()
            optimizers[judge].zero_grad()
            judge(maker(batch)).sum().backward()
            optimizers[maker].step()
            optimizers[maker].zero_grad()
            optimizers[judge].zero_grad()
    assert watched.step_number == 5
    assert counts(watched, "judge") == [5.0] * 6
    assert counts(watched, "judge.weight:update") == [4.0, None] * 3
    assert counts(watched, "maker.weight:update") == [None, 12.0] * 3
    assert counts(watched, "maker:output.grad") == [None, 20.0] * 3


def test_lbfgs_with_a_closure_is_one_step() -> None:
    model, (batch,) = Net(), batches(5, 3, count=1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        return loss

    with hl.watch(model) as watched:
        for _ in range(2):
            before = model.fc1.weight.detach().clone()
            optimizer.step(closure)
    assert calls > 2
    found = counts(watched, "fc1")
    assert len(found) == 2
    assert sum(one or 0 for one in found) == 20.0 * calls
    moved = (model.fc1.weight.detach() - before).norm().item()
    assert watched.series("fc1.weight:update", "l2").values[1] == pytest.approx(moved, rel=1e-5)
    assert counts(watched, "fc1.weight:grad") == [12.0, 12.0]


def test_optimizers_that_step_inside_the_backward_share_a_step() -> None:
    model = Net()
    optimizers = {one: torch.optim.SGD([one], 0.1) for one in model.parameters()}

    def step_now(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    handles = [one.register_post_accumulate_grad_hook(step_now) for one in model.parameters()]
    with hl.watch(model) as watched:
        for batch in batches(5, 3):
            model(batch).square().sum().backward()
    for handle in handles:
        handle.remove()
    assert counts(watched, "fc1") == counts(watched, "fc1:output.grad") == [20.0] * 4
    for name, one in model.named_parameters():
        assert counts(watched, f"{name}:update") == [float(one.numel())] * 4
        assert counts(watched, f"{name}:grad") == [float(one.numel())] * 4


def test_steps_by_hand_need_no_optimizer() -> None:
    model = Net()
    with hl.watch(model) as watched:
        for batch in batches(5, 3, count=3):
            model(batch).sum().backward()
            watched.step()
    assert counts(watched, "fc1") == [20.0] * 3


def test_only_the_named_optimizers_count() -> None:
    model = Net()
    inner = torch.optim.SGD(model.fc1.parameters(), 0.1)
    outer = torch.optim.SGD(model.fc2.parameters(), 0.1)
    with hl.watch(model, optimizers=[outer]) as watched:
        for number, batch in enumerate(batches(5, 3, count=6)):
            model(batch).square().sum().backward()
            inner.step()
            if number % 3 == 2:
                outer.step()
    assert counts(watched, "fc1") == [60.0] * 2


def test_an_optimizer_of_another_model_counts_no_step() -> None:
    model, other = Net(), nn.Linear(2, 2)
    own, foreign = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, other))
    with hl.watch(model) as watched:
        for batch in batches(5, 3, count=2):
            for _ in range(3):
                other(torch.ones(1, 2)).sum().backward()
                foreign.step()
            model(batch).sum().backward()
            own.step()
    assert counts(watched, "fc1") == [20.0] * 2


def test_evaluation_between_steps_leaves_no_trace() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for mode in (torch.no_grad, torch.inference_mode):
        with hl.watch(model) as watched:
            for _ in range(3):
                train(model, optimizer, 1)
                model.eval()
                with mode():
                    model(torch.randn(50, 3))
                model.train()
        assert counts(watched, "fc1") == [20.0] * 3, mode


def test_evaluation_is_measured_when_asked_for() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, with_inference=True) as watched:
        train(model, optimizer, 1)
        with torch.no_grad():
            model(torch.randn(50, 3))
        train(model, optimizer, 1)
        with torch.inference_mode():
            model(torch.randn(50, 3))
    assert sum(one or 0 for one in counts(watched, "fc1")) == 20 + 200 + 20 + 200


def test_pausing_leaves_steps_out() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model) as watched:
        train(model, optimizer, 2)
        with watched.pause():
            train(model, optimizer, 3)
        train(model, optimizer, 2)
    steps, values = watched.series("fc1", "count")
    assert steps.tolist() == [0, 1, 5, 6]
    assert values.tolist() == [20.0] * 4
    assert watched.step_number == 6


def test_resuming_leaves_a_step_out_that_is_not_due() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, every=4) as watched:
        train(model, optimizer, 2)
        loss = model(torch.randn(5, 3)).sum()
        with watched.pause():
            pass
        loss.backward()
        assert not model.fc1._forward_hooks
        optimizer.step()
        train(model, optimizer, 3)
    assert watched.series("fc1.weight:update", "count").steps.tolist() == [0, 4]


def test_every_third_step_is_watched() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, every=3) as watched:
        for step in range(7):
            # Nothing is attached in the steps between.
            assert bool(model.fc1._forward_hooks) == (step % 3 == 0)
            train(model, optimizer, 1)
    assert watched.series("fc1:output.grad", "count").steps.tolist() == [0, 3, 6]
    assert watched.series("fc1.weight:update", "count").steps.tolist() == [0, 3, 6]
    assert is_clean(model)


def test_strides_by_pattern() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, every={"**": 5, "fc2": 1}) as watched:
        train(model, optimizer, 7)
    rare = [None if step % 5 else 20.0 for step in range(7)]
    assert counts(watched, "fc1") == counts(watched, "fc1:output.grad") == rare
    assert counts(watched, "fc2") == counts(watched, "fc2:output.grad") == [10.0] * 7
    weights = [None if step % 5 else 12.0 for step in range(7)]
    assert counts(watched, "fc1.weight") == counts(watched, "fc1.weight:update") == weights
    assert counts(watched, "fc2.weight") == counts(watched, "fc2.weight:update") == [8.0] * 7


def test_strides_that_share_no_step_but_the_first() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, every={"**": 2, "fc2": 3}) as watched:
        for step in range(7):
            # Nothing is attached in the steps that no stride meets.
            assert bool(model.fc1._forward_hooks) == (step not in (1, 5))
            train(model, optimizer, 1)
    watched_steps = (0, 2, 3, 4, 6)
    assert counts(watched, "fc1") == [None if step % 2 else 20.0 for step in watched_steps]
    assert counts(watched, "fc2") == [None if step % 3 else 10.0 for step in watched_steps]


def test_sites_that_no_stride_names_are_watched_at_every_step() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, every={"fc1": 3}) as watched:
        train(model, optimizer, 4)
    assert counts(watched, "fc1") == [20.0, None, None, 20.0]
    assert counts(watched, "fc2") == [10.0] * 4


def test_the_first_step_has_the_number_asked_for() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, first_step=100) as watched:
        train(model, optimizer, 2)
    assert watched.series("fc1").steps.tolist() == [100, 101]


@pytest.mark.parametrize("first", [None, 2, 10])
def test_resuming_a_run_goes_on_after_its_last_step(tmp_path: Path, first: int | None) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, tmp_path / "run"):
        train(model, optimizer, 3)
    options: dict[str, Any] = {} if first is None else {"first_step": first}
    with hl.watch(model, tmp_path / "run", resume=True, **options) as watched:
        assert watched.step_number == (3 if first is None else first)
        train(model, optimizer, 2)
    start = 3 if first is None else first
    wanted = sorted({0, 1, 2} | {start, start + 1})
    assert hl.open_run(tmp_path / "run").steps.tolist() == wanted


def test_resuming_at_step_zero_writes_the_steps_anew(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model, tmp_path / "run"):
        train(model, optimizer, 3)
    with hl.watch(model, tmp_path / "run", resume=True, first_step=0) as watched:
        assert watched.step_number == 0


def test_reading_during_training_does_not_split_a_step() -> None:
    """A table in the middle of a step shows the steps before it, and the step stays whole."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model) as watched:
        train(model, optimizer, 2)
        model(torch.randn(5, 3)).sum().backward()
        assert len(watched.series("fc1").steps) == 2
        model(torch.randn(5, 3)).sum().backward()
        watched.flush()
        optimizer.step()
    assert counts(watched, "fc1") == [20.0, 20.0, 40.0]


def test_what_is_logged_after_the_step_belongs_to_it() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model) as watched:
        for number in range(3):
            train(model, optimizer, 1)
            watched.log(loss=torch.tensor(float(number)), extra=number * 2)
    assert watched.scalar("loss").values.tolist() == [0.0, 1.0, 2.0]
    assert watched.scalar("extra").values.tolist() == [0.0, 2.0, 4.0]


def test_parameters_that_join_an_optimizer_later_are_measured() -> None:
    model = Net()
    model.fc2.requires_grad_(False)
    optimizer = torch.optim.SGD(model.fc1.parameters(), 0.1)
    with hl.watch(model) as watched:
        train(model, optimizer, 2)
        model.fc2.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.fc2.parameters()), "lr": 0.2})
        train(model, optimizer, 2)
    assert counts(watched, "fc2.weight:update") == [None, None, 8.0, 8.0]


class Parts(nn.Module):
    """Two layers that are called by themselves as well as by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("every", [1, 3])
def test_steps_of_a_model_whose_parts_are_called_alone(every: int) -> None:
    model, x = Parts(), torch.randn(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hl.watch(model, every=every) as watched:
        for number in range(7):
            optimizer.zero_grad()
            model.second(model.first(x * 2**number)).square().mean().backward()
            optimizer.step()
    due = list(range(0, 7, every))
    for site in ("first", "first:output.grad", "first.weight:grad"):
        series = watched.series(site, "count")
        assert series.steps.tolist() == due, site
        assert len(set(series.values.tolist())) == 1, site
    with torch.no_grad():
        expected = [model.first(x * 2**number).double().abs().max().item() for number in due]
    assert watched.series("first", "absmax").values == pytest.approx(expected)


def test_a_part_that_is_called_before_the_model_belongs_to_the_same_step() -> None:
    model, x = Parts(), torch.randn(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model) as watched:
        for _ in range(4):
            model.first(x)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert watched.series("first", "count").values.tolist() == [256] * 4


def test_an_evaluation_ends_no_step() -> None:
    model, x = Parts(), torch.randn(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.watch(model) as watched:
        for number in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model(x)
            watched.log(number=number)
    assert watched.history.steps.tolist() == [0, 1, 2]
    assert watched.scalar("number").values.tolist() == [0, 1, 2]
    assert watched.series("first", "count").values.tolist() == [128] * 3


def test_a_parameter_in_anothers_place_goes_on_under_its_name() -> None:
    model, x = Parts(), torch.randn(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        norm = model.second.weight.detach().norm().item()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return norm

    with hl.watch(model) as watched:
        norms = [step()]
        model.second = nn.Linear(8, 2)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        norms += [step(), step()]
    assert watched.series("second.weight", "l2").values == pytest.approx(norms)
    assert (watched.series("second.weight:update", "l2").values > 0).all()
