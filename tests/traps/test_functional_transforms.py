"""Under `torch.func`: values come out as plain tensors, gradients are torch's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

import hookline as hl


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def _loss(model: nn.Module) -> object:
    return lambda parameters, x: functional_call(model, parameters, (x,)).sum()


def test_values_under_vmap_of_grad_are_plain_tensors_with_the_batch() -> None:
    model = _model()
    parameters = dict(model.named_parameters())
    x = torch.randn(5, 2)
    expected = vmap(grad(_loss(model)), (None, 0))(parameters, x)
    with hl.capture(model, "0", "1", inputs=True) as got:
        found = vmap(grad(_loss(model)), (None, 0))(parameters, x)
    for name in expected:
        assert torch.equal(found[name], expected[name])
    value = got["1"].output
    assert not torch._C._functorch.is_functorch_wrapped_tensor(value)
    torch.testing.assert_close(value + 0, model[:2](x))
    torch.testing.assert_close(got["0"].input + 0, x)


def test_gradients_under_func_grad_are_captured() -> None:
    """Torch's full backward hook raises here."""
    model = _model()
    x = torch.randn(2)
    expected = grad(lambda x: model(x).sum())(x)
    with hl.capture(model, "0", "0:input", grads=True) as got:
        found = grad(lambda x: model(x).sum())(x)
    assert torch.equal(found, expected)
    assert torch.equal(got["0:input.input.grad"] + 0, expected)

    hidden = model[0](x).detach().requires_grad_()
    model[1:](hidden).sum().backward()
    assert torch.equal(got["0:output.grad"] + 0, hidden.grad)


def test_gradients_under_vmap_of_grad_are_captured_per_sample() -> None:
    model = _model()
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    x = torch.randn(5, 2)
    with hl.capture(model, "0", grads=True) as got:
        vmap(grad(_loss(model)), (None, 0))(parameters, x)
    hidden = model[0](x).detach().requires_grad_()
    model[1:](hidden).sum().backward()
    torch.testing.assert_close(got["0:output.grad"] + 0, hidden.grad)


def test_edit_under_vmap_of_grad_is_part_of_the_function() -> None:
    model = _model()
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    x = torch.randn(5, 2)

    def edited(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        hidden = x @ parameters["0.weight"].T + parameters["0.bias"]
        hidden = (hidden * 3).tanh()
        return (hidden @ parameters["2.weight"].T + parameters["2.bias"]).sum()

    expected = vmap(grad(edited), (None, 0))(parameters, x)
    with hl.edit(model, {"0": hl.scale(3)}):
        found = vmap(grad(_loss(model)), (None, 0))(parameters, x)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_gradient_edit_under_func_grad_is_applied() -> None:
    model = _model()
    x = torch.randn(2)
    expected = grad(lambda x: model(x).sum())(x)
    with hl.edit(model, {"0:output.grad": hl.scale(10)}):
        found = grad(lambda x: model(x).sum())(x)
    torch.testing.assert_close(found, expected * 10)


def test_forward_mode_passes_through_captures_and_gradient_hooks() -> None:
    model = _model()
    x, tangent = torch.randn(2), torch.randn(2)
    expected = jvp(model, (x,), (tangent,))
    taps = hl.hook(model, ["**:input.grad", "**:output.grad"], lambda value, at: None)
    with taps, hl.capture(model, "**", inputs=True) as got:
        found = jvp(model, (x,), (tangent,))
    for before, after in zip(expected, found, strict=True):
        assert torch.equal(before, after)
    assert torch.equal(got[""].output + 0, expected[0])


def test_jacobian_is_the_same_while_captured() -> None:
    model = _model()
    x = torch.randn(2)
    expected = jacrev(model)(x)
    with hl.capture(model, "**"):
        assert torch.equal(jacrev(model)(x), expected)


def test_functional_call_with_other_weights_is_seen_with_those() -> None:
    model = _model()
    x = torch.randn(2, 2)
    zeros = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    with hl.capture(model, "2") as got:
        functional_call(model, zeros, (x,))
    assert torch.equal(got["2"].output, torch.zeros(2, 1))
