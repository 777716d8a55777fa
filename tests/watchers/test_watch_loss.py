"""The loss is what backward is called on; and trainings in which nothing but backward is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import Net, is_clean
from torch import Tensor, nn
from trainings import batches, compare, plain_loop

import hookline as hl


def losses(watched: hl.Watch) -> list[float]:
    """Give the loss of each step."""
    return list(watched.scalar("loss").values.tolist())


def test_the_loss_is_there_without_being_logged() -> None:
    watched = compare(Net, plain_loop(5, 3))
    model = watched.history
    assert "loss" in model.scalars
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(1)
    expected = plain_loop(5, 3)(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    assert losses(watched) == pytest.approx([one.item() for one in expected], rel=1e-6)


def test_micro_batches_add_up() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with hl.watch(model) as watched:
        for batch in batches(4, 3, count=3):
            for part in batch.split(1):
                (model(part).square().mean() / 4).backward()
            optimizer.step()
    expected = [model(batch).detach().square().mean().item() for batch in batches(4, 3, count=3)]
    assert losses(watched) == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_is_logged_is_meant() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hl.watch(model) as watched:
        for number, batch in enumerate(batches(4, 3, count=3)):
            model(batch).sum().backward()
            optimizer.step()
            watched.log(loss=float(number))
    assert losses(watched) == [0.0, 1.0, 2.0]


def test_the_factor_of_a_scaler_is_taken_out() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hl.watch(model) as watched:
        for batch in batches(4, 3, count=3):
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    expected = [model(batch).detach().square().mean().item() for batch in batches(4, 3, count=3)]
    assert losses(watched) == pytest.approx(expected, rel=1e-5)


def test_several_losses_of_one_backward_add_up_and_what_is_no_number_is_left_out() -> None:
    model = Net()
    with hl.watch(model) as watched:
        out = model(torch.ones(2, 3))
        torch.autograd.backward([out.sum() * 0 + 2, out.sum() * 0 + 3], retain_graph=True)
        out.backward(torch.ones_like(out))
        watched.step()
    assert losses(watched) == [5.0]


def test_a_loss_of_something_else_is_not_ours() -> None:
    model, other = Net(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with hl.watch(model) as watched:
        for _ in range(3):
            (other(torch.ones(1, 2)).sum() * 0 + 100).backward()
            (model(torch.ones(1, 3)).sum() * 0 + 1).backward()
            optimizer.step()
    assert losses(watched) == [1.0] * 3
    with hl.watch(model) as second:
        (other(torch.ones(1, 2)).sum() * 0 + 100).backward()
        second.step()
    assert "loss" not in second.history.scalars


def test_a_checkpointed_backward_is_one() -> None:
    class Saving(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = torch.utils.checkpoint.checkpoint(
                self.fc1, x.requires_grad_(), use_reentrant=True
            )
            out: Tensor = self.fc2(hidden)
            return out

    model = Saving()
    with hl.watch(model) as watched:
        (model(torch.ones(1, 3)).sum() * 0 + 1).backward()
        watched.step()
    assert losses(watched) == [1.0]


def test_backward_is_torchs_own_again_afterwards() -> None:
    own, own_step = torch.autograd.backward, torch.amp.GradScaler.step
    first = hl.watch(Net())
    assert torch.autograd.backward is not own
    second = hl.watch(Net())
    first.close()
    assert torch.autograd.backward is not own
    second.close()
    assert torch.autograd.backward is own
    assert torch.amp.GradScaler.step is own_step


@pytest.fixture
def own_backward() -> Iterator[Callable[..., None]]:
    """Give torch's own backward, and put it back at the end."""
    own = torch.autograd.backward
    yield own
    torch.autograd.backward = own  # type: ignore[assignment]


def test_somebody_who_wraps_backward_over_ours_keeps_theirs(
    own_backward: Callable[..., None],
) -> None:
    watched = hl.watch(Net())
    ours = torch.autograd.backward
    called = []

    def theirs(*args: Any, **kwargs: Any) -> None:
        called.append(1)
        ours(*args, **kwargs)

    torch.autograd.backward = theirs  # type: ignore[assignment]
    watched.close()
    assert torch.autograd.backward is theirs
    model = Net()
    with hl.watch(model) as second:
        (model(torch.ones(1, 3)).sum() * 0 + 1).backward()
        second.step()
    assert losses(second) == [1.0]
    assert called == [1]
    assert torch.autograd.backward is theirs


def test_weights_stepped_by_hand_make_steps_after_a_while() -> None:
    model = Net()
    with hl.watch(model) as watched:
        for batch in batches(5, 3, count=20):
            model(batch).square().mean().backward()
            with torch.no_grad():
                for one in model.parameters():
                    one -= 0.01 * one.grad
                    one.grad = None
    counts = watched.series("fc1", "count").values.tolist()
    assert counts == [8 * 20.0] + [20.0] * 12
    assert is_clean(model)


def test_accumulation_over_many_micro_batches_is_one_step() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with hl.watch(model) as watched:
        for _ in range(2):
            for batch in batches(5, 3, count=20):
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watched.series("fc1", "count").values.tolist() == [400.0, 400.0]


def test_who_says_when_a_step_ends_is_not_taken_for_one_by_hand() -> None:
    model = Net()
    with hl.watch(model) as watched:
        for _ in range(2):
            for batch in batches(5, 3, count=12):
                model.zero_grad()
                model(batch).square().mean().backward()
            watched.step()
    counts = watched.series("fc1", "count").values.tolist()
    assert counts[-1] == 240.0


def test_calls_that_lead_to_nothing_do_not_pile_up() -> None:
    model = Net()
    with hl.watch(model, keep=5) as watched:
        for _ in range(200):
            model(torch.ones(1, 3))
        assert len(watched._recorder._step.events) <= 64 * 6
    assert watched.step_number == 3


def test_a_closure_that_is_called_again_and_again_has_one_loss() -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    first: list[float] = []
    with hl.watch(model) as watched:
        for batch in batches(5, 3, count=3):
            seen: list[float] = []

            def closure(batch: Tensor = batch, seen: list[float] = seen) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(batch).square().mean()
                loss.backward()
                seen.append(loss.item())
                return loss

            optimizer.step(closure)
            first.append(seen[0])
            assert len(seen) > 1
    assert losses(watched) == pytest.approx(first, rel=1e-6)


def test_a_compiled_model_has_a_loss_too() -> None:
    model = Net()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with hl.watch(compiled, sites=None) as watched:
        for batch in batches(5, 3, count=3):
            compiled(batch).square().mean().backward()
            optimizer.step()
    expected = [model(batch).detach().square().mean().item() for batch in batches(5, 3, count=3)]
    assert losses(watched) == pytest.approx(expected, rel=1e-5)
