"""In-place operations before, in and after a module whose gradients are watched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tricky_modules import Calling, Model

import hookline as hl


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x.grad = None
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def _assert_same(model: nn.Module, where: str) -> None:
    """Compare the gradients with and without a hook."""
    x = torch.randn(4, 4, requires_grad=True)
    expected = _gradients(model, x)
    fired = []
    with hl.hook(model, where, lambda grad, at: fired.append(at)):
        got = _gradients(model, x)
    assert fired
    for mine, torchs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, torchs)


def test_output_may_be_changed_in_place_downstream() -> None:
    """Torch: `Output 0 of BackwardHookFunction is a view and is being modified inplace`."""
    module, seen = nn.Linear(3, 3), []
    hl.register_backward_hook(module, "", lambda m, gi, go: seen.append(go[0]))
    y = module(torch.randn(2, 3, requires_grad=True))
    y += 1
    y.square().sum().backward()
    torch.testing.assert_close(seen[0], 2 * y.detach())


@pytest.mark.parametrize("where", ["1:input.grad", "1:output.grad"])
def test_inplace_module_may_be_watched(where: str) -> None:
    """Torch raises the same error in the forward of `ReLU(inplace=True)`."""
    _assert_same(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), where)


def test_both_sides_of_an_inplace_module_are_what_they_are_without_inplace() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    inplace = nn.Sequential(plain[0], nn.ReLU(inplace=True), plain[2])
    seen: dict[str, list[Tensor]] = {"plain": [], "inplace": []}
    x = torch.randn(4, 4)
    for name, model in (("plain", plain), ("inplace", inplace)):
        with hl.register_backward_hook(
            model, "1", lambda m, gi, go, name=name: seen[name].extend([gi[0], go[0]])
        ):
            model(x).sum().backward()
    assert len(seen["plain"]) == 2
    for mine, expected in zip(seen["inplace"], seen["plain"], strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("where", ["inner:input.grad", "inner:output.grad"])
def test_input_written_by_the_module_and_used_again_has_the_right_history(where: str) -> None:
    model = Model(Calling(lambda m, h: h.mul_(m.weight)), lambda inner, h: inner(h) + h * h)
    _assert_same(model, where)


@pytest.mark.parametrize("where", ["inner:input.grad", "inner:output.grad"])
def test_view_of_a_base_written_by_the_module(where: str) -> None:
    """The base is used later, and has to know what happened to a part of it."""

    def call(inner: nn.Module, h: Tensor) -> Tensor:
        inner(h[1:3])
        return h * h

    model = Model(Calling(lambda m, h: h.mul_(m.weight)), call)
    if where == "inner:output.grad":  # what the module returned is not used: no gradient there
        with hl.hook(model, where, lambda grad, at: None):
            x = torch.randn(4, 4, requires_grad=True)
            got = _gradients(model, x)
        for mine, expected in zip(got, _gradients(model, x), strict=True):
            torch.testing.assert_close(mine, expected)
    else:
        _assert_same(model, where)


@pytest.mark.parametrize("where", ["inner:input.grad", "inner:output.grad"])
def test_two_views_of_one_base_one_of_them_written(where: str) -> None:
    def inside(_: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        a.mul_(3)
        return a * b

    model = Model(Calling(inside), lambda inner, h: inner(h[:2], h[2:]).sum() + h.square().sum())
    _assert_same(model, where)


@pytest.mark.parametrize("where", ["inner:input.grad", "inner:input.args[0].grad"])
def test_overlapping_arguments_one_written_is_refused(where: str) -> None:
    """The second argument sees the write through the first; its alias could not know of it."""

    def inside(_: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        a.mul_(3)
        return b * b

    model = Model(Calling(inside), lambda inner, h: inner(h[:3], h[1:]))
    hl.hook(model, where, lambda grad, at: None)
    with pytest.raises(hl.GradientError, match=r"inner:input.*shares memory with another"):
        model(torch.randn(4, 4, requires_grad=True))


def test_columns_of_one_matrix_as_arguments_one_written() -> None:
    """They lie between each other in memory, but no element is in both."""

    def inside(_: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        a.mul_(3)
        return a * b

    model = Model(Calling(inside), lambda i, h: i(h[:, :2], h[:, 2:]).sum() + h.square().sum())
    _assert_same(model, "inner:input.grad")


def test_slice_of_an_output_changed_in_place() -> None:
    def call(inner: nn.Module, h: Tensor) -> Tensor:
        y = inner(h)
        y[:, 1:3] *= 2
        y[0] = 7
        return y

    _assert_same(Model(nn.Linear(4, 4), call), "inner:output.grad")


def test_written_leaf_raises_as_torch_does() -> None:
    module = Calling(lambda m, x: x.mul_(2))
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        module(x)
    with (
        hl.hook(module, ":input.grad", lambda grad, at: None),
        pytest.raises(RuntimeError, match="a leaf Variable that requires grad"),
    ):
        module(x)


def test_saved_value_overwritten_later_still_raises() -> None:
    """A tap shares the version counter, so autograd's own check sees the write."""
    model = nn.Sequential(nn.Sigmoid())
    x = torch.randn(3, requires_grad=True)
    with hl.register_backward_hook(model, "0", lambda m, gi, go: None):
        y = model(x)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def _keep_view(self: nn.Module, h: Tensor) -> Tensor:
    self.kept = (h * self.weight).view(2, -1)
    return self.kept


def _use_kept(inner: nn.Module, h: Tensor) -> Tensor:
    inner(h).mul_(3)
    return inner.kept


def _use_argument(inner: nn.Module, h: Tensor) -> Tensor:
    inner(h).mul_(3)
    return h


UNOBSERVABLE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "kept view": (lambda: Calling(_keep_view), _use_kept),
    "input handed back": (nn.Identity, _use_argument),
    "view of the input": (lambda: nn.Flatten(0), _use_argument),
    "view of a part of the input": (lambda: Calling(lambda m, h: h[1:]), _use_argument),
    "both used": (nn.Identity, lambda inner, h: inner(h).mul_(3) + h),
}


@pytest.mark.parametrize("name", UNOBSERVABLE)
def test_written_alias_of_a_tensor_in_use_is_right_or_refused(name: str) -> None:
    """The output shares memory with a tensor that stays in use and is then changed in place."""
    inner, call = UNOBSERVABLE[name]
    model = Model(inner(), call)
    x = torch.randn(4, 4, requires_grad=True)
    expected = _gradients(model, x)
    with hl.hook(model, "inner:output.grad", lambda grad, at: None):
        try:
            got = _gradients(model, x)
        except hl.GradientError:
            got = expected  # said aloud, which is not wrong
    for mine, torchs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, torchs)


def test_functional_inplace_on_the_output_of_each_layer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.hardtanh_(layer(x))
            return x

    net = Net()
    x = torch.randn(4, 4, requires_grad=True)
    expected = _gradients(net, x)
    with hl.capture(net, "layers.*", grads=True, clone=True) as got:
        mine = _gradients(net, x)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    with torch.no_grad():
        before = net.layers[2](F.hardtanh(net.layers[1](F.hardtanh(net.layers[0](x)))))
    torch.testing.assert_close(got["layers.2"].output, before)
    torch.testing.assert_close(
        got["layers.2:output.grad"], 2 * F.hardtanh(before) * (before.abs() < 1)
    )


def test_residual_stream_written_in_place_by_each_block() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x += self.linear(x.clone())
            return x

    _assert_same(nn.Sequential(nn.Linear(4, 4), Block(), Block()), "1:input.grad")
    _assert_same(nn.Sequential(nn.Linear(4, 4), Block(), Block()), "1:output.grad")


def test_gradient_written_by_an_observer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    hl.hook(model, "0:output.grad", lambda grad, at: grad.mul_(2))
    with pytest.raises(hl.HooklineError, match="changed the value in place"):
        model(torch.ones(1, 4)).square().sum().backward()


def test_value_written_by_an_observer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    hl.hook(model, "0", lambda value, at: value.zero_())
    with pytest.raises(hl.HooklineError, match="changed the value in place"):
        model(torch.ones(1, 4))
