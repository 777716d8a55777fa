"""Parameters as sites: their value as a call begins, their gradient once it is accumulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Net, is_clean, same
from torch import Tensor, nn

import hookline as hl


def test_value_comes_once_for_each_call() -> None:
    net, seen = Net(), []

    def look(value: Tensor, at: hl.At) -> None:
        seen.append((same(value, net.fc1.weight), value.requires_grad, at.address, at.call))

    with hl.hook(net, "fc1.weight", look):
        net(torch.ones(1, 3))
        net(torch.ones(1, 3))
    assert seen == [(True, False, "fc1.weight", 0), (True, False, "fc1.weight", 1)]


def test_value_comes_with_its_graph_where_asked() -> None:
    net, seen = Net(), []
    with hl.hook(net, "fc1.weight", lambda value, at: seen.append(value), keep_graph=True):
        net(torch.ones(1, 3))
    assert seen[0] is net.fc1.weight


def test_gradient_is_the_accumulated_one() -> None:
    net, seen, x = Net(), [], torch.ones(1, 3)
    with hl.hook(net, "fc1.weight:grad", lambda grad, at: seen.append((grad.clone(), at))):
        net(x).sum().backward()
        net(x).sum().backward()
    (first, _), (second, at) = seen
    assert same(second, net.fc1.weight.grad)
    assert torch.allclose(second, 2 * first)
    assert (at.address, at.port, at.is_grad, at.call) == ("fc1.weight:grad", "parameter", True, 1)


def test_pattern_names_many_parameters() -> None:
    net, seen = Net(), []
    with hl.hook(net, "**.weight:grad", lambda grad, at: seen.append(at.address)):
        net(torch.ones(1, 3)).sum().backward()
    assert sorted(seen) == ["fc1.weight:grad", "fc2.weight:grad"]


@pytest.mark.parametrize("site", ["fc1.weight", "fc1.weight:grad"])
def test_calls_limit_observers(site: str) -> None:
    net, seen = Net(), []
    with hl.hook(net, site, lambda value, at: seen.append(at.call), calls=[1]):
        for _ in range(3):
            net(torch.ones(1, 3)).sum().backward()
    assert seen == [1]


def test_calls_limit_edits() -> None:
    net, x = Net(), torch.randn(1, 3)
    plain = net(x)
    with hl.edit(net, {"fc1.weight": hl.zero()}, calls=[1]):
        outputs = [net(x) for _ in range(3)]
    assert same(outputs[0], plain)
    assert same(outputs[1], net.fc2(net.act(net.fc1.bias.expand(1, 4))))
    assert same(outputs[2], plain)


def test_edit_of_the_value_leaves_the_parameter_and_its_gradient_right() -> None:
    net, x = Net(), torch.randn(2, 3)
    weight, before = net.fc1.weight, net.fc1.weight.detach().clone()
    with hl.edit(net, {"fc1.weight": hl.scale(3)}):
        y = net(x)
        y.sum().backward()
    assert net.fc1.weight is weight
    assert same(weight.detach(), before)
    copy = weight.detach().clone().requires_grad_()
    right = net.fc2(net.act(nn.functional.linear(x, copy * 3, net.fc1.bias)))
    assert same(y, right)
    assert same(weight.grad, torch.autograd.grad(right.sum(), copy)[0])
    assert is_clean(net)


def test_edited_parameter_follows_the_optimizer() -> None:
    """Each call edits what the parameter is then, not what it was."""
    net, x = Net(), torch.randn(2, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with hl.edit(net, {"fc1.weight": hl.scale(2)}):
        net(x).sum().backward()
        optimizer.step()
        inside = net(x)
    net.fc1.weight.data.mul_(2)
    assert same(inside, net(x))


@pytest.mark.parametrize("first_out", [0, 1])
def test_nested_edits_of_one_parameter_apply_in_turn_and_all_go(first_out: int) -> None:
    net, x = Net(), torch.randn(2, 3)
    weight = net.fc1.weight
    handles = [
        hl.edit(net, {"fc1.weight": hl.add(1)}),
        hl.edit(net, {"fc1.weight": hl.scale(2)}),
    ]
    for _ in range(2):
        y = net(x)
        y.sum().backward()
        right = net.fc2(net.act(nn.functional.linear(x, (weight + 1) * 2, net.fc1.bias)))
        assert same(y, right)
    handles.pop(first_out).remove()
    changed = weight + 1 if first_out else weight * 2
    right = net.fc2(net.act(nn.functional.linear(x, changed, net.fc1.bias)))
    assert same(net(x), right)
    handles.pop().remove()
    assert net.fc1.weight is weight


def test_two_edits_of_one_parameter_in_one_list() -> None:
    net, x = Net(), torch.randn(2, 3)
    weight = net.fc1.weight
    with hl.edit(net, [("fc1.weight", hl.add(1)), ("fc1.weight", hl.scale(2))]):
        for _ in range(2):
            y = net(x)
            y.sum().backward()
    assert same(y, net.fc2(net.act(nn.functional.linear(x, (weight + 1) * 2, net.fc1.bias))))
    assert net.fc1.weight is weight


def test_shared_parameter_is_edited_in_all_its_places() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    shared = net[0].weight
    with hl.edit(net, {"1.weight": hl.zero()}):
        y = net(torch.ones(1, 2))
        assert net[0].weight is net[1].weight
    assert same(y, net[1].bias[None])
    assert net[0].weight is net[1].weight is shared


def test_parameter_exchanged_meanwhile_is_left_alone() -> None:
    net = Net()
    handle = hl.edit(net, {"fc1.weight": hl.scale(2)})
    net(torch.ones(1, 3))
    mine = nn.Parameter(torch.zeros(4, 3))
    net.fc1.weight = mine
    handle.remove()
    assert net.fc1.weight is mine


def test_edit_of_the_gradient_is_what_the_optimizer_sees() -> None:
    net, x = Net(), torch.ones(1, 3)
    net(x).sum().backward()
    plain = net.fc1.weight.grad.clone()
    net.zero_grad()
    with hl.edit(net, {"fc1.weight:grad": hl.scale(-1)}):
        net(x).sum().backward()
    assert same(net.fc1.weight.grad, -plain)
    assert not net.fc1.weight.grad.requires_grad


@pytest.mark.parametrize("site", ["fc1.weight", "fc1.weight:grad"])
def test_order_of_observers_and_edits_is_that_of_every_site(site: str) -> None:
    net, seen = Net(), []

    def note(name: str) -> Any:
        def hook(value: Tensor, at: hl.At) -> Any:
            seen.append((name, value.flatten()[0].item()))
            return value + 1

        return hook

    hl.hook(net, site, note("observer"))
    hl.hook(net, site, note("edit 1"), edit=True)
    hl.hook(net, site, note("edit 0"), edit=True, prepend=True)
    hl.hook(net, site, note("before"), before_edits=True)
    net(torch.ones(1, 3)).sum().backward()
    assert [name for name, _ in seen] == ["before", "edit 0", "edit 1", "observer"]
    values = [value for _, value in seen]
    assert [round(value - values[0]) for value in values] == [0, 0, 1, 2]


def test_capture_around_an_edit_sees_what_flowed() -> None:
    net = Net()
    with (
        hl.capture(net, "fc1.weight") as got,
        hl.capture(net, "fc1.weight", before_edits=True) as before,
        hl.edit(net, {"fc1.weight": hl.zero()}),
    ):
        net(torch.ones(1, 3))
    assert not got["fc1.weight"].any()
    assert same(before["fc1.weight"], net.fc1.weight.detach())


@pytest.mark.parametrize("site", ["fc1.weight", "fc1.weight:grad"])
def test_edit_that_does_not_fit_names_the_parameter(site: str) -> None:
    net = Net()
    weight = net.fc1.weight
    hl.hook(net, site, lambda value, at: value[0], edit=True)
    with pytest.raises(hl.EditError) as caught:
        net(torch.ones(1, 3)).sum().backward()
    assert str(caught.value) == (
        f"the edit at `{site}`, call 0, visit 0 returned shape (3,) for (4, 3). "
        "Return a tensor of the same shape, e.g. new.expand_as(value)."
    )
    assert net.fc1.weight is weight


def test_lazy_parameter_is_followed_from_its_first_call_on() -> None:
    net, seen = nn.Sequential(nn.LazyLinear(2)), []
    with hl.hook(net, "0.weight:grad", lambda grad, at: seen.append(tuple(grad.shape))):
        net(torch.ones(1, 3))
        net(torch.ones(1, 3)).sum().backward()
    assert seen == [(2, 3)]


def test_parameter_that_is_gone_is_told() -> None:
    net = Net()
    hl.hook(net, "fc1.weight", print)
    del net.fc1.weight
    with pytest.raises(hl.NoSuchSite, match=r"`fc1\.weight` is gone: the parameter was removed"):
        net(torch.ones(1, 3))


def test_removed_handle_leaves_no_hook_on_the_parameter() -> None:
    net = Net()
    handle = hl.hook(net, "**.weight:grad", print)
    assert not is_clean(net)
    handle.remove()
    assert is_clean(net)


def test_part_of_the_model_called_alone_sees_the_parameter_as_it_is_then() -> None:
    net, x = Net(), torch.ones(1, 3)
    weight = net.fc1.weight
    with hl.edit(net, {"fc1.weight": hl.scale(2)}):
        net.fc1(x).sum().backward()
        net.fc1(x).sum().backward()
        weight.data.zero_()
        assert same(net.fc1(x), net.fc1.bias[None])
    assert net.fc1.weight is weight
