"""Each action against hand-written torch, on values and on gradients, and its conditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Net, Twice, Wrapped, same
from torch import Tensor, nn

import hookline as hl
from hookline.edits.actions import Action

VECTOR = torch.tensor([1.0, -2.0, 3.0, -4.0])

ACTIONS: dict[str, tuple[Action, Callable[[Tensor], Tensor]]] = {
    "set number": (hl.set(2), lambda v: torch.full_like(v, 2)),
    "set tensor": (hl.set(VECTOR.expand(2, 4)), lambda v: VECTOR.expand(2, 4)),
    "add number": (hl.add(0.5), lambda v: v + 0.5),
    "add tensor": (hl.add(VECTOR), lambda v: v + VECTOR),
    "scale number": (hl.scale(-3), lambda v: v * -3),
    "scale tensor": (hl.scale(VECTOR), lambda v: v * VECTOR),
    "zero": (hl.zero(), torch.zeros_like),
    "clip": (hl.clip(0.1), lambda v: v.clamp(-0.1, 0.1)),
    "clip between": (hl.clip(-0.05, 0.2), lambda v: v.clamp(-0.05, 0.2)),
    "clip norm": (
        hl.clip(norm=0.25),
        lambda v: v * (0.25 / torch.linalg.vector_norm(v)).clamp(max=1.0),
    ),
    "clip norm of rows": (
        hl.clip(norm=0.25, dim=-1),
        lambda v: v * (0.25 / torch.linalg.vector_norm(v, dim=-1, keepdim=True)).clamp(max=1.0),
    ),
    "mask": (hl.mask(VECTOR > 0), lambda v: torch.where(VECTOR > 0, v, 0.0)),
    "mask with fill": (hl.mask(VECTOR > 0, fill=9), lambda v: torch.where(VECTOR > 0, v, 9.0)),
    "swap rows": (hl.swap_rows(0, 1), lambda v: v[[1, 0]]),
    "swap rows by order": (hl.swap_rows([1, 0]), lambda v: v[[1, 0]]),
    "swap columns": (hl.swap_rows(0, -1, dim=1), lambda v: v[:, [3, 1, 2, 0]]),
}
each = pytest.mark.parametrize("name", ACTIONS)


@each
def test_action_on_a_value_is_what_torch_gives(name: str) -> None:
    action, function = ACTIONS[name]
    net, x = Net(), torch.randn(2, 3)
    right = net.fc2(net.act(function(net.fc1(x))))
    with hl.edit(net, {"fc1": action}), hl.capture(net, "fc1") as got:
        y = net(x)
    assert torch.allclose(got["fc1"].output, function(net.fc1(x)))
    assert torch.allclose(y, right)


@each
def test_action_on_a_gradient_is_what_torch_gives(name: str) -> None:
    action, function = ACTIONS[name]
    net, x = Net(), torch.randn(2, 3)
    with hl.capture(net, "fc1", grads=True) as plain:
        net(x).pow(2).sum().backward()
    net.zero_grad()
    with hl.edit(net, {"fc1:output.grad": action}):
        net(x).pow(2).sum().backward()
    right = function(plain["fc1"].output.grad)
    assert torch.allclose(net.fc1.weight.grad, right.T @ x, atol=1e-6)
    assert torch.allclose(net.fc1.bias.grad, right.sum(0), atol=1e-6)


@each
def test_gradients_flow_through_an_edited_value(name: str) -> None:
    action, function = ACTIONS[name]
    net, x = Net(), torch.randn(2, 3)
    loss = net.fc2(net.act(function(net.fc1(x)))).sum()
    right = torch.autograd.grad(loss, net.fc1.weight, allow_unused=True)[0]
    with hl.edit(net, {"fc1": action}):
        net(x).sum().backward()
    found = net.fc1.weight.grad
    assert (found is None) == (right is None)
    assert found is None or torch.allclose(found, right)


def test_actions_print_what_they_do() -> None:
    names = [action.name for action, _ in ACTIONS.values()]
    assert names[:4] == ["set(2)", "set(tensor(2, 4))", "add(0.5)", "add(tensor(4,))"]
    assert "clip(-0.1, 0.1)" in names
    assert "clip(norm=0.25)" in names
    assert repr(hl.zero()) == "zero()"


def test_action_leaves_the_models_tensor_alone() -> None:
    """An edit makes a new value: the module's own tensor may be used elsewhere."""
    net, outputs = Net(), []
    net.fc1.register_forward_hook(lambda module, args, out: outputs.append((out, out._version)))
    for action, _ in ACTIONS.values():
        with hl.edit(net, {"fc1": action}):
            net(torch.randn(2, 3))
    assert all(out._version == version for out, version in outputs)


def test_vector_takes_the_type_of_the_value() -> None:
    net, x = Net().bfloat16(), torch.randn(2, 3, dtype=torch.bfloat16)
    with hl.edit(net, {"fc1": hl.add(VECTOR)}), hl.capture(net, "fc1") as got:
        net(x)
    assert same(got["fc1"].output, net.fc1(x).detach() + VECTOR.bfloat16())


def test_noise_is_the_same_for_a_site_visit_and_call_and_touches_no_random_state() -> None:
    model, x = Twice(), torch.zeros(1, 3)
    state = torch.get_rng_state()

    def run(seed: int) -> list[Tensor]:
        with hl.edit(model, {"fc": hl.noise(0.5, seed=seed)}), hl.capture(model, "fc") as got:
            model(x)
            model(x)
        return [visit.output for visit in got]

    first, again, other = run(0), run(0), run(1)
    assert same(torch.get_rng_state(), state)
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[2])


def test_noise_has_the_standard_deviation_asked_for() -> None:
    model = Wrapped(nn.Identity())
    with hl.edit(model, {"inner": hl.noise(3.0)}):
        y = model(torch.ones(100, 100))
    assert y.mean().item() == pytest.approx(1, abs=0.1)
    assert y.std().item() == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        ({"rows": 1}, (1, slice(None))),
        ({"rows": -1}, (-1, slice(None))),
        ({"rows": [0, 2]}, ([0, 2], slice(None))),
        ({"rows": slice(1, None)}, (slice(1, None), slice(None))),
        ({"positions": -1}, (slice(None), -1)),
        ({"rows": 0, "positions": [1, 3]}, (0, [1, 3])),
        ({"rows": 2, "row_dim": 1}, (slice(None), 2)),
        ({"positions": 0, "position_dim": 2}, (slice(None), slice(None), 0)),
    ],
)
def test_rows_and_positions_choose_what_changes(where: dict[str, Any], chosen: Any) -> None:
    model, x = Wrapped(nn.Identity()), torch.randn(3, 4, 2)
    with hl.edit(model, {"inner": hl.add(100).where(**where)}):
        y = model(x)
    right = x.clone()
    right[chosen] += 100
    assert same(y, right)


def test_gradients_outside_the_condition_are_untouched() -> None:
    model, x = Wrapped(nn.Identity()), torch.randn(3, 4, requires_grad=True)
    with hl.edit(model, {"inner": hl.zero().where(rows=0)}):
        model(x).sum().backward()
    assert x.grad.sum(1).tolist() == [0, 4, 4]


def test_visits_and_calls_choose_when() -> None:
    model, x = Twice(), torch.randn(1, 3)
    fc = model.fc
    plain = model(x)
    with hl.edit(model, {"fc": hl.zero().where(visits=0, calls=[1])}):
        first, second, third = model(x), model(x), model(x)
    assert same(first, plain)
    assert same(second, fc(torch.zeros(1, 3)))
    assert same(third, plain)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (
            hl.zero().where(rows=7),
            "`fc1:output` has 2 entries in dimension 0; 7 is outside.",
        ),
        (
            hl.zero().where(positions=0, position_dim=5),
            "`fc1:output` has 2 dimensions, so there is no dimension 5 to select rows or positions "
            "in. Give row_dim or position_dim.",
        ),
        (
            hl.set(torch.ones(3, 4)).where(rows=0),
            "set(tensor(3, 4)) at `fc1:output` gave shape (3, 4) for (2, 4), so rows and positions "
            "cannot be told apart.",
        ),
        (
            hl.swap_rows(0, 5),
            "swap_rows at `fc1:output`: there are 2 rows in dimension 0; 0, 5 is no order of them.",
        ),
        (
            hl.swap_rows([0, 0]),
            "swap_rows at `fc1:output`: there are 2 rows in dimension 0; [0, 0], None is no order "
            "of them.",
        ),
    ],
)
def test_condition_that_does_not_fit_is_told_with_the_site(action: Action, message: str) -> None:
    net = Net()
    hl.edit(net, {"fc1": action})
    with pytest.raises(hl.EditError) as caught:
        net(torch.ones(2, 3))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hl.set("text"), "hl.set takes a number or a tensor, not str"),
        (lambda: hl.add(None), "hl.add takes a number or a tensor, not NoneType"),
        (lambda: hl.scale([1]), "hl.scale takes a number or a tensor, not list"),
        (
            lambda: hl.clip(),
            "hl.clip needs a limit: hl.clip(1.0), hl.clip(0, 6) or hl.clip(norm=1.0)",
        ),
        (lambda: hl.clip(1, norm=1), "hl.clip takes either limits or a norm"),
    ],
)
def test_bad_argument_is_told_when_the_action_is_made(make: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value) == message


def test_clip_with_limits_the_wrong_way_round_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hl\.clip\(2, 1\): the lower limit is above the upper"):
        hl.clip(2, 1)


def test_conditions_given_one_after_the_other_hold_together() -> None:
    model = nn.Sequential(nn.Identity())
    x = torch.ones(2, 3)
    with hl.edit(model, {"0": hl.zero().where(rows=0).where(positions=1)}):
        assert model(x).tolist() == [[1, 0, 1], [1, 1, 1]]
