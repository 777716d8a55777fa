"""`hl.hook` at every kind of site: what it gets, what `at` says, in which order, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Branches, Mixer, Net, Twice, Wrapped, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl


def keep(into: list[Any]) -> Any:
    """Make a hook that keeps each value and a description of where it was."""

    def hook(value: Any, at: hl.At) -> None:
        into.append((value, at.address, at.call, at.visit))

    return hook


def test_output_is_what_the_module_returned() -> None:
    net, x, seen = Net(), torch.randn(2, 3), []
    with hl.hook(net, "fc1", keep(seen)):
        net(x)
    ((value, address, call, visit),) = seen
    assert same(value, net.fc1(x))
    assert (address, call, visit) == ("fc1:output", 0, 0)


def test_input_is_a_dict_by_argument_name() -> None:
    model, seen = Wrapped(Mixer()), []
    x, y, scale = torch.randn(2), torch.randn(2), torch.randn(2)
    with hl.hook(model, "inner:input", keep(seen)):
        model(x, y, scale=scale)
        model(y=y, x=x)
    assert list(seen[0][0]) == ["x", "y", "scale"]
    assert same(seen[0][0]["scale"], scale)
    assert same(seen[1][0]["x"], x)


def test_leaf_of_input_and_output_is_one_value() -> None:
    model, x, seen = Wrapped(Branches()), torch.randn(2), []
    sites = ["inner:input.x", "inner:output.b[1][0]", 'inner:output["n"]']
    with hl.hook(model, sites, keep(seen)):
        model(x)
    assert [address for _, address, _, _ in seen] == [
        "inner:input.x",
        "inner:output.b[1][0]",
        "inner:output.n",
    ]
    assert same(seen[0][0], x)
    assert same(seen[1][0], x * 3)
    assert seen[2][0] == 7


def test_root_is_the_empty_path() -> None:
    net, x, seen = Net(), torch.randn(2, 3), []
    with hl.hook(net, ["", ":input.x"], keep(seen)):
        y = net(x)
    assert [address for _, address, _, _ in seen] == [":input.x", ":output"]
    assert same(seen[1][0], y)


def test_output_gradient_is_that_of_torch() -> None:
    net, x, seen, right = Net(), torch.randn(2, 3), [], []
    with hl.hook(net, "fc1:output.grad", keep(seen)):
        net(x).pow(2).sum().backward()
    net.fc1.register_forward_hook(
        lambda *a: a[2].register_hook(lambda grad: right.append(grad)) and None
    )
    net(x).pow(2).sum().backward()
    assert same(seen[0][0], right[0])
    assert seen[0][1] == "fc1:output.grad"


def test_input_gradient_is_this_modules_part_alone() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(2, 2, bias=False)
            self.right = nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x).sum() + 10 * self.right(x).sum()

    fork, seen = Fork(), []
    x = torch.randn(1, 2, requires_grad=True)
    with hl.hook(fork, "left:input.grad", keep(seen)):
        fork(x).backward()
    assert torch.equal(seen[0][0], fork.left.weight.sum(0, keepdim=True))
    assert seen[0][1] == "left:input.input.grad"


def test_gradients_of_a_nested_value_come_tensor_by_tensor() -> None:
    model, seen = Wrapped(Branches()), []
    x = torch.randn(2, requires_grad=True)
    with hl.hook(model, "inner:output.grad", keep(seen)):
        out = model(x)
        (out["a"] + 5 * out["b"][1][0]).sum().backward()
    assert {address: value.tolist() for value, address, _, _ in seen} == {
        "inner:output.a.grad": [1, 1],
        "inner:output.b[1][0].grad": [5, 5],
    }


def test_gradient_of_one_leaf_leaves_the_others_alone() -> None:
    model, seen = Wrapped(Mixer()), []
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    with hl.hook(model, "inner:input.y.grad", keep(seen)):
        model(x, y).sum().backward()
    assert [address for _, address, _, _ in seen] == ["inner:input.y.grad"]
    assert seen[0][0].tolist() == [1, 1]


def test_missing_stands_for_a_gradient_that_autograd_did_not_make() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return x * 2

    model, seen = Wrapped(First()), []
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    with hl.hook(model, "inner:input.grad", keep(seen)):
        model(x, y).sum().backward()
    found = {address: value for value, address, _, _ in seen}
    assert found["inner:input.unused.grad"] is hl.MISSING
    assert found["inner:input.x.grad"].item() == 2
    assert not hl.MISSING
    assert repr(hl.MISSING) == "hl.MISSING"


def test_at_names_every_path_of_a_shared_module() -> None:
    shared = nn.Linear(2, 2)
    model, seen = nn.Sequential(shared, nn.ReLU(), shared), []
    with hl.hook(model, "2", lambda value, at: seen.append((at.names, at.path, at.visit))):
        model(torch.ones(1, 2))
    assert seen == [(("0", "2"), "0", 0), (("0", "2"), "0", 1)]


def test_at_says_module_port_leaf_and_prints() -> None:
    net, seen = Net(), []
    with hl.hook(net, ["fc1", "fc1:input.input"], lambda value, at: seen.append(at)):
        net(torch.ones(1, 3))
    before, after = seen
    assert (before.port, before.leaf, before.is_grad) == ("input", ("input",), False)
    assert (after.port, after.leaf, after.recompute) == ("output", (), False)
    assert after.module is net.fc1
    assert repr(after) == "<At fc1:output, call 0, visit 0>"


def test_at_has_the_inputs_only_while_the_hook_runs() -> None:
    model, seen = Wrapped(Mixer()), []
    x, y = torch.ones(1), torch.zeros(1)

    def look(value: Tensor, at: hl.At) -> None:
        seen.append((at, at.inputs))

    with hl.hook(model, ["inner", "inner:input"], look):
        model(x, y=y)
    assert seen[0][1] is None
    assert seen[1][1] == {"x": x, "y": y}
    assert seen[1][0].inputs is None


def test_calls_and_visits_are_counted_and_filtered() -> None:
    model, x = Twice(), torch.randn(1, 3)
    every: list[Any] = []
    some: list[Any] = []
    hl.hook(model, "fc", keep(every))
    hl.hook(model, "fc", keep(some), visits=1, calls=[0, 2])
    hl.hook(model, "fc:output.grad", keep(some), visits={0}, calls=range(1, 2))
    for _ in range(3):
        model(x).sum().backward()
    assert [when[2:] for when in every] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [when[1:] for when in some] == [
        ("fc:output", 0, 1),
        ("fc:output.grad", 1, 0),
        ("fc:output", 2, 1),
    ]


def test_recompute_is_marked_and_keeps_call_and_visit() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(checkpoint(lambda h: self.act(self.fc1(h)), x, use_reentrant=False))

    net, seen = Checkpointed(), []
    with hl.hook(net, "fc1", lambda value, at: seen.append((at.call, at.visit, at.recompute))):
        net(torch.ones(1, 3)).sum().backward()
    assert seen == [(0, 0, False), (0, 0, True)]


def test_edit_returns_the_new_value_and_keep_leaves_it() -> None:
    net, x = Net(), torch.randn(2, 3)
    plain, doubled = net(x), net.fc2(net.act(net.fc1(x) * 2))
    with hl.hook(net, "fc1", lambda value, at: value * 2, edit=True):
        assert same(net(x), doubled)
    with hl.hook(net, "fc1", lambda value, at: hl.KEEP, edit=True):
        assert same(net(x), plain)
    assert not hl.KEEP
    assert repr(hl.KEEP) == "hl.KEEP"


def test_edit_sees_the_graph_and_gradients_flow_through_it() -> None:
    net, x = Net(), torch.randn(2, 3, requires_grad=True)
    with hl.hook(net, "fc1", lambda value, at: value * 2, edit=True):
        net(x).sum().backward()
    right = net.fc2(net.act(net.fc1(x.detach().requires_grad_()) * 2)).sum()
    assert same(net.fc1.weight.grad, torch.autograd.grad(right, net.fc1.weight)[0])


def test_gradient_edit_changes_what_flows_on() -> None:
    net, x = Net(), torch.randn(2, 3)
    net(x).sum().backward()
    plain = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with hl.hook(net, "act:output.grad", lambda grad, at: grad * 0, edit=True):
        net(x).sum().backward()
    assert not net.fc1.weight.grad.any()
    assert same(net.fc2.weight.grad, plain[2])


def test_order_is_before_edits_then_edits_then_observers() -> None:
    net, seen = Net(), []

    def note(name: str) -> Any:
        def hook(value: Tensor, at: hl.At) -> Any:
            seen.append((name, value.flatten()[0].item()))
            return value + 1

        return hook

    hl.hook(net, "fc1", note("observer"))
    hl.hook(net, "fc1", note("edit 1"), edit=True)
    hl.hook(net, "fc1", note("edit 2"), edit=True)
    hl.hook(net, "fc1", note("edit 0"), edit=True, prepend=True)
    hl.hook(net, "fc1", note("before"), before_edits=True)
    hl.hook(net, "fc1", note("observer 0"), prepend=True)
    x = torch.randn(1, 3)
    start = torch.nn.functional.linear(x, net.fc1.weight, net.fc1.bias).flatten()[0].item()
    net(x)
    names = [name for name, _ in seen]
    assert names == ["before", "edit 0", "edit 1", "edit 2", "observer 0", "observer"]
    assert [round(value - start) for _, value in seen] == [0, 0, 1, 2, 3, 3]


def test_before_edits_and_edit_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="an edit cannot run before edits"):
        hl.hook(Net(), "fc1", lambda value, at: value, edit=True, before_edits=True)


def test_removal_between_forward_and_backward_takes_effect_at_once() -> None:
    net, seen = Net(), []
    handle = hl.hook(net, "fc1:output.grad", keep(seen))
    edit = hl.hook(net, "fc1:output.grad", lambda grad, at: grad * 0, edit=True)
    loss = net(torch.ones(1, 3)).sum()
    handle.remove()
    edit.remove()
    loss.backward()
    assert seen == []
    assert net.fc1.weight.grad.any()


def test_hook_without_a_model_is_on_every_module() -> None:
    seen: list[Any] = []
    net, other = Net(), nn.Linear(3, 3)
    with hl.hook(None, nn.Linear, keep(seen)):
        net(torch.ones(1, 3))
        other(torch.ones(1, 3))
    assert [(address, call, visit) for _, address, call, visit in seen] == [
        ("Linear:output", 0, 0),
        ("Linear:output", 0, 0),
        ("Linear:output", 1, 0),
    ]
    with pytest.raises(hl.AddressError, match="with model=None there are no paths: `fc1`"):
        hl.hook(None, "fc1", keep(seen))
