"""Operations that change a tensor in place, and operations under the modes people run models in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import is_clean
from test_operations import make_calls, ran
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from twins import assert_same, make_input, run

import hookline as hl


def _in_place(this: Any, x: Tensor, change: Any = lambda name, value: None) -> Tensor:
    y = this.lin(x)
    y.mul_(3)
    change("/mul_[0]", y)
    y += x
    change("/add_[0]", y)
    y[0] = y[1] * 2
    change("/setitem", y)
    return y.tanh()


def test_operation_in_place_counts_under_both_names() -> None:
    module, x = make_calls(_in_place), make_input()
    with hl.capture(module, "/mul", "/mul_", "/add", "/add_", "/setitem", clone=True) as got:
        out = module(x)
    y = module.lin(x) * 3
    assert torch.equal(got["/mul[0]"], y)
    assert torch.equal(got["/mul_"], y)
    assert torch.equal(got["/add"], y + x)
    assert torch.equal(got["/add_"], y + x)
    assert torch.equal(got["/mul[1]"], (y + x)[1] * 2)
    assert torch.equal(got["/setitem"].tanh(), out)


def test_captured_tensor_that_is_changed_later_is_not_handed_out() -> None:
    module, x = make_calls(_in_place), make_input()
    with hl.capture(module, "/mul_") as got:
        module(x)
    with pytest.raises(hl.Overwritten, match="/mul_"):
        got["/mul_"]
    with hl.capture(module, "/mul_") as got:
        module(x)
    assert torch.equal(got["/mul_"], module.lin(x) * 3)


@pytest.mark.parametrize("where", ["/mul_[0]", "/add_[0]", "/setitem"])
def test_edit_of_an_operation_in_place_equals_a_change_by_hand(where: str) -> None:
    module = make_calls(_in_place)
    plain = run(module, module)

    def by_hand(x: Tensor) -> Tensor:
        def change(name: str, value: Tensor) -> None:
            if name == where:
                value.copy_(value * 2)

        return _in_place(module, x, change)

    expected = run(module, by_hand)
    with hl.edit(module, {where: hl.scale(2)}):
        assert_same(run(module, module), expected)
    assert is_clean(module)
    assert_same(run(module, module), plain)


def test_edit_under_both_names_is_applied_once() -> None:
    module, x = make_calls(lambda this, x: this.lin(x).mul_(3)), make_input()
    for where in ("/mul", "/mul_"):
        with hl.edit(module, {where: hl.scale(2)}) as edit:
            out = module(x)
        assert torch.equal(out, module.lin(x) * 3 * 2)
        assert next(iter(edit.report()))["applied"] == 1


@pytest.mark.parametrize("where", ["/mul_[0]", "/add_[0]", "/setitem"])
def test_gradient_of_an_operation_in_place_is_that_of_torch(where: str) -> None:
    grads: dict[str, Tensor] = {}

    def note(name: str, value: Tensor) -> None:
        value.register_hook(lambda grad: grads.update({name: grad.clone()}))

    module = make_calls(_in_place)
    plain = run(module, lambda x: _in_place(module, x, note))
    with hl.capture(module, where, grads=True, clone=True) as got:
        assert_same(run(module, module), plain)
    assert torch.equal(got[where].grad, grads[where])


def test_gradient_edit_of_an_operation_in_place_equals_a_hook_of_torch() -> None:
    def triple(name: str, value: Tensor) -> None:
        if name == "/add_[0]":
            value.register_hook(lambda grad: grad * 3)

    module = make_calls(_in_place)
    expected = run(module, lambda x: _in_place(module, x, triple))
    with hl.edit(module, {"/add_:grad": hl.scale(3)}):
        assert_same(run(module, module), expected)


def test_input_of_an_operation_in_place_is_as_it_was_before() -> None:
    module, x = make_calls(_in_place), make_input()
    with hl.capture(module, "/mul_:input", "/setitem:input", clone=True) as got:
        module(x)
    assert torch.equal(got["/mul_:input[0]"], module.lin(x))
    assert got["/mul_:input[1]"] == 3
    assert got["/setitem:input[1]"] == 0
    assert torch.equal(got["/setitem:input[0]"], module.lin(x) * 3 + x)


def test_input_edit_of_an_operation_in_place_changes_the_tensor_itself() -> None:
    """What is changed in place goes on under its own name, so the edit has to reach it."""
    module, x = make_calls(lambda this, x: _doubled_in_place(this.lin(x))), make_input()
    with hl.edit(module, {"/mul_:input[0]": hl.add(1)}):
        out = module(x)
    assert torch.equal(out, (module.lin(x) + 1) * 2)


def _doubled_in_place(y: Tensor) -> Tensor:
    y.mul_(2)
    return y


@pytest.mark.parametrize("where", ["/relu", "/relu:input.input"])
def test_inplace_flag_makes_an_edit_reach_the_tensor_itself(where: str) -> None:
    def forward(this, x):
        y = this.lin(x)
        F.relu(y, inplace=True)
        return y

    module, x = make_calls(forward), make_input()
    with hl.edit(module, {where: hl.add(1)}):
        out = module(x)
    y = module.lin(x)
    assert torch.equal(out, y.relu() + 1 if where == "/relu" else (y + 1).relu())


def test_out_argument_makes_an_edit_reach_the_tensor_itself() -> None:
    def forward(this, x):
        y, values, places = torch.empty(3, 4), torch.empty(4), torch.empty(4, dtype=torch.long)
        torch.mul(x, 2, out=y)
        torch.max(y, 0, out=(values, places))
        return y + values

    module, x = make_calls(forward), make_input().detach()
    with hl.edit(module, {"/mul": hl.add(1), "/max:output[0]": hl.scale(3)}):
        out = module(x)
    y = x * 2 + 1
    assert torch.equal(out, y + y.max(0).values * 3)


def test_gradient_and_edit_of_the_input_of_an_operation_in_place() -> None:
    def by_hand(x: Tensor) -> Tensor:
        y = module.lin(x)
        y.copy_(y + 1)
        y.register_hook(lambda grad: grads.append(grad.clone()))
        y.mul_(2)
        return y.sin()

    grads: list[Tensor] = []
    module = make_calls(lambda this, x: _doubled_in_place(this.lin(x)).sin())
    expected = run(module, by_hand)
    with (
        hl.edit(module, {"/mul:input[0]": hl.add(1)}),
        hl.capture(module, "/mul:input[0]", "/mul_:input[0]", grads=True, clone=True) as got,
    ):
        assert_same(run(module, module), expected)
    assert torch.equal(got["/mul:input[0].grad"], grads[0])
    assert torch.equal(got["/mul_:input[0].grad"], grads[0])


def test_random_numbers_are_as_before() -> None:
    def forward(this, x):
        y = torch.rand(3, 4)
        return F.dropout(this.lin(x) + y, 0.5, training=True).uniform_() * 2

    module, x = make_calls(forward), make_input()
    torch.manual_seed(9)
    plain = module(x)
    torch.manual_seed(9)
    with hl.capture(module, "/*", clone=True) as got:
        out = module(x)
    assert torch.equal(out, plain)
    torch.manual_seed(9)
    assert torch.equal(got["/rand"], torch.rand(3, 4))


def _helper(y: Tensor) -> Tensor:
    return F.softmax(y * 2, dim=-1)


def test_operations_in_functions_that_forward_calls_are_its_own() -> None:
    def forward(this, x):
        return _helper(this.lin(x)) + sum(one for one in [x.sin() for _ in range(2)])

    assert ran(forward) == ["mul", "softmax", "sin", "sin", "add", "add", "add"]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * 2


def test_operations_inside_an_autograd_function_are_not_seen() -> None:
    """An edit there would be lost to the gradient."""
    module = make_calls(lambda this, x: Square.apply(this.lin(x)) * 2)
    with hl.capture(module, "/mul") as got:
        out = module(make_input())
        out.sum().backward()
    assert len(got.values("/mul")) == 1
    assert torch.equal(got["/mul"], out)


def test_no_grad_and_inference_mode() -> None:
    def forward(this, x):
        with torch.no_grad():
            y = this.lin(x).tanh()
        return y * x

    module, x = make_calls(forward), make_input()
    plain = run(module, module)
    with (
        pytest.warns(hl.HooklineWarning, match="/tanh.*no gradient"),
        hl.capture(module, "/tanh", "/mul", grads=True) as got,
    ):
        assert_same(run(module, module), plain)
    assert not got["/tanh"].requires_grad
    with torch.inference_mode(), hl.edit(module, {"/tanh": hl.scale(2)}):
        out = module(x)
    assert torch.equal(out, module.lin(x).tanh() * 2 * x)


def test_autocast_and_device_contexts_are_kept() -> None:
    def forward(this, x):
        return this.lin(x) @ torch.ones(4, 2)

    module, x = make_calls(forward), make_input()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = module(x)
        with hl.capture(module, "/matmul", "/ones") as got:
            out = module(x)
        with hl.edit(module, {"/matmul": hl.scale(2)}):
            twice = module(x)
    assert plain.dtype == out.dtype == got["/matmul"].dtype == torch.bfloat16
    assert torch.equal(out, plain)
    assert torch.equal(twice, plain * 2)
    made = make_calls(lambda this, x: (torch.ones(2), x * 2))
    with torch.device("meta"), hl.capture(made, "/ones", "/mul") as got:
        made(x)
    assert got["/ones"].device == torch.device("meta")
    assert got["/mul"].device == x.device


class Counting(TorchFunctionMode):
    """Somebody else's mode."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_mode_of_somebody_else_sees_the_same_calls() -> None:
    def forward(this, x):
        with Counting() as inner:
            y = this.lin(x) * 2
        this.inner = inner.names
        return y.sin()

    module, x = make_calls(forward), make_input()
    with Counting() as plain:
        module(x)
    handle = hl.hook(module, "/softmax", lambda value, at: None)
    with Counting() as outer:
        module(x)
    handle.remove()
    assert [one for one in outer.names if one != "__get__"] == plain.names
    assert plain.names == ["linear", "mul", "sin"]
    assert module.inner == ["linear", "mul"]


def test_module_inside_a_module_keeps_its_own_numbers() -> None:
    class Recursive(nn.Module):
        """A module that calls itself."""

        def forward(self, x: Tensor, n: int = 2) -> Tensor:
            y = x * (n + 1)
            return y if n == 0 else self(y, n - 1) * 2

    module, x = Recursive(), make_input()
    with hl.capture(module, "/mul", "@y", clone=True) as got:
        out = module(x)
    for visit, value in enumerate([x * 3, x * 3 * 2, x * 3 * 2]):
        assert torch.equal(got["/mul[0]", visit], value)
        assert torch.equal(got["@y", visit], value)
    assert torch.equal(got["/mul[1]", 1], x * 3 * 2 * 2)
    assert torch.equal(got["/mul[1]", 0], out)


def test_error_in_a_hook_leaves_no_mode() -> None:
    module = make_calls(lambda this, x: this.lin(x) * 2)

    def fail(value: Any, at: hl.At) -> None:
        raise LookupError("on purpose")

    with hl.hook(module, "/mul", fail):
        with pytest.raises(LookupError) as caught:
            module(make_input())
        assert _get_current_function_mode_stack() == []
    assert any("/mul[0]" in note for note in caught.value.__notes__)
    assert is_clean(module)


@pytest.mark.parametrize(
    ("new", "match"),
    [
        (lambda value: value[0], "shape"),
        (lambda value: value.double(), "float64"),
        (lambda value: None, "None"),
    ],
    ids=["shape", "dtype", "none"],
)
def test_edit_that_does_not_fit_is_refused(new: Any, match: str) -> None:
    module = make_calls(lambda this, x: this.lin(x) * 2)
    handle = hl.edit(module, {"/mul": lambda value, at: new(value)})
    with pytest.raises(hl.EditError, match=match):
        module(make_input())
    handle.remove()
    assert is_clean(module)
