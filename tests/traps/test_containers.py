"""Outputs in containers: their gradients arrive, and the containers come out as they were."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from tricky_modules import Calling, FrozenOut, Named, Out, Pair

import hookline as hl

CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], str]] = {
    "tensor": (lambda t: t, lambda o: o, ""),
    "tuple": (lambda t: (t,), lambda o: o[0], "[0]"),
    "list": (lambda t: [t], lambda o: o[0], "[0]"),
    "dict": (lambda t: {"logits": t}, lambda o: o["logits"], ".logits"),
    "ordered dict": (lambda t: OrderedDict(logits=t), lambda o: o["logits"], ".logits"),
    "dataclass": (Out, lambda o: o.logits, ".logits"),
    "frozen dataclass": (FrozenOut, lambda o: o.logits, ".logits"),
    "namespace": (lambda t: SimpleNamespace(logits=t), lambda o: o.logits, ".logits"),
    "named tuple": (lambda t: Named(t, t.detach()), lambda o: o.logits, ".logits"),
    "nested": (lambda t: {"a": [None, (t, 3)]}, lambda o: o["a"][1][0], ".a[1][0]"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_backward_hook_fires_for_every_container(name: str) -> None:
    """Torch's full hook fires for a tensor and a tuple only."""
    wrap, unwrap, _ = CONTAINERS[name]
    module = Calling(lambda m, x: wrap(x * 2))
    seen: list[Any] = []
    hl.register_backward_hook(module, "", lambda m, gi, go: seen.append((gi, go)))
    x = torch.randn(3, requires_grad=True)
    unwrap(module(x)).sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0][0][0], x.grad)


@pytest.mark.parametrize("name", CONTAINERS)
def test_capture_names_the_leaf_and_its_gradient(name: str) -> None:
    wrap, unwrap, leaf = CONTAINERS[name]
    module = Calling(lambda m, x: wrap(x * 2))
    x = torch.randn(3, requires_grad=True)
    with hl.capture(module, "", grads=True) as got:
        output = module(x)
        (unwrap(output) * 3).sum().backward()
    assert torch.equal(got[f":output{leaf}"], x.detach() * 2)
    assert torch.equal(got[f":output{leaf}.grad"], torch.full((3,), 3.0))
    assert type(got[""].output) is (type(output) if name != "tensor" else Tensor)


@pytest.mark.parametrize("name", CONTAINERS)
def test_gradient_edit_reaches_the_leaf(name: str) -> None:
    wrap, unwrap, leaf = CONTAINERS[name]
    module = Calling(lambda m, x: wrap(x * 2))
    x = torch.randn(3, requires_grad=True)
    with hl.edit(module, {f":output{leaf}.grad": hl.scale(10)}):
        unwrap(module(x)).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 20.0))


def test_tuple_subclass_with_another_constructor_comes_out_whole() -> None:
    """Torch rebuilds it as `type(out)(*items)`: three items, and a tensor for a tag."""
    module = Calling(lambda m, x: Pair((x.view(-1), x * 3), "T"))
    x = torch.randn(3, requires_grad=True)
    with hl.capture(module, "", grads=True) as got:
        output = module(x)
        (output[0] + output[1]).sum().backward()
    assert type(output) is Pair
    assert len(output) == 2
    assert output.tag == "T"
    assert got[""].output.tag == "T"
    assert torch.equal(x.grad, torch.full((3,), 4.0))


def test_structure_sequence_comes_out_whole() -> None:
    """Torch's hook cannot rebuild what `max` returns."""
    module = Calling(lambda m, x: x.view(2, 2).max(dim=0))
    x = torch.tensor([1.0, 4.0, 3.0, 2.0], requires_grad=True)
    seen: list[Any] = []
    hl.register_backward_hook(module, "", lambda m, gi, go: seen.append(go))
    output = module(x)
    assert type(output) is torch.return_types.max
    output.values.sum().backward()
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert torch.equal(seen[0][0], torch.ones(2))
    assert seen[0][1] is None


def test_lstm_states_have_gradients() -> None:
    """Torch shows the sequence and None for both states, and nothing when only a state is used."""
    lstm = nn.LSTM(3, 4)
    x = torch.randn(5, 2, 3, requires_grad=True)
    with hl.capture(lstm, "", grads=True) as got:
        y, (h, c) = lstm(x)
        (y.sum() + 2 * h.sum() + 3 * c.sum()).backward()
    assert torch.equal(got[":output[0].grad"], torch.ones_like(y))
    assert torch.equal(got[":output[1][0].grad"], torch.full_like(h, 2.0))
    assert torch.equal(got[":output[1][1].grad"], torch.full_like(c, 3.0))


def test_loss_on_a_nested_state_alone_fires() -> None:
    lstm, seen = nn.LSTM(3, 4), []
    hl.register_backward_hook(lstm, "", lambda m, gi, go: seen.append((gi, go)))
    x = torch.randn(5, 2, 3, requires_grad=True)
    _, (h, _) = lstm(x)
    h.sum().backward()
    [(grad_input, grad_output)] = seen
    assert torch.equal(grad_input[0], x.grad)
    assert grad_output[0] is None
    assert torch.equal(grad_output[1][0], torch.ones_like(h))
    assert grad_output[1][1] is None


def test_packed_sequence_output_is_captured_with_its_gradient() -> None:
    gru = nn.GRU(3, 4)
    x = torch.randn(2, 3, requires_grad=True)
    with hl.capture(gru, "", grads=True) as got:
        packed, _ = gru(pack_sequence([x]))
        packed.data.sum().backward()
    assert isinstance(got[""].output[0], PackedSequence)
    assert torch.equal(got[":output[0].data"], packed.data.detach())
    assert torch.equal(got[":output[0].data.grad"], torch.ones(2, 4))


def test_integer_leaf_beside_a_float_one_has_no_gradient_and_no_complaint() -> None:
    module = Calling(lambda m, x: {"y": x * 2, "index": x.argmax(), "mask": x > 0})
    x = torch.randn(3, requires_grad=True)
    with hl.capture(module, "", grads=True) as got:
        module(x)["y"].sum().backward()
    grads = got[":output.grad"]
    assert torch.equal(grads["y"], torch.ones(3))
    assert grads["index"] is None
    assert grads["mask"] is None


def test_same_tensor_twice_in_an_output_stays_one_tensor() -> None:
    def both(_: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * 2).view(-1)
        return y, y

    module = Calling(both)
    x = torch.randn(3, requires_grad=True)
    with hl.capture(module, "", grads=True) as got:
        a, b = module(x)
        (a * 2 + b * 3).sum().backward()
    assert a is b
    assert torch.equal(got[":output[0].grad"], torch.full((3,), 5.0))
    assert torch.equal(got[":output[1].grad"], torch.full((3,), 5.0))
    assert got[":output[0]"] is got[":output[1]"]


def test_container_object_is_the_modules_own_where_nothing_is_tapped() -> None:
    made: list[Any] = []
    module = Calling(lambda m, x: made.append({"y": x * 2}) or made[-1])
    with hl.capture(module, "", grads=True):
        output = module(torch.randn(3, requires_grad=True))
        output["y"].sum().backward()
    assert output is made[0]


def test_captured_container_does_not_follow_later_changes_of_the_models_own() -> None:
    """A hook that stores the list it was given sees what is appended afterwards."""
    module = Calling(lambda m, x: [x * 2])
    with hl.capture(module, "") as got:
        output = module(torch.ones(3))
        output.append("more")
        output[0] = None
    assert len(got[""].output) == 1
    assert torch.equal(got[":output[0]"], torch.full((3,), 2.0))


def test_dataclass_with_a_default_factory_and_no_init_field_survives_a_tap() -> None:
    @dataclasses.dataclass
    class Odd:
        y: Tensor
        parts: list[Tensor] = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            self.parts = [self.y * 2]

    module = Calling(lambda m, x: Odd(x.view(-1)))
    x = torch.randn(3, requires_grad=True)
    with hl.hook(module, ":output.grad", lambda grad, at: None):
        output = module(x)
        (output.y + output.parts[0]).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))
