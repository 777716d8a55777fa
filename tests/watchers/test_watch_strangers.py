"""Optimizers that step what the watched model does not have."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim import Optimizer
from trainings import batches

import hookline as hl
from hookline.rules import Finding, make_rules


def train(model: nn.Module, optimizer: Optimizer, steps: int = 25) -> list[Finding]:
    """Train with an optimizer, whatever it steps; give what is said of the weights."""
    with hl.watch(model) as watched:
        for batch in batches(5, 3, count=steps):
            optimizer.zero_grad()
            model.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return [one for one in watched.findings if one.message.startswith("No optimizer has")]


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_optimizer_made_before_the_layers_were_exchanged_is_told() -> None:
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model[0], model[2] = nn.Linear(3, 4), nn.Linear(4, 2)
    (found,) = train(model, optimizer)
    assert (found.rule, found.severity) == ("update-ratio", "error")
    assert found.message.startswith(
        "No optimizer has any parameter of Sequential: the weights are never updated."
    )
    assert "Make the optimizer after the model is final" in found.hint


def test_optimizer_of_a_copy_is_told_only_after_some_steps() -> None:
    model = make()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), 0.01)
    assert not train(model, optimizer, steps=19)
    assert len(train(model, optimizer, steps=20)) == 1


def test_steps_go_on_after_it_was_told() -> None:
    model = make()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.01)
    with hl.watch(model) as watched:
        for batch in batches(5, 3, count=30):
            loss = model(batch).square().mean()
            model.zero_grad()
            loss.backward()
            optimizer.step()
    assert len(watched.history.steps) == 10


def test_own_optimizer_that_waits_for_its_turn_is_no_stranger() -> None:
    model = make()
    own = torch.optim.SGD(model.parameters(), 0.01)
    assert not train(model, torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.01))
    assert own.param_groups


def test_input_that_is_optimized_is_meant() -> None:
    model = make()
    image = nn.Parameter(torch.rand(5, 3))
    optimizer = torch.optim.SGD([image], 0.01)
    with hl.watch(model) as watched:
        for _ in range(25):
            optimizer.zero_grad()
            model(image).square().mean().backward()
            optimizer.step()
    assert not [one for one in watched.findings if one.rule == "update-ratio"]


def test_weights_that_are_copied_in_by_hand_do_change() -> None:
    model = make()
    masters = [nn.Parameter(one.detach().clone()) for one in model.parameters()]
    optimizer = torch.optim.SGD(masters, 0.01)
    with hl.watch(model) as watched:
        for batch in batches(5, 3, count=25):
            model.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            for one, master in zip(model.parameters(), masters, strict=True):
                master.data.sub_(0.01 * one.grad)  # type: ignore[operator]
                one.data.copy_(master.data)
    assert not [one for one in watched.findings if one.message.startswith("No optimizer has")]


def test_nothing_is_said_where_the_rule_is_left_out() -> None:
    model = make()
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), 0.01)
    rules = [one for one in make_rules() if one.name != "update-ratio"]
    with hl.watch(model, rules=rules) as watched:
        for batch in batches(5, 3, count=25):
            model(batch).square().mean().backward()
            optimizer.step()
    assert not [one for one in watched.findings if one.message.startswith("No optimizer has")]
