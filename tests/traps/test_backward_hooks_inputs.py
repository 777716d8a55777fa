"""`grad_input` of a backward hook: one entry for each argument, however it was passed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import hookline as hl


class ThreeInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x * y) + z


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


class Products(nn.Module):
    def forward(self, xs: list[Tensor], *, by: dict[str, Any] | None = None) -> Tensor:
        product = xs[0] * xs[1]
        return product if by is None else product * by["factor"] * by["power"]


class Difference(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * 5 - b * b


class Ignoring(nn.Module):
    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        return x * 2


def _leaves(count: int) -> list[Tensor]:
    return [torch.randn(3, requires_grad=True) for _ in range(count)]


def test_module_of_many_operations_gives_one_gradient_for_each_input() -> None:
    """Torch's legacy hook gives the inputs of the last operation: two for these three."""
    module, (x, y, z) = ThreeInputs(), _leaves(3)
    seen: list[Any] = []
    hl.register_backward_hook(module, "", lambda m, gi, go: seen.append((gi, go)))
    module(x, y, z).sum().backward()
    [(grad_input, grad_output)] = seen
    assert [torch.equal(g, t.grad) for g, t in zip(grad_input, (x, y, z), strict=True)] == [
        True
    ] * 3
    assert torch.equal(grad_output[0], torch.ones(3))


def test_keyword_argument_has_its_gradient_and_comes_after_its_child() -> None:
    """Torch gives `()` and calls the parent's hook before the child's."""
    model = Parent()
    seen: list[Any] = []
    hl.register_backward_hook(model, "", lambda m, gi, go: seen.append(("parent", gi)))
    hl.register_backward_hook(model, "child", lambda m, gi, go: seen.append(("child", gi)))
    x = torch.randn(2, 3, requires_grad=True)
    model(x=x).sum().backward()
    assert [name for name, _ in seen] == ["child", "parent"]
    assert torch.equal(seen[1][1][0], x.grad)


def test_gradient_hook_finds_a_keyword_argument_by_its_name() -> None:
    model, seen = Parent(), []
    hl.hook(model, "child:input.input.grad", lambda grad, at: seen.append((grad, at.leaf)))
    x = torch.randn(2, 3, requires_grad=True)
    model.child(input=x).sum().backward()
    [(grad, leaf)] = seen
    assert torch.equal(grad, x.grad)
    assert leaf == ("input",)


def test_nested_argument_has_a_nested_entry() -> None:
    """Torch gives `(None,)` for a list of tensors."""
    module, (a, b, factor) = Products(), _leaves(3)
    seen: list[Any] = []
    hl.register_backward_hook(module, "", lambda m, gi, go: seen.append(gi))
    module([a, b], by={"factor": factor, "power": 2}).sum().backward()
    [(nested, by)] = seen
    assert torch.equal(nested[0], a.grad)
    assert torch.equal(nested[1], b.grad)
    assert torch.equal(by[0], factor.grad)
    assert by[1] is None


def test_nested_gradient_can_be_replaced_alone() -> None:
    module, (a, b) = Products(), _leaves(2)
    hl.register_backward_hook(module, "", lambda m, gi, go: ((gi[0][0] * 10, gi[0][1]),))
    module([a, b]).sum().backward()
    assert torch.equal(a.grad, b.detach() * 10)
    assert torch.equal(b.grad, a.detach())


def test_packed_sequence_is_an_input_with_a_gradient() -> None:
    """Torch's hook never fires for a packed sequence, without a word."""
    gru = nn.GRU(3, 4)
    seen: list[Any] = []
    hl.register_backward_hook(gru, "", lambda m, gi, go: seen.append((gi, go)))
    x = torch.randn(2, 3, requires_grad=True)
    packed, _ = gru(pack_sequence([x]))
    packed.data.sum().backward()
    [(grad_input, grad_output)] = seen
    assert torch.equal(grad_input[0][0], x.grad)
    assert grad_input[0][1:] == (None, None, None)
    assert torch.equal(grad_output[0][0], torch.ones(2, 4))
    assert grad_output[1] is None


def test_one_tensor_in_two_arguments_has_its_whole_gradient_once() -> None:
    """Inside the module both arguments are one object, so there is one gradient to give."""
    module, (x,) = Difference(), _leaves(1)
    seen: list[Any] = []
    hl.register_backward_hook(module, "", lambda m, gi, go: seen.append(gi))
    with hl.capture(module, ":input", grads=True) as got:
        module(x, b=x).sum().backward()
    expected = 5 - 2 * x.detach()
    torch.testing.assert_close(x.grad, expected)
    [(first, second)] = seen
    torch.testing.assert_close(first, expected)
    assert second is None
    for name in ("a", "b"):
        torch.testing.assert_close(got[f":input.{name}.grad"], expected)


def test_arguments_that_are_one_object_stay_one_object_inside() -> None:
    class Same(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            assert query is key
            return query * key

    module, (x,) = Same(), _leaves(1)
    with hl.hook(module, ":input.grad", lambda grad, at: None):
        module(x, key=x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_unused_argument_is_missing_and_not_zero() -> None:
    module, (x, unused) = Ignoring(), _leaves(2)
    seen: dict[Any, Any] = {}
    rows: list[Any] = []
    hl.hook(module, ":input.grad", lambda grad, at: seen.update({at.leaf: grad}))
    hl.register_backward_hook(module, "", lambda m, gi, go: rows.append(gi))
    module(x, unused).sum().backward()
    assert torch.equal(seen["x",], torch.full((3,), 2.0))
    assert seen["unused",] is hl.MISSING
    assert rows[0][1] is None
    assert unused.grad is None


def test_input_gradient_is_this_modules_part_alone() -> None:
    """A tensor hook on the input itself would add what the caller does with it elsewhere."""
    module, (x,) = nn.Tanh(), _leaves(1)
    h = x * 1
    seen: list[Tensor] = []
    hl.hook(module, ":input.grad", lambda grad, at: seen.append(grad))
    (module(h) + h * 100).sum().backward()
    torch.testing.assert_close(seen[0], 1 - x.detach().tanh() ** 2)


def test_integer_and_float_arguments_mix() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
    seen: list[Any] = []
    hl.register_backward_hook(model, "*", lambda m, gi, go: seen.append((type(m), gi)))
    model(torch.tensor([1, 2])).sum().backward()
    assert [kind for kind, _ in seen] == [nn.Linear, nn.Embedding]
    assert torch.equal(seen[0][1][0], model[1].weight.detach().expand(2, 3))
    assert seen[1][1] == (None,)
