"""What `hl.edit` refuses, and that it leaves nothing behind then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Net, WithLazy, is_clean, same

import hookline as hl


def test_nothing_to_edit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there is nothing to edit: give \{address: action\}"):
        hl.edit(Net(), {})


@pytest.mark.parametrize("action", [0, None, "zero", torch.ones(1)])
def test_value_in_place_of_an_action_is_refused(action: Any) -> None:
    net = Net()
    with pytest.raises(TypeError) as caught:
        hl.edit(net, {"fc1": action})
    assert str(caught.value) == (
        "`fc1:output`: an edit is an action such as hl.scale(0), or a function of (value, at); "
        f"not {type(action).__qualname__}. For a value there is hl.set."
    )
    assert is_clean(net)


def test_unknown_address_is_refused_and_leaves_nothing() -> None:
    net = Net()
    with pytest.raises(hl.NoSuchSite, match="`fc3` matches no site in `Net`"):
        hl.edit(net, {"fc1": hl.zero(), "fc3": hl.zero()})
    assert is_clean(net)


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(hl.NoSuchSite, match=r"`Linear\.forward` has no argument `x`"):
        hl.edit(Net(), {"fc1:input.x": hl.zero()})


def test_generator_is_refused_by_name_and_left_out_of_patterns() -> None:
    model = WithLazy()
    with pytest.raises(hl.UnsupportedModel, match="its forward is a generator"):
        hl.edit(model, {"lazy": hl.zero()})
    with hl.edit(model, {"*": hl.zero()}):
        assert not model(torch.ones(1, 3)).any()
    assert is_clean(model)


def test_error_in_an_edit_gains_a_note_and_removes_all_edits() -> None:
    net, x = Net(), torch.randn(1, 3)
    plain = net(x)
    handle = hl.edit(net, {"fc1": hl.scale(2), "act": lambda value, at: 1 / 0})
    with pytest.raises(ZeroDivisionError) as caught:
        net(x)
    assert caught.value.__notes__ == [
        "in a hook of hl.edit(fc1, act) at `act:output`, call 0, visit 0; the hook was removed"
    ]
    assert not handle.is_live
    assert is_clean(net)
    assert same(net(x), plain)


def test_value_that_does_not_broadcast_names_the_site() -> None:
    net = Net()
    hl.edit(net, {"fc1": hl.add(torch.ones(5))})
    with pytest.raises(
        hl.EditError, match=r"add\(tensor\(5,\)\) does not fit `fc1:output`"
    ) as caught:
        net(torch.ones(1, 3))
    assert "hl.edit(fc1) at `fc1:output`, call 0, visit 0" in caught.value.__notes__[0]


def test_edit_of_an_inference_tensor_works() -> None:
    net, x = Net(), torch.randn(1, 3)
    right = net.fc2(net.act(net.fc1(x) * 2))
    with hl.edit(net, {"fc1": hl.scale(2)}), torch.inference_mode():
        assert torch.equal(net(x), right)


def test_action_without_brackets_says_so() -> None:
    with pytest.raises(TypeError, match=r"write hl.zero\(...\), with brackets"):
        hl.edit(Net(), {"fc1": hl.zero})


@pytest.mark.parametrize("which", ["first", 1.5, slice(-1, None), True])
def test_visits_that_select_nothing_are_refused_at_once(which: Any) -> None:
    net = Net()
    for attach in (
        lambda: hl.edit(net, {"fc1": hl.zero()}, visits=which),
        lambda: hl.hook(net, "fc1", print, calls=which),
        lambda: hl.capture(net, "fc1", visits=which),
        lambda: hl.zero().where(calls=which),
    ):
        with pytest.raises(TypeError, match="selects nothing: give a number"):
            attach()
    assert not len(hl.inventory(net))


def test_slice_of_calls_is_followed() -> None:
    net, seen = Net(), []
    with hl.hook(net, "fc1", lambda value, at: seen.append(at.call), calls=slice(1, None, 2)):
        for _ in range(5):
            net(torch.ones(1, 3))
    assert seen == [1, 3]


def test_hook_that_is_no_function_is_refused_at_once() -> None:
    net = Net()
    for attach in (hl.hook, hl.register_forward_hook, hl.register_backward_hook):
        with pytest.raises(TypeError, match="takes a function, not NoneType"):
            attach(net, "fc1", None)
