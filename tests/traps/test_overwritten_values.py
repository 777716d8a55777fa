"""Captured values that something writes to afterwards: true, or refused, never changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        x += self.linear(x)
        return x


class Writing(nn.Module):
    """Write to what the first layer gave, in a way no flag of a module tells."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(self.first(x))


def test_output_before_an_inplace_module_is_the_value_that_flowed() -> None:
    """A stored reference, detached or not, shows what ReLU(inplace=True) made of it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    x = torch.randn(4, 3)
    with torch.no_grad():
        expected = model[0](x)
    with hl.capture(model, "0") as got:
        model(x)
    assert expected.min() < 0
    assert torch.equal(got["0"].output, expected)


def test_value_overwritten_without_warning_raises_when_read() -> None:
    model = Writing()
    with hl.capture(model, "first") as got:
        model(torch.randn(4, 3))
    with pytest.raises(hl.Overwritten, match=r"`first:output` \(call 0, visit 0\)"):
        got["first"].output


def test_value_found_overwritten_once_is_copied_the_next_time() -> None:
    model = Writing()
    x = torch.randn(4, 3)
    capture = hl.capture(model, "first")
    with capture as got:
        model(x)
    with pytest.raises(hl.Overwritten):
        got["first"].output
    with capture as got:
        model(x)
    assert torch.equal(got["first"].output, model.first(x))
    with hl.capture(model, "first") as got:
        model(x)
    assert torch.equal(got["first"].output, model.first(x))


def test_value_copied_on_request_is_never_overwritten() -> None:
    model = Writing()
    x = torch.randn(4, 3)
    with hl.capture(model, "first", clone=True) as got:
        model(x)
    assert torch.equal(got["first"].output, model.first(x))


def test_every_way_to_read_refuses_an_overwritten_value() -> None:
    model = Writing()
    with hl.capture(model, "first") as got:
        model(torch.randn(4, 3))
    for read in (
        lambda: got["first:output"],
        lambda: got.first.output,
        lambda: got.calls[0]["first"].output,
        lambda: got.tensors(),
        lambda: next(iter(got)).output,
    ):
        with pytest.raises(hl.Overwritten):
            read()


def test_input_written_by_its_own_module_raises_when_read() -> None:
    """Torch's pre hook saw [1, 1]; what it stored reads [3, 3] afterwards."""
    model = Residual()
    with hl.capture(model, ":input", ":output") as got, torch.no_grad():
        model(torch.ones(1, 2))
    with pytest.raises(hl.Overwritten, match=r"`:input\.x`"):
        got[":input.x"]
    assert got[":output"].tolist() == [[3.0, 3.0]]


def test_input_written_by_its_own_module_can_be_kept() -> None:
    model = Residual()
    with hl.capture(model, ":input", ":output", clone=True) as got, torch.no_grad():
        model(torch.ones(1, 2))
    assert got[":input.x"].tolist() == [[1.0, 1.0]]
    assert got[":output"].tolist() == [[3.0, 3.0]]


def test_hook_sees_the_input_before_the_module_writes_to_it() -> None:
    model = Residual()
    seen: list[Any] = []
    hl.hook(model, ":input", lambda value, at: seen.append(value["x"].tolist()))
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert seen == [[[1.0, 1.0]]]


def test_write_to_a_view_of_the_value_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    with hl.capture(model, "0") as got, torch.no_grad():
        y = model(torch.ones(2, 3))
        y.view(-1)[2:4].zero_()
    with pytest.raises(hl.Overwritten):
        got["0"].output


def test_write_to_the_base_of_the_value_is_noticed() -> None:
    class Slicing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[1:]

    model = Slicing()
    x = torch.ones(3)
    with hl.capture(model, "") as got:
        model(x)
        x.add_(1)
    with pytest.raises(hl.Overwritten):
        got[""].output


def test_write_to_one_leaf_leaves_the_others_readable() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": x * 2, "b": x * 3}

    model = Two()
    with hl.capture(model, "") as got:
        model(torch.ones(2))["a"].zero_()
    assert got[":output.b"].tolist() == [3.0, 3.0]
    with pytest.raises(hl.Overwritten, match=r":output\.a"):
        got[":output.a"]
    with pytest.raises(hl.Overwritten):
        got[""].output


def test_selected_part_does_not_depend_on_the_rest() -> None:
    model = Writing()
    x = torch.randn(4, 3)
    with hl.capture(model, "first", select=(slice(None), 0)) as got:
        model(x)
    assert torch.equal(got["first"].output, model.first(x)[:, 0])


def test_gradient_overwritten_by_a_later_operation_is_true_or_refused() -> None:
    """A custom backward that writes to the gradient it was given."""

    class Scribble(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.mul_(5)

    class Scribbling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Scribble.apply(x)

    model = Scribbling()
    x = torch.ones(2, requires_grad=True)
    with hl.capture(model, "", grads=True) as got:
        (model(x) * torch.tensor([1.0, 2.0])).sum().backward()
    assert x.grad.tolist() == [5.0, 10.0]
    with pytest.raises(hl.Overwritten):
        got[":output.grad"]


def test_inference_mode_values_are_copied_and_usable() -> None:
    """Torch: `Inference tensors cannot be saved for backward`."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    with hl.capture(model, "*", inputs=True) as got, torch.inference_mode():
        y = model(torch.ones(1, 2))
    probe = torch.ones(2, requires_grad=True)
    (got["0"].output * probe).sum().backward()
    assert torch.equal(probe.grad, got["0"].output[0])
    assert not got["0"].output.is_inference()
    assert not got["1"].input.is_inference()
    assert torch.equal(got["1"].output, y)
    assert torch.equal(got["0"].output, model[0](torch.ones(1, 2)).detach())


def test_inference_mode_value_read_inside_is_usable_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.inference_mode(), hl.capture(model, "0") as got:
        model(torch.ones(1, 2)).zero_()
        kept = got["0"].output
    assert not kept.is_inference()
    assert torch.equal(kept, model[0](torch.ones(1, 2)).detach())


def test_parameter_captured_before_a_step_is_the_one_the_call_used() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model[0].weight.detach().clone()
    with hl.capture(model, "0.weight") as got:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert torch.equal(got["0.weight"], before)
    assert not torch.equal(model[0].weight, before)


def test_buffer_returned_and_updated_later_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.count

    model = Counting()
    with hl.capture(model, "") as got:
        model(torch.ones(1))
        model(torch.ones(1))
    with pytest.raises(hl.Overwritten):
        got.calls[0][""].output
    assert got.calls[1][""].output.item() == 2.0


def test_values_between_modules_are_inputs_of_the_next_one() -> None:
    """Module hooks see no operations, but what they gave flows into the next module."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = F.scaled_dot_product_attention(self.q(x), x, x)
            return x + F.gelu(self.o(h))

    model = Block()
    x = torch.randn(1, 3, 4, requires_grad=True)
    with hl.capture(model, "q", "o:input", "o", "", grads=True) as got:
        model(x).sum().backward()
    attended = F.scaled_dot_product_attention(got["q"].output, x.detach(), x.detach())
    torch.testing.assert_close(got["o:input.input"], attended)
    torch.testing.assert_close(
        got["o:input.input.grad"], got["o:output.grad"] @ model.o.weight.detach()
    )
