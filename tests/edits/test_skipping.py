"""`hl.skip`: a module that does not run, and the model as if it had returned something."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from small_models import Mixer, Net, Twice, Wrapped, is_clean, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

PASS = hl.skip(lambda at: at.inputs["input"])


class Counting(nn.Module):
    """Count how often it really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, input: Tensor) -> Tensor:
        self.runs += 1
        return input * 3


def counting_net() -> Net:
    net = Net()
    net.act = Counting()
    return net


def test_skipped_module_does_not_run_and_its_input_passes() -> None:
    net, x = counting_net(), torch.randn(1, 3)
    with hl.edit(net, {"act": PASS}):
        y = net(x)
    assert net.act.runs == 0
    assert same(y, net.fc2(net.fc1(x)))
    assert is_clean(net)
    net(x)
    assert net.act.runs == 1


def test_skip_by_value_gives_that_value() -> None:
    net, value = counting_net(), torch.randn(1, 4)
    with hl.edit(net, {"act": hl.skip(value)}):
        assert same(net(torch.randn(1, 3)), net.fc2(value))
    assert net.act.runs == 0


def test_skip_may_give_anything() -> None:
    model = Wrapped(Mixer())
    with hl.edit(model, {"inner": hl.skip({"any": 1})}):
        assert model(torch.ones(1), torch.ones(1)) == {"any": 1}
    with hl.edit(model, {"inner": hl.skip(None)}):
        assert model(torch.ones(1), torch.ones(1)) is None


def test_function_gets_the_inputs_and_the_place() -> None:
    model, seen = Wrapped(Mixer()), []
    x, y = torch.ones(1), torch.zeros(1)

    def answer(at: hl.At) -> Tensor:
        seen.append((at.address, at.call, at.visit, dict(at.inputs)))
        return at.inputs["x"]

    with hl.edit(model, {"inner": hl.skip(answer)}):
        assert model(x, y=y) is x
    assert seen == [("inner:output", 0, 0, {"x": x, "y": y})]


def test_gradients_flow_through_what_the_skip_gave() -> None:
    net, x = counting_net(), torch.randn(1, 3)
    with hl.edit(net, {"act": PASS}):
        net(x).sum().backward()
    right = net.fc2(net.fc1(x)).sum()
    assert same(net.fc1.weight.grad, torch.autograd.grad(right, net.fc1.weight)[0])


def test_visits_and_calls_limit_a_skip() -> None:
    model, x = Twice(), torch.randn(1, 3)
    once, plain = model.fc(x.tanh()), model(x)
    with hl.edit(model, {"fc": PASS.where(visits=0)}):
        assert same(model(x), once)
    with hl.edit(model, {"fc": PASS.where(calls=[1])}):
        assert same(model(x), plain)
        assert same(model(x), x.tanh())
    with hl.edit(model, {"fc": PASS}, visits=[0]):
        assert same(model(x), once)


def test_captures_and_edits_see_what_the_skip_gave() -> None:
    net, x = counting_net(), torch.randn(1, 3)
    with hl.edit(net, [("act", PASS), ("act", hl.add(1))]), hl.capture(net, "act") as got:
        net(x)
    assert same(got["act"].output, net.fc1(x).detach() + 1)


def test_hooks_of_the_module_still_run() -> None:
    net, seen = counting_net(), []
    net.act.register_forward_hook(lambda module, args, out: seen.append(out))
    with hl.edit(net, {"act": hl.skip(torch.zeros(1, 4))}):
        net(torch.randn(1, 3))
    assert not seen[0].any()


def test_nested_skips_go_in_any_order() -> None:
    for first_out in (0, 1):
        net, x = counting_net(), torch.randn(1, 3)
        handles = [hl.edit(net, {"act": hl.skip(torch.full((1, 4), float(n)))}) for n in (1, 2)]
        inner = net.fc2(torch.full((1, 4), 2.0))
        assert same(net(x), inner)
        left = handles[1 - first_out]
        handles[first_out].remove()
        assert same(net(x), net.fc2(torch.full((1, 4), 2.0 - first_out)))
        left.remove()
        assert is_clean(net)
        net(x)
        assert net.act.runs == 1


def test_forward_that_was_replaced_on_the_instance_comes_back() -> None:
    net, x = counting_net(), torch.randn(1, 3)
    mine = lambda input: input * 5  # noqa: E731  what another library would put there
    net.act.forward = mine
    with hl.edit(net, {"act": PASS}):
        assert same(net(x), net.fc2(net.fc1(x)))
    assert net.act.forward is mine


def test_direct_call_of_forward_is_not_skipped() -> None:
    net, x = counting_net(), torch.randn(1, 4)
    with hl.edit(net, {"act": PASS}) as handle:
        assert same(net.act.forward(x), x * 3)
        net(torch.randn(1, 3))
    assert [row["applied"] for row in handle.report()] == [1]


def test_copy_and_pickle_of_the_model_are_not_skipped() -> None:
    net, x = Net(), torch.randn(1, 3)
    plain = net(x)
    with hl.edit(net, {"act": hl.skip(torch.zeros(1, 4))}):
        assert same(copy.deepcopy(net)(x), plain)
        assert same(pickle.loads(pickle.dumps(net))(x), plain)
        assert not same(net(x), plain)
    assert "forward" not in vars(copy.deepcopy(net).act)


def test_skip_inside_a_checkpoint_is_repeated_in_its_recompute() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(checkpoint(lambda h: self.act(self.fc1(h)), x, use_reentrant=False))

    net, x = Checkpointed(), torch.randn(2, 3)
    with hl.edit(net, {"act": PASS}):
        loss = net(x).sum()
    loss.backward()
    right = net.fc2(net.fc1(x)).sum()
    assert same(net.fc1.weight.grad, torch.autograd.grad(right, net.fc1.weight)[0])
    assert is_clean(net)


def test_error_in_the_function_gains_a_note_and_removes_the_skip() -> None:
    net = counting_net()
    handle = hl.edit(net, {"act": hl.skip(lambda at: at.inputs["nothing"])})
    with pytest.raises(KeyError) as caught:
        net(torch.ones(1, 3))
    assert caught.value.__notes__ == [
        "in a hook of hl.edit(act) at `act:output`, call 0, visit 0; the hook was removed"
    ]
    assert not handle.is_live
    assert is_clean(net)


def test_skip_that_never_happened_is_reported() -> None:
    class Unused(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.fc1(x))

    net = Unused()
    handle = hl.edit(net, {"act": PASS, "fc1": PASS.where(visits=9)})
    net(torch.ones(1, 3))
    assert [(row["edit"], row["applied"], row["why not"]) for row in handle.report()] == [
        ("skip(...)", 0, "the model ran without calling it: a branch not taken, or unused"),
        ("skip(...)", 0, "it ran, but its condition never held"),
    ]
    handle.remove()


@pytest.mark.parametrize("address", ["fc1:input", "fc1:output[0]", "fc1:output.grad"])
def test_skip_of_less_than_a_module_is_refused(address: str) -> None:
    net = Net()
    with pytest.raises(hl.AddressError) as caught:
        hl.edit(net, {address: PASS})
    assert str(caught.value) == (
        f"hl.skip replaces a whole module, so `{address}` is too much: write `fc1`"
    )
    assert is_clean(net)


def test_skip_of_a_parameter_is_refused() -> None:
    with pytest.raises(hl.AddressError) as caught:
        hl.edit(Net(), {"fc1.weight": PASS})
    assert str(caught.value) == "hl.skip replaces a module; `fc1.weight` is a parameter"


def test_skip_of_the_root_answers_for_the_model() -> None:
    net, value = Net(), torch.ones(2)
    with hl.edit(net, {"": hl.skip(value)}):
        assert net(torch.ones(1, 3)) is value


def test_skip_over_a_pattern_skips_each() -> None:
    model, x = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), torch.randn(1, 3)
    ran: list[Any] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda module, args: ran.append(module))
    with hl.edit(model, {"*": PASS}):
        assert model(x) is x
    assert len(ran) == 3
