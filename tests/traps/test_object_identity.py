"""Which objects flow: watching values swaps none, and what is captured is what flowed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl


class Seeing(nn.Module):
    """Return the input, and remember the object."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return x


@pytest.mark.parametrize("kind", ["capture", "hook", "forward hook", "pre hook"])
def test_watching_values_swaps_no_object(kind: str) -> None:
    module = Seeing()
    x = torch.ones(2, requires_grad=True)
    x.tag = "hello"
    attach = {
        "capture": lambda: hl.capture(module, "", inputs=True),
        "hook": lambda: hl.hook(module, ":input", lambda value, at: None),
        "forward hook": lambda: hl.register_forward_hook(module, "", lambda m, a, o: None),
        "pre hook": lambda: hl.register_forward_pre_hook(module, "", lambda m, a: None),
    }[kind]
    with attach():
        output = module(x)
    assert output is x
    assert module.seen is x


def test_output_gradient_swaps_no_object_where_the_output_is_fresh() -> None:
    """Torch's full backward hook makes every output another object, a view of the first."""
    made: list[Tensor] = []
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda m, args, output: made.append(output))
    x = torch.ones(1, 2, requires_grad=True)
    with hl.capture(module, "", grads=True):
        y = module(x)
        y.sum().backward()
    assert y is made[0]
    assert type(y.grad_fn).__name__ == "AddmmBackward0"


def test_tapped_input_keeps_attributes_and_memory() -> None:
    """Torch's full hook loses Python attributes of the tensors it passes on."""
    module = Seeing()
    x = torch.ones(2, requires_grad=True)
    x.tag = "hello"
    with hl.capture(module, ":input", grads=True):
        output = module(x)
        output.sum().backward()
    assert module.seen.tag == "hello"
    assert output.tag == "hello"
    assert module.seen.data_ptr() == x.data_ptr()
    assert module.seen.requires_grad
    assert not hasattr(module.seen, "_hookline")


def test_parameter_passed_as_an_argument_keeps_its_meaning() -> None:
    """A tapped parameter is no leaf inside, but its gradient still reaches it."""
    weight = nn.Parameter(torch.ones(2))

    class Using(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 3

    module = Using()
    with hl.capture(module, ":input", grads=True) as got:
        module(weight).sum().backward()
    assert weight.grad.tolist() == [3.0, 3.0]
    assert got[":input.w.grad"].tolist() == [3.0, 3.0]


def test_capture_holds_what_the_next_module_receives() -> None:
    """With a full backward hook, torch's forward hook sees another object than the next module."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_full_backward_hook(lambda *a: None)
    received: list[Tensor] = []
    model[1].register_forward_pre_hook(lambda m, args: received.append(args[0]))
    with (
        hl.edit(model, {"0": hl.scale(3)}),
        hl.capture(model, "0", "1:input", clone=False) as got,
    ):
        model(torch.ones(1, 2, requires_grad=True))
    assert torch.equal(got["0"].output, received[0])
    assert got["0"].output.data_ptr() == received[0].data_ptr()
    assert got["1:input.input"].data_ptr() == received[0].data_ptr()


def test_capture_attached_before_a_torch_hook_sees_what_that_hook_makes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    received: list[Tensor] = []
    model[0].register_forward_hook(lambda m, args, output: output * 5)
    model[1].register_forward_pre_hook(lambda m, args: received.append(args[0]))
    with hl.capture(model, "0") as got:
        model(torch.ones(1, 2))
    assert torch.equal(got["0"].output, received[0])


def test_gradient_of_an_edited_output_is_that_of_the_new_value() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with hl.edit(model, {"0": hl.scale(3)}), hl.capture(model, "0", grads=True) as got:
        y = model(torch.ones(1, 2))
        y.sum().backward()
    torch.testing.assert_close(got["0:output.grad"], 1 - y.detach() ** 2)


def test_tensor_subclass_passes_through_a_tap() -> None:
    class Marked(Tensor):
        pass

    module = Seeing()
    x = torch.ones(2).as_subclass(Marked).requires_grad_()
    with hl.capture(module, ":input", grads=True) as got:
        output = module(x)
        (output * 2).sum().backward()
    assert type(output) is Marked
    assert got[":input.x.grad"].tolist() == [2.0, 2.0]


def test_non_contiguous_output_keeps_its_strides() -> None:
    class Transposing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).t()

    module = Transposing()
    x = torch.randn(2, 3, requires_grad=True)
    with hl.capture(module, "", grads=True) as got:
        y = module(x)
        (y * torch.arange(6.0).view(3, 2)).sum().backward()
    assert y.stride() == (1, 3)
    assert got[""].output.stride() == (1, 3)
    assert torch.equal(got[":output.grad"], torch.arange(6.0).view(3, 2))
    assert torch.equal(x.grad, torch.arange(6.0).view(3, 2).t() * 2)


def test_module_that_returns_no_tensor_is_captured_as_it_is() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"shape": x.shape, "none": None, "text": "a", "x": x, "object": object()}

    module = Odd()
    with hl.capture(module, "") as got:
        module(torch.ones(2))
    output = got[""].output
    assert output["shape"] == torch.Size([2])
    assert output["none"] is None
    assert output["text"] == "a"
    assert "object" in repr(output["object"])
