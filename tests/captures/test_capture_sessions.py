"""A capture as a session: entered again, twice, in an error; and what it refuses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from small_models import Branches, Lazy, Net, Twice, WithLazy, Wrapped, is_clean, same
from torch import Tensor, nn

import hookline as hl


def test_capture_entered_again_makes_new_results() -> None:
    net, x = Net(), torch.randn(1, 3)
    capture = hl.capture(net, "fc1")
    with capture as first:
        net(x)
    with capture as second:
        net(x * 2)
    assert same(first["fc1"].output, net.fc1(x).detach())
    assert same(second["fc1"].output, net.fc1(x * 2).detach())
    assert (first["fc1"].call, second["fc1"].call) == (0, 0)


def test_capture_entered_again_follows_a_module_that_was_swapped() -> None:
    net, x = Net(), torch.randn(1, 3)
    capture = hl.capture(net, "act")
    with capture:
        net(x)
    net.act = nn.ReLU()
    with capture as got:
        net(x)
    assert same(got["act"].output, net.fc1(x).relu().detach())


def test_capture_entered_twice_raises() -> None:
    net = Net()
    capture = hl.capture(net, "fc1")
    with capture as got:
        with pytest.raises(hl.SessionError) as caught, capture:
            pass
        net(torch.ones(1, 3))
    assert str(caught.value) == (
        "this capture is open already: one `with` at a time. "
        "Make a second one with hl.capture(...)."
    )
    assert got["fc1"].output.shape == (1, 4)
    assert is_clean(net)


def test_captures_nest_and_each_keeps_its_own() -> None:
    net, x = Net(), torch.ones(1, 3)
    with hl.capture(net, "fc1") as outer:
        net(x)
        with hl.capture(net, "fc*") as inner:
            net(x)
    assert len(outer.calls) == 2
    assert len(inner.calls) == 1
    assert list(inner.tensors()) == ["fc1:output", "fc2:output"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_in_the_block_closes_without_a_warning(error: type[BaseException]) -> None:
    net = Net()

    def fail(output: Tensor) -> None:
        raise error

    with pytest.raises(error), hl.capture(net, "fc1", "fc2", grads=True) as got:
        fail(net(torch.ones(1, 3)))
    assert is_clean(net)
    assert got["fc1"].output.shape == (1, 4)
    with pytest.raises(hl.NotCaptured) as caught:
        got.report()
    assert str(caught.value) == (
        "there is no report: an error ended the `with` block, or this was loaded."
    )


def test_interrupt_inside_the_model_keeps_what_flowed_before() -> None:
    net = Net()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = net.act.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), hl.capture(net, "fc*") as got:
        net(torch.ones(1, 3))
    handle.remove()
    assert list(got.tensors()) == ["fc1:output"]
    assert is_clean(net)
    with hl.capture(net, "fc*") as got:
        net(torch.ones(1, 3))
    assert len(got) == 2


def test_backward_after_the_block_gives_no_gradient() -> None:
    net = Net()
    capture = hl.capture(net, "fc1", grads=True)
    got = capture.__enter__()
    loss = net(torch.ones(1, 3)).sum()
    with pytest.warns(hl.HooklineWarning, match="no backward reached a captured site"):
        capture.__exit__(None, None, None)
    loss.backward()
    assert got["fc1"].output.grad is None


def test_several_backwards_add_up_and_are_listed() -> None:
    net = Net()
    with hl.capture(net, "fc1", grads=True) as got:
        y = net(torch.ones(1, 3))
        y[0, 0].backward(retain_graph=True)
        y[0, 1].backward()
    first, second = got["fc1"].grads()
    assert same(got["fc1"].output.grad, first + second)
    assert same(got["fc1:output.grad"], first + second)


def test_inference_tensors_are_kept_as_usable_copies() -> None:
    net = Net()
    with hl.capture(net, "**", inputs=True) as got, torch.inference_mode():
        net(torch.ones(1, 3))
    kept = got["fc1"].output
    assert not kept.is_inference()
    kept.requires_grad_().sum().backward()


def test_nested_values_are_kept_with_their_structure() -> None:
    model, x = Wrapped(Branches()), torch.randn(2)
    with hl.capture(model, "inner") as got:
        model(x)
    output = got["inner"].output
    assert list(output) == ["a", "b", "n", "none"]
    assert same(output["b"][1][0], x * 3)
    assert (output["n"], output["none"]) == (7, None)


def test_list_changed_by_the_model_later_is_kept_as_it_was() -> None:
    class Growing(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [x]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Growing()

        def forward(self, x: Tensor) -> int:
            found = self.inner(x)
            found.append(x)
            return len(found)

    model = Outer()
    with hl.capture(model, "inner") as got:
        assert model(torch.ones(1)) == 2
    assert len(got["inner"].output) == 1


def test_capture_changes_no_object_that_flows() -> None:
    model, x = Wrapped(nn.Identity()), torch.ones(1)
    with hl.capture(model, "**", inputs=True):
        assert model(x) is x


def test_generator_forward_is_refused_by_name_and_left_out_of_patterns() -> None:
    model = WithLazy()
    with pytest.raises(hl.UnsupportedModel, match=r"`lazy` .* its forward is a generator"):
        hl.capture(model, "lazy").__enter__()
    with pytest.raises(hl.UnsupportedModel, match=r"`lazy` .* its forward is a generator"):
        hl.capture(model, Lazy)
    with hl.capture(model) as got:
        model(torch.ones(1, 3))
    assert list(got.tensors()) == ["fc:output", ":output"]
    assert is_clean(model)


def test_module_that_returns_a_generator_is_told_when_it_runs() -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return (x * n for n in range(2))

    model = Wrapped(Returns())
    with (
        pytest.raises(hl.UnsupportedModel, match="returned a generator, whose body has not run"),
        hl.capture(model, "inner"),
    ):
        model(torch.ones(1))


def test_decorated_generator_that_returns_a_list_is_a_plain_module() -> None:
    def gather(function: Any) -> Any:
        return functools.wraps(function)(lambda *args: list(function(*args)))

    class Gathered(nn.Module):
        @gather
        def forward(self, x: Tensor) -> Any:
            yield x * 2

    model = Wrapped(Gathered())
    with hl.capture(model, "inner") as got:
        model(torch.ones(1))
    assert got["inner"].output[0].item() == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": False}, "nothing to capture: inputs, outputs, grads and params are all False"),
        ({"grads": "some"}, "grads='some' must be True, False or 'all'"),
        ({"clone": "maybe"}, "clone='maybe' must be True, False or 'auto'"),
        (
            {"reduce": "median"},
            "reduce='median' is unknown; give a function of a tensor, or one of "
            "mean, std, norm, absmax, min, max, sum",
        ),
    ],
)
def test_bad_option_is_told_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"must|nothing|unknown") as caught:
        hl.capture(Net(), "fc1", **options)
    assert str(caught.value) == message


def test_unknown_address_and_bad_grammar_are_told_at_once() -> None:
    with pytest.raises(hl.NoSuchSite, match=r"`layers\.\*` matches no site in `Net`"):
        hl.capture(Net(), "fc1", "layers.*")
    with pytest.raises(hl.AddressError) as caught:
        hl.capture(Net(), "fc1:output[")
    assert str(caught.value).endswith("    fc1:output[\n              ^")


@pytest.mark.parametrize("where", ["fc", "fc:output.grad"])
def test_last_is_the_last_visit_whatever_order_gradients_come_in(where: str) -> None:
    """A gradient that comes late, of a visit that was replaced, must not push out the last."""
    model, x = Twice(), torch.randn(1, 3)
    with hl.capture(model, where, last=True, grads=True) as got:
        first, second = model(x).sum(), model(x + 1).pow(2).sum()
        second.backward()
        first.backward()
    (visit,) = got
    assert (visit.call, visit.visit) == (1, 1)
    assert same(got["fc:output.grad"], 2 * model(x + 1).detach())
