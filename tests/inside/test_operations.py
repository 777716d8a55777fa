"""Operations that a module's own forward calls: names, numbers, inputs, edits, gradients."""

from __future__ import annotations

import operator
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import is_clean
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from twins import assert_same, make_input, run

import hookline as hl


@pytest.fixture(autouse=True)
def _no_mode_is_left():
    yield
    assert _get_current_function_mode_stack() == []


class Calls(nn.Module):
    """A forward that is given as a function of the module and the input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def make_calls(function: Callable[..., Any]) -> Calls:
    torch.manual_seed(3)
    return Calls(function)


def ran(function: Callable[..., Any]) -> list[str]:
    """List the operations that a pattern sees in a forward, in order."""
    module, seen = make_calls(function), []
    with hl.hook(module, "/*", lambda value, at: seen.append(at.address)):
        module(make_input())
    return [re.sub(r"\[\d+\]", "", one).removeprefix("/") for one in seen]


SAME = {
    "softmax": [
        lambda x: F.softmax(x, -1),
        lambda x: x.softmax(-1),
        lambda x: torch.softmax(x, -1),
        lambda x: torch.nn.functional.softmax(x, dim=-1),
    ],
    "add": [
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: x.add(1),
        lambda x: torch.add(x, 1),
        lambda x: operator.add(x, x),
        lambda x: torch.ops.aten.add.Tensor(x, x),
    ],
    "sub": [lambda x: x - 1, lambda x: 1 - x, lambda x: x.subtract(1), lambda x: torch.rsub(x, 1)],
    "mul": [lambda x: x * 2, lambda x: 2 * x, lambda x: torch.multiply(x, 2), lambda x: x.mul(x)],
    "div": [
        lambda x: x / 2,
        lambda x: 2 / (x + 9),
        lambda x: x.true_divide(2),
        lambda x: torch.divide(x, 2),
    ],
    "matmul": [
        lambda x: x @ x.T,
        lambda x: x.matmul(x.T),
        lambda x: torch.matmul(x, x.T),
        lambda x: x.__rmatmul__(x.T),
    ],
    "pow": [lambda x: x**2, lambda x: 2**x, lambda x: x.pow(2), lambda x: torch.pow(x, 2)],
    "neg": [lambda x: -x, lambda x: x.negative(), lambda x: torch.neg(x)],
    "abs": [lambda x: abs(x), lambda x: x.absolute(), lambda x: torch.abs(x)],
    "getitem": [lambda x: x[0], lambda x: x[..., 1:], lambda x: x[None]],
    "cat": [lambda x: torch.cat([x, x]), lambda x: torch.concat([x, x])],
    "floor_divide": [lambda x: x // 2, lambda x: torch.floor_divide(x, 2)],
    "remainder": [lambda x: x % 2, lambda x: torch.remainder(x, 2)],
    "bitwise_and": [lambda x: (x > 0) & (x < 1)],
    "bitwise_not": [lambda x: ~(x > 0)],
    "relu": [lambda x: F.relu(x), lambda x: x.relu(), lambda x: torch.relu(x)],
    "linear": [lambda x: F.linear(x, torch.eye(4))],
}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        pytest.param(name, call, id=f"{name}-{number}")
        for name, calls in SAME.items()
        for number, call in enumerate(calls)
    ],
)
def test_function_method_and_operator_have_one_name(
    name: str, call: Callable[[Tensor], Tensor]
) -> None:
    module = make_calls(lambda this, x: call(x))
    x = make_input()
    with hl.capture(module, f"/{name}") as got:
        out = module(x)
    assert torch.equal(got.values(f"/{name}")[-1], out)
    assert torch.equal(out, call(x))
    assert is_clean(module)


@pytest.mark.parametrize("written", ["add", "__radd__", "__iadd__", "add_"])
def test_names_in_an_address_may_be_written_as_torch_does(written: str) -> None:
    def both(this, x):
        y = 1 + this.lin(x)
        y += 2
        return y

    module = make_calls(both)
    with hl.capture(module, f"/{written}", clone=True) as got:
        module(make_input())
    assert len(got.values(f"/{written}")) == (2 if written in ("add", "__radd__") else 1)


def test_property_getters_are_no_operations() -> None:
    assert ran(lambda this, x: (x.shape, x.T, x.dtype, x.grad_fn, x.mT.is_leaf, x * 2)) == ["mul"]


def test_pattern_shows_what_gives_tensors_in_order() -> None:
    def forward(this, x):
        y = this.lin(x)
        if y.sum().item() > 1e9 or y.size(0) == 7:
            return y
        return F.dropout(y.tanh(), 0.0).view(-1)

    assert ran(forward) == ["sum", "tanh", "dropout", "view"]


def test_inner_part_of_a_pattern() -> None:
    module = make_calls(lambda this, x: x.softmax(0) + x.log_softmax(0))
    with hl.capture(module, "/*softmax") as got:
        module(make_input())
    assert list(got.tensors()) == ["/softmax", "/log_softmax"]


def test_numbers_count_within_one_visit() -> None:
    module = make_calls(lambda this, x: ((x * 2).sin() * 3).sin())
    x = make_input()
    with hl.capture(module, "/mul", "/sin[1]", "/sin[-1]") as got:
        module(x)
        module(x)
    for call in got.calls:
        assert torch.equal(call["/mul[0]"], x * 2)
        assert torch.equal(call["/mul[1]"], (x * 2).sin() * 3)
        assert torch.equal(call["/sin[1]"], ((x * 2).sin() * 3).sin())
    assert len(got.values("/mul")) == 4


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).sin()


class Outer(nn.Module):
    """Operations of its own before, between and after those of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.act = nn.Tanh()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x * 3)
        h = self.act(self.inner(h)).sin()
        return self.inner(h) * 5


def test_children_count_for_themselves() -> None:
    module, seen = Outer(), []
    with hl.hook(
        module, ["/*", "inner/*", "act/*", "lin/*"], lambda v, at: seen.append(at.address)
    ):
        module(make_input())
    inner = ["inner/mul[0]", "inner/sin[0]"]
    assert seen == [
        *("/mul[0]", "lin/linear[0]"),
        *inner,
        *("act/tanh[0]", "/sin[0]"),
        *inner,
        "/mul[1]",
    ]


def test_child_without_sites_is_not_counted_for_its_parent() -> None:
    module, x = Outer(), make_input()
    with hl.capture(module, "/mul", "/sin") as got:
        out = module(x)
    assert len(got.values("/mul")) == 2
    assert len(got.values("/sin")) == 1
    assert torch.equal(got["/mul[1]"], out)


@pytest.mark.parametrize("where", ["/mul[0]", "/mul[1]", "/sin", "inner/mul", "inner/sin"])
def test_edit_of_a_result_equals_a_change_by_hand(where: str) -> None:
    def scaled(name: str, value: Tensor) -> Tensor:
        return value * 2 if name == where else value

    def inner(x: Tensor) -> Tensor:
        return scaled("inner/sin", scaled("inner/mul", x * 2).sin())

    def by_hand(x: Tensor) -> Tensor:
        h = module.lin(scaled("/mul[0]", x * 3))
        h = scaled("/sin", inner(h).tanh().sin())
        return scaled("/mul[1]", inner(h) * 5)

    module = Outer()
    plain, expected = run(module, module), run(module, by_hand)
    with hl.edit(module, {where: hl.scale(2)}):
        assert_same(run(module, module), expected)
    assert is_clean(module)
    assert_same(run(module, module), plain)


@pytest.mark.parametrize("where", ["/mul:input[0]", "/mul:input[1]", "/softmax:input.input"])
def test_edit_of_an_input_equals_a_change_by_hand(where: str) -> None:
    def forward(this, x, change=lambda name, value: value):
        h = this.lin(x)
        left, right = change("/mul:input[0]", h), change("/mul:input[1]", x)
        h = left * right
        return F.softmax(change("/softmax:input.input", h), dim=-1) + h

    def by_hand(x: Tensor) -> Tensor:
        return forward(module, x, lambda name, value: value * 2 if name == where else value)

    module = make_calls(forward)
    expected = run(module, by_hand)
    with hl.edit(module, {where: hl.scale(2)}):
        assert_same(run(module, module), expected)
    assert is_clean(module)


def test_keyword_arguments_have_their_names() -> None:
    def forward(this, x):
        return torch.add(x, this.lin(x), alpha=3) + F.softmax(input=x, dim=-1)

    module, x = make_calls(forward), make_input()
    with hl.capture(module, "/add[0]:input", "/softmax:input") as got:
        module(x)
    assert got["/add[0]:input"].keys() == {0, 1, "alpha"}
    assert got["/add[0]:input"]["alpha"] == 3
    assert torch.equal(got["/add[0]:input[1]"], module.lin(x))
    assert torch.equal(got["/softmax:input.input"], x)
    with hl.edit(module, {"/add[0]:input.alpha": lambda value, at: 5}):
        out = module(x)
    assert torch.equal(out, torch.add(x, module.lin(x), alpha=5) + F.softmax(x, dim=-1))


def test_gradients_are_those_of_torch() -> None:
    def forward(this, x, note=lambda value: value):
        h = note(this.lin(x) * 2)
        return note(F.softmax(h, dim=-1)) * h

    grads: list[Tensor] = []

    def note(value: Tensor) -> Tensor:
        value.register_hook(lambda grad: grads.append(grad.clone()))
        return value

    module = make_calls(forward)
    plain = run(module, lambda x: forward(module, x, note))
    with hl.capture(module, "/mul[0]", "/softmax", "/softmax:input", grads=True) as got:
        assert_same(run(module, module), plain)
    assert torch.equal(got["/softmax"].grad, grads[0])
    assert torch.equal(got["/mul[0]"].grad, grads[1])
    through = torch.autograd.grad(
        F.softmax(h := got["/mul[0]"].detach().requires_grad_(), -1), h, got["/softmax"].grad
    )
    assert torch.equal(got["/softmax:input.input.grad"], through[0])


def test_gradient_edits_equal_hooks_of_torch() -> None:
    def forward(this, x, change=lambda value: value):
        return change(this.lin(x).tanh()) * x

    def change(value: Tensor) -> Tensor:
        value.register_hook(lambda grad: grad * 3)
        return value

    module = make_calls(forward)
    expected = run(module, lambda x: forward(module, x, change))
    for where in ("/tanh:grad", "/tanh.grad", "/mul:input[0].grad"):
        with hl.edit(module, {where: hl.scale(3)}):
            assert_same(run(module, module), expected)


def test_operation_with_several_results() -> None:
    def forward(this, x, change=lambda value: value):
        a, b = this.lin(x).chunk(2, dim=-1)
        values, places = change(b).max(dim=0)
        return a * values + places

    module = make_calls(forward)
    x = make_input()
    plain = run(module, module)
    with hl.capture(module, "/chunk", "/max", grads=True) as got:
        assert_same(run(module, module), plain)
    b = module.lin(x).chunk(2, dim=-1)[1]
    assert torch.equal(got["/chunk:output[1]"], b)
    assert torch.equal(got["/max"].values, b.max(dim=0).values)
    assert got["/chunk:output[1]"].grad.shape == b.shape
    expected = run(module, lambda x: forward(module, x, lambda value: value * 2))
    with hl.edit(module, {"/chunk:output[1]": hl.scale(2)}):
        assert_same(run(module, module), expected)


def test_scaled_dot_product_attention_is_one_operation() -> None:
    def forward(this, x):
        q = this.lin(x)[None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=True) * 2

    module, x = make_calls(forward), make_input()
    with hl.capture(module, "/scaled_dot_product_attention", grads=True) as got:
        out = module(x)
        out.sum().backward()
    assert torch.equal(got["/scaled_dot_product_attention"] * 2, out)
    assert got["/scaled_dot_product_attention"].grad.unique().tolist() == [2.0]


def test_unknown_operation_is_reported_with_those_that_ran() -> None:
    module = make_calls(lambda this, x: F.softmax(this.lin(x), -1) * 2)
    with (
        pytest.warns(hl.HooklineWarning, match=r"/softmx: never called.*`/softmax`, `/mul`"),
        hl.capture(module, "/softmx"),
    ):
        module(make_input())
    with (
        pytest.warns(hl.HooklineWarning, match=r"`/softmax`"),
        hl.edit(module, {"/softmx": hl.zero()}),
    ):
        module(make_input())


def test_number_beyond_what_ran_is_reported() -> None:
    module = make_calls(lambda this, x: (x * 2) * 3)
    with (
        pytest.warns(hl.HooklineWarning, match=r"called only 2 times.*`/mul\[1\]`"),
        hl.capture(module, "/mul[2]"),
    ):
        module(make_input())


def test_error_in_the_forward_leaves_no_mode() -> None:
    def forward(this, x):
        this.lin(x).mul(2)
        raise LookupError("on purpose")

    module = make_calls(forward)
    with hl.hook(module, "/mul", lambda value, at: None):
        with pytest.raises(LookupError, match="on purpose"):
            module(make_input())
        assert _get_current_function_mode_stack() == []
    assert is_clean(module)


def test_threads_each_see_their_own() -> None:
    module = make_calls(lambda this, x: (this.lin(x) * 2).sin() * x)
    inputs = [torch.full((2, 4), float(n)) for n in range(4)]
    wrong: list[str] = []
    seen: list[tuple[int, Tensor]] = []

    def work(number: int) -> None:
        for _ in range(20):
            out = module(inputs[number])
            expected = (module.lin(inputs[number]) * 2 * 2).sin() * inputs[number]
            if not torch.equal(out, expected):
                wrong.append(f"thread {number}")

    with (
        hl.edit(module, {"/mul[0]": hl.scale(2)}),
        hl.hook(
            module, "/mul[1]", lambda value, at: seen.append((threading.get_ident(), value.sum()))
        ),
    ):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(seen) == 80
