"""`hl.patch`: values of another run put into this one."""

from __future__ import annotations

import pytest
import torch
from small_models import Branches, Net, Twice, Wrapped, same
from torch import nn

import hookline as hl


def test_patched_value_is_that_of_the_other_run() -> None:
    net, clean, other = Net(), torch.randn(2, 3), torch.randn(2, 3)
    with hl.capture(net, "fc1") as got:
        right = net(clean)
    with hl.edit(net, {"fc1": hl.patch(got)}):
        assert same(net(other), right)


def test_patch_of_rows_leaves_the_others() -> None:
    net, clean, other = Net(), torch.randn(2, 3), torch.randn(2, 3)
    with hl.capture(net, "fc1") as got:
        right = net(clean)
    plain = net(other)
    with hl.edit(net, {"fc1": hl.patch(got).where(rows=0)}):
        y = net(other)
    assert torch.allclose(y[0], right[0])
    assert torch.allclose(y[1], plain[1])


def test_patch_takes_the_same_visit_unless_told() -> None:
    model, x = Twice(), torch.randn(1, 3)
    with hl.capture(model, "fc") as got:
        right = model(x)
    with (
        hl.edit(model, {"fc": hl.patch(got)}),
        hl.capture(model, "fc") as same_visit,
    ):
        assert same(model(torch.zeros(1, 3)), right.detach())
    assert same(same_visit["fc", 0].output, got["fc", 0].output)
    with hl.edit(model, {"fc": hl.patch(got, visit=0)}):
        assert same(model(x), got["fc", 0].output)


def test_patch_chooses_a_call_and_another_address() -> None:
    net, x = Net(), torch.randn(1, 3)
    with hl.capture(net, "act") as got:
        net(x)
        net(x * 2)
    with hl.edit(net, {"fc1": hl.patch(got, "act:output", call=1)}), hl.capture(net, "fc1") as seen:
        net(x)
    assert same(seen["fc1"].output, got.calls[1]["act"].output)
    hl.edit(net, {"act": hl.patch(got)})
    with pytest.raises(hl.AmbiguousRead, match="`act` was captured in 2 calls; choose one"):
        net(x)


def test_patch_reaches_leaves_inputs_and_gradients() -> None:
    model, x = Wrapped(Branches()), torch.randn(2, requires_grad=True)
    with hl.capture(model, "inner", "inner:input", grads=True) as got:
        out = model(x)
        (out["a"] * 3).sum().backward()
    with hl.edit(model, {"inner:output.b[1][0]": hl.patch(got), "inner:input.x": hl.patch(got)}):
        new = model(torch.zeros(2))
    assert same(new["b"][1][0], (x * 3).detach())
    assert same(new["a"], (x + 1).detach())
    x.grad = None
    with hl.edit(model, {"inner:output.a.grad": hl.patch(got)}):
        model(x)["a"].sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_patch_puts_back_an_earlier_parameter() -> None:
    net, x = Net(), torch.randn(1, 3)
    with hl.capture(net, "fc1.weight", "fc1.weight:grad") as got:
        before = net(x)
        before.sum().backward()
    torch.optim.SGD(net.parameters(), lr=1.0).step()
    nn.init.zeros_(net.fc1.weight)
    changed = net.fc1.weight.detach().clone()
    with hl.edit(net, {"fc1.weight": hl.patch(got)}), hl.capture(net, "fc1.weight") as seen:
        net(x)
    assert same(seen["fc1.weight"], got["fc1.weight"])
    assert same(net.fc1.weight.detach(), changed)
    net.zero_grad()
    with hl.edit(net, {"fc1.weight:grad": hl.patch(got)}):
        net(x).sum().backward()
    assert same(net.fc1.weight.grad, got["fc1.weight:grad"])


def test_patch_of_what_is_not_there_is_told_with_a_note() -> None:
    net = Net()
    with hl.capture(net, "fc1") as got:
        net(torch.ones(1, 3))
    handle = hl.edit(net, {"fc2": hl.patch(got)})
    with pytest.raises(hl.NotCaptured, match="`fc2` was not asked for in this capture") as caught:
        net(torch.ones(1, 3))
    assert "at `fc2:output`, call 0, visit 0" in caught.value.__notes__[0]
    assert not handle.is_live


def test_patch_of_another_shape_is_told() -> None:
    net = Net()
    with hl.capture(net, "fc1") as got:
        net(torch.ones(1, 3))
    hl.edit(net, {"fc1": hl.patch(got)})
    with pytest.raises(hl.EditError, match=r"returned shape \(1, 4\) for \(2, 4\)"):
        net(torch.ones(2, 3))


def test_patch_of_a_nested_value_asks_for_a_leaf() -> None:
    model, net = Wrapped(Branches()), Net()
    with hl.capture(model, "inner") as got:
        model(torch.ones(1))
    hl.edit(net, {"fc1": hl.patch(got, "inner:output")})
    with pytest.raises(hl.EditError) as caught:
        net(torch.ones(1, 3))
    assert str(caught.value) == (
        "patch at `fc1:output`: `inner:output` is no single tensor; name a leaf in `address`."
    )


def test_patch_takes_a_capture_only() -> None:
    with pytest.raises(TypeError) as caught:
        hl.patch(torch.ones(1))
    assert str(caught.value) == (
        "hl.patch takes what a capture gave (`with hl.capture(...) as got`), not Tensor. "
        "For a tensor there is hl.set."
    )


def test_patch_of_a_call_that_was_not_captured_is_told() -> None:
    net = Net()
    with hl.capture(net, "fc1") as got:
        net(torch.ones(1, 3))
    hl.edit(net, {"fc1": hl.patch(got, call=3)})
    with pytest.raises(hl.EditError) as caught:
        net(torch.ones(1, 3))
    assert str(caught.value) == "patch at `fc1:output`: there is no call 3; 1 were captured."
