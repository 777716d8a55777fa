"""An observer changes nothing, whatever it does; a hook that fails says where and goes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from small_models import Branches, Lazy, Net, WithLazy, Wrapped, is_clean, same
from torch import Tensor, nn

import hookline as hl


class Noisy(nn.Module):
    """Dropout after a layer: it draws random numbers after the hook ran."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.fc(x), 0.5, True)


def test_return_of_an_observer_is_ignored() -> None:
    net, x = Net(), torch.randn(1, 3)
    plain = net(x)
    with hl.hook(net, "fc1", lambda value, at: value * 0):
        assert same(net(x), plain)


@pytest.mark.parametrize("site", ["fc1", "fc1:input", "fc2:input.input"])
def test_change_in_place_raises(site: str) -> None:
    net = Net()

    def spoil(value: Any, at: hl.At) -> None:
        (value["input"] if isinstance(value, dict) else value).mul_(2)

    handle = hl.hook(net, site, spoil)
    with pytest.raises(hl.HooklineError, match="changed the value in place; a hook only looks"):
        net(torch.ones(1, 3))
    assert not handle.is_live
    assert is_clean(net)


def test_change_in_place_of_a_gradient_raises() -> None:
    net = Net()
    hl.hook(net, "fc1:output.grad", lambda grad, at: grad.zero_())
    loss = net(torch.ones(1, 3)).sum()
    with pytest.raises(hl.HooklineError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "the hook at `fc1:output.grad`, call 0, visit 0 changed the value in place; a hook only "
        "looks. To change values use hl.edit, or hl.hook(..., edit=True)."
    )


def test_change_in_place_of_an_inference_tensor_raises_and_reaches_nothing() -> None:
    net, x = Net(), torch.randn(1, 3)
    plain = net(x)
    handle = hl.hook(net, "fc1", lambda value, at: value.add_(1))
    with torch.inference_mode():
        with pytest.raises(hl.HooklineError, match="changed the value in place"):
            net(x)
        assert not handle.is_live
        assert same(net(x), plain)


def test_containers_given_to_an_observer_are_its_own() -> None:
    model = Wrapped(Branches())
    with hl.hook(model, "inner", lambda value, at: value.clear()):
        assert list(model(torch.ones(1))) == ["a", "b", "n", "none"]
    with hl.hook(model, "inner:input", lambda value, at: value.clear()):
        assert model(torch.ones(1))["a"].item() == 2


def test_random_numbers_of_an_observer_do_not_disturb_the_model() -> None:
    net, x = Noisy(), torch.ones(2, 3)
    torch.manual_seed(3)
    plain = net(x)
    after = torch.rand(1)
    torch.manual_seed(3)
    with hl.hook(net, "fc", lambda value, at: torch.randn(100)):
        assert same(net(x), plain)
    assert same(torch.rand(1), after)


def test_grad_and_autocast_are_off_inside_and_back_afterwards() -> None:
    net, inside = Net(), []

    def look(value: Tensor, at: hl.At) -> None:
        product = value @ value.T
        inside.append((value.requires_grad, torch.is_grad_enabled(), product.dtype))

    with hl.hook(net, "fc1:input.input", look), torch.autocast("cpu", torch.bfloat16):
        y = net(torch.ones(1, 3, requires_grad=True))
        assert torch.is_autocast_enabled("cpu")
    assert inside == [(False, False, torch.float32)]
    assert y.requires_grad
    assert y.dtype == torch.bfloat16


def test_grad_and_autocast_come_back_after_an_error() -> None:
    net = Net()
    hl.hook(net, "fc1", lambda value, at: 1 / 0)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ZeroDivisionError):
            net(torch.ones(1, 3))
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()


def test_keep_graph_gives_the_value_that_flows() -> None:
    net, seen, outputs = Net(), [], []
    net.fc1.register_forward_hook(lambda module, args, out: outputs.append(out))
    with hl.hook(net, "fc1", lambda value, at: seen.append(value), keep_graph=True):
        net(torch.ones(1, 3))
    assert seen[0] is outputs[0]
    assert seen[0].requires_grad


def test_observing_keeps_the_output_object() -> None:
    model, x = Wrapped(nn.Identity()), torch.ones(1)
    with hl.hook(model, "inner", lambda value, at: None):
        assert model(x) is x


def test_error_in_a_hook_gains_a_note_and_closes_the_handle() -> None:
    net = Net()
    handle = hl.hook(net, ["fc1", "fc2"], lambda value, at: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        net(torch.ones(1, 3))
    assert caught.value.__notes__ == [
        "in a hook of hl.hook(['fc1', 'fc2']) at `fc1:output`, call 0, visit 0; "
        "the hook was removed"
    ]
    assert not handle.is_live
    assert is_clean(net)
    net(torch.ones(1, 3))


def test_error_in_a_gradient_hook_reaches_backward_with_a_note() -> None:
    net = Net()
    handle = hl.hook(net, "fc1:output.grad", lambda grad, at: random.choice([]))
    loss = net(torch.ones(1, 3)).sum()
    with pytest.raises(IndexError) as caught:
        loss.backward()
    assert "at `fc1:output.grad`, call 0, visit 0" in caught.value.__notes__[0]
    assert not handle.is_live


def test_interrupt_in_the_middle_leaves_hooks_that_count_on() -> None:
    net, seen = Net(), []
    stop = True

    def interrupt(module: nn.Module, args: Any) -> None:
        if stop:
            raise KeyboardInterrupt

    net.act.register_forward_pre_hook(interrupt)
    handle = hl.hook(net, "**", lambda value, at: seen.append((at.path, at.call, at.visit)))
    with pytest.raises(KeyboardInterrupt):
        net(torch.ones(1, 3))
    stop = False
    net(torch.ones(1, 3))
    assert seen == [
        ("fc1", 0, 0),
        *[(path, 1, 0) for path in ("fc1", "act", "fc2", "")],
    ]
    handle.remove()
    net.act._forward_pre_hooks.clear()
    assert is_clean(net)


def test_error_of_the_model_itself_passes_through_unchanged() -> None:
    net, seen = Net(), []
    with hl.hook(net, "**", lambda value, at: seen.append(at.path)):
        with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
            net(torch.ones(1, 5))
        assert seen == []
        net(torch.ones(1, 3))
    assert not hasattr(caught.value, "__notes__")
    assert seen == ["fc1", "act", "fc2", ""]


def test_unknown_address_names_the_nearest() -> None:
    with pytest.raises(hl.NoSuchSite) as caught:
        hl.hook(Net(), "fcl", print)
    assert str(caught.value) == (
        "`fcl` matches no site in `Net` (4 sites). Nearest: `fc2`, `fc1`. "
        "List them with `hl.sites(model)`."
    )


def test_bad_grammar_marks_the_position() -> None:
    with pytest.raises(hl.AddressError) as caught:
        hl.hook(Net(), "fc1:outptu", print)
    assert str(caught.value) == (
        "unknown port `outptu`; the ports are `input`, `output`, `grad` and `local_grad`. "
        "Nearest: `output`.\n"
        "    fc1:outptu\n"
        "        ^"
    )


def test_unknown_argument_is_told_when_attaching() -> None:
    with pytest.raises(hl.NoSuchSite) as caught:
        hl.hook(Net(), "fc1:input.x", print)
    assert str(caught.value) == (
        "`fc1:input.x`: `Linear.forward` has no argument `x`. It takes: `input`."
    )


def test_unknown_leaf_of_an_output_is_told_when_it_runs() -> None:
    model = Wrapped(Branches())
    hl.hook(model, "inner:output.c", print)
    with pytest.raises(hl.NoSuchSite) as caught:
        model(torch.ones(1))
    assert str(caught.value) == (
        "`inner:output.c`, call 0, visit 0: there is no `.c` in it. "
        "Tensors there: .a, .b[0], .b[1][0]."
    )


def test_generator_forward_is_refused_by_name_and_left_out_of_patterns() -> None:
    model, seen = WithLazy(), []
    with pytest.raises(hl.UnsupportedModel) as caught:
        hl.hook(model, "lazy", print)
    assert str(caught.value) == (
        "`lazy` (Lazy): its forward is a generator, which returns before its body runs, so there "
        "is no output to see at the module's border. Attach to its variables (`lazy@name`), or to "
        "the modules it calls."
    )
    with hl.hook(model, "*", lambda value, at: seen.append(at.path)):
        model(torch.ones(1, 3))
    assert seen == ["fc"]
    with pytest.raises(hl.UnsupportedModel, match="is a generator"):
        hl.hook(model, "laz*", print)
    with pytest.raises(hl.UnsupportedModel, match="is a generator"):
        hl.register_forward_hook(model, Lazy, print)


def test_scripted_module_is_refused() -> None:
    scripted = torch.jit.script(nn.Linear(1, 1))
    with pytest.raises(hl.UnsupportedModel) as caught:
        hl.hook(nn.Sequential(scripted), "**", print)
    assert str(caught.value) == (
        "`0` (RecursiveScriptModule) is a TorchScript module: Python hooks on it do not run where "
        "the script calls it. Attach to the model as it was before torch.jit.script or "
        "torch.jit.trace."
    )


@pytest.mark.parametrize("thing", [torch.ones(1), len, None.__class__, {"model": 1}])
def test_what_is_no_module_is_refused(thing: Any) -> None:
    with pytest.raises(hl.UnsupportedModel) as caught:
        hl.capture(thing, "fc1")
    assert str(caught.value) == (
        f"a model is a torch.nn.Module; this is {type(thing).__qualname__}. "
        "For one tensor there is hl.register_hook(tensor, fn)."
    )
