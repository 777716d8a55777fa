"""Torch's own forward hooks over patterns: signatures, order, returns, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import Mixer, Net, Wrapped, is_clean, same
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import hookline as hl


def test_forward_hook_has_torchs_signature_and_sees_the_same() -> None:
    net, x, mine, torchs = Net(), torch.randn(1, 3), [], []
    net.fc1.register_forward_hook(lambda *given: torchs.append(given))
    with hl.register_forward_hook(net, "fc1", lambda *given: mine.append(given)):
        net(x)
    (module, args, output), (module_t, args_t, output_t) = mine[0], torchs[0]
    assert module is module_t
    assert args[0] is args_t[0]
    assert output is output_t


def test_forward_hook_over_a_pattern_runs_at_each_module() -> None:
    net, seen = Net(), []
    with hl.register_forward_hook(net, "fc*", lambda module, *_: seen.append(module)):
        net(torch.ones(1, 3))
    assert seen == [net.fc1, net.fc2]


def test_forward_hook_return_replaces_the_output_as_it_is() -> None:
    net, x = Net(), torch.randn(1, 3)
    with hl.register_forward_hook(net, "act", lambda module, args, out: out * 0):
        assert same(net(x), net.fc2.bias[None])
    with hl.register_forward_hook(net, "", lambda module, args, out: {"wrapped": out}):
        assert list(net(x)) == ["wrapped"]
    with hl.register_forward_hook(net, "act", lambda module, args, out: None):
        assert same(net(x), net.fc2(net.act(net.fc1(x))))


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_keyword_arguments_reach_forward_hooks(with_kwargs: bool) -> None:
    model, seen = Wrapped(Mixer()), []
    x, y, scale = torch.ones(1), torch.zeros(1), torch.full((1,), 2.0)
    hl.register_forward_pre_hook(
        model, "inner", lambda *given: seen.append(given[1:]), with_kwargs=with_kwargs
    )
    hl.register_forward_hook(
        model, "inner", lambda *given: seen.append(given[1:-1]), with_kwargs=with_kwargs
    )
    model(x, y=y, scale=scale)
    model(x=x, y=y)
    if with_kwargs:
        expected = [((x,), {"y": y, "scale": scale})] * 2 + [((), {"x": x, "y": y})] * 2
    else:
        expected = [((x, y, scale),)] * 2 + [((x, y),)] * 2
    assert seen == expected


def test_pre_hook_return_replaces_the_arguments() -> None:
    net, x = Net(), torch.randn(1, 3)
    with hl.register_forward_pre_hook(net, "fc2", lambda module, args: args[0] * 0):
        assert same(net(x), net.fc2.bias[None])
    with hl.register_forward_pre_hook(net, "fc2", lambda module, args: (args[0] * 0,)):
        assert same(net(x), net.fc2.bias[None])


def test_pre_hook_return_replaces_keyword_arguments_in_their_order() -> None:
    model, x, y = Wrapped(Mixer()), torch.ones(1), torch.zeros(1)
    plain = model(y, x)
    with hl.register_forward_pre_hook(model, "inner", lambda module, args: args[::-1]):
        assert same(model(x=x, y=y), plain)
        assert same(model(x, y=y), plain)
    swap = hl.register_forward_pre_hook(
        model, "inner", lambda module, args, kwargs: ((y,), {"y": x}), with_kwargs=True
    )
    with swap:
        assert same(model(x=x, y=y), plain)


def test_order_is_that_of_attaching_and_prepend_goes_first() -> None:
    net, seen = Net(), []

    def note(name: str) -> Any:
        return lambda *_: seen.append(name)

    for register in (hl.register_forward_pre_hook, hl.register_forward_hook):
        for name in ("a", "b"):
            register(net, "fc1", note(name))
        register(net, "fc1", note("first"), prepend=True)
    net(torch.ones(1, 3))
    assert seen == ["first", "a", "b"] * 2


def test_each_hook_sees_the_return_of_the_one_before() -> None:
    net, seen, x = Net(), [], torch.randn(1, 3)
    plain = net(x)
    hl.register_forward_hook(net, "", lambda module, args, out: out + 1)
    hl.register_forward_hook(net, "", lambda module, args, out: seen.append(out))
    net(x)
    assert same(seen[0], plain + 1)


def test_pre_hook_with_the_wrong_number_of_values_is_refused() -> None:
    model, x, y = Wrapped(Mixer()), torch.ones(1), torch.zeros(1)
    hl.register_forward_pre_hook(model, "inner", lambda module, args: args[0])
    with pytest.raises(hl.EditError) as caught:
        model(x, y=y)
    assert str(caught.value) == (
        "the pre hook at `inner:input`, call 0, visit 0 returned 1 values for 1 positional and 1 "
        "keyword arguments. Return one for each, in that order."
    )


def test_pre_hook_that_returns_a_list_is_refused() -> None:
    net = Net()
    hl.register_forward_pre_hook(net, "fc1", lambda module, args: list(args))
    with pytest.raises(hl.EditError) as caught:
        net(torch.ones(1, 3))
    assert str(caught.value) == (
        "the pre hook at `fc1:input`, call 0, visit 0 returned a list, which may mean one argument "
        "or several. Return a tuple of arguments, or a single value that is no list."
    )


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ((1,), "a tuple of int"),
        (((), 2), "a tuple of tuple, int"),
        ("ab", "a str"),
        ((), "a tuple of nothing"),
    ],
)
def test_pre_hook_with_kwargs_that_returns_something_else_is_refused(
    result: Any, shown: str
) -> None:
    net = Net()
    hl.register_forward_pre_hook(net, "fc1", lambda *_: result, with_kwargs=True)
    with pytest.raises(hl.EditError) as caught:
        net(torch.ones(1, 3))
    assert str(caught.value) == (
        "the pre hook at `fc1:input`, call 0, visit 0 has with_kwargs=True and returned "
        f"{shown}. Return (args, kwargs): a tuple and a dict; or None."
    )


REGISTER = [
    hl.register_forward_pre_hook,
    hl.register_forward_hook,
    hl.register_backward_pre_hook,
    hl.register_backward_hook,
]
each = pytest.mark.parametrize("register", REGISTER, ids=lambda one: one.__name__)


@each
@pytest.mark.parametrize("address", ["fc1:input", "fc1:output[0]", "fc1:output.grad", "fc1.weight"])
def test_address_with_a_port_is_refused(register: Any, address: str) -> None:
    with pytest.raises(hl.AddressError, match="with model=None there are no paths"):
        register(None, address, print)
    model = Net()
    with pytest.raises(hl.AddressError) as caught:
        register(model, address, print)
    assert str(caught.value) == (
        f"hl.{register.__name__} names modules, so `{address}` has no port; "
        "for one port or gradient there is hl.hook"
    )
    assert is_clean(model)


@each
def test_error_in_a_hook_names_the_site_and_removes_it(register: Any) -> None:
    net = Net()
    handle = register(net, "fc1", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        net(torch.ones(1, 3)).sum().backward()
    (note,) = caught.value.__notes__
    assert note.startswith(f"in a hook of hl.{register.__name__}('fc1') at `fc1:")
    assert note.endswith("call 0, visit 0; the hook was removed")
    assert not handle.is_live
    assert is_clean(net)


@each
def test_hook_without_a_model_is_on_every_module_and_leaves_nothing(register: Any) -> None:
    seen: list[str] = []
    net, other = Net(), nn.Linear(3, 3)
    with register(None, nn.Linear, lambda module, *_: seen.append(type(module).__name__)):
        assert torch_module._has_any_global_hook()
        x = torch.ones(1, 3, requires_grad=True)
        net(x).sum().backward()
        other(x).sum().backward()
    assert seen == ["Linear"] * 3
    assert not torch_module._has_any_global_hook()
    assert is_clean(net)


def test_global_hooks_get_and_replace_keyword_arguments() -> None:
    model, x, y = Wrapped(Mixer()), torch.ones(1), torch.zeros(1)
    plain, seen = model(y, x), []

    def swap(module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return (kwargs["y"],), {"y": kwargs["x"]}

    with hl.register_forward_pre_hook(None, Mixer, swap, with_kwargs=True):
        assert same(model(x=x, y=y), plain)
    assert seen == [((), {"x": x, "y": y})]


def test_global_hooks_survive_a_module_that_raises() -> None:
    seen: list[str] = []
    net = Net()
    with hl.register_forward_hook(None, "**", lambda module, *_: seen.append(type(module))):
        with pytest.raises(RuntimeError, match="mat1"):
            net(torch.ones(1, 9))
        net(torch.ones(1, 3))
    assert seen == [nn.Linear, nn.Tanh, nn.Linear, Net]
    assert not torch_module._has_any_global_hook()


def test_global_hook_takes_a_predicate_of_class_name_and_module() -> None:
    seen: list[Tensor] = []
    net, x = Net(), torch.ones(1, 3)
    with hl.register_forward_hook(
        None, lambda name, module: name == "Linear", lambda module, args, out: seen.append(out)
    ):
        net(x)
    assert same(seen[0], net.fc1(x))
    assert len(seen) == 2
