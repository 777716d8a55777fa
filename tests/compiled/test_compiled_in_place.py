"""What changes tensors in place inside compiled graphs: heard and edited as in an eager run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline as hl

pytestmark = [
    # The compiler makes one of each autograd.Function that it traces.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # It asks this of the inputs of a graph, and some have a history.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


class Changing(nn.Module):
    """Have a forward change tensors in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)


class Augmenting(Changing):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * 2
        before = y * 3
        y += x
        y *= 2
        return (y.sin() + before).sum()


class Calling(Changing):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * 2
        torch.neg_(y)
        y = (torch.relu_(y) * 2).mul_(3)
        y.masked_fill_(x > 0, 1.0)
        y = F.leaky_relu(y, inplace=True)
        return (y - 1).sum()


class Setting(Changing):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).clone()
        y[:, 0] = 1.0
        y[:, 1] *= 2
        return y.square().sum()


class OverView(Changing):
    """Change what a layer shows of its product, and a part of another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y += x
        part = (y * 2)[:, 1:]
        part.mul_(x[:, 1:])
        return part.square().sum()


class Into(Changing):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        factor = torch.zeros_like(y)
        torch.mul(y.detach(), 2, out=factor)
        return (y * factor).sum()


class WithoutGrad(Changing):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = x.mean(0)
            mean.mul_(2)
        return (self.fc(x) * mean).sum()


MODELS = (Augmenting, Calling, Setting, OverView, Into, WithoutGrad)


def run(model: nn.Module, *sites: str, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Capture a call of a model; give what was captured, and the model's own gradients."""
    x = torch.linspace(-1, 1, 24).reshape(2, 3, 4).requires_grad_()
    model.zero_grad()
    with hl.capture(model, *sites, **options) as got:
        model(x * 1).backward()
    weight = next(model.parameters()).grad
    assert weight is not None
    assert x.grad is not None
    return got.tensors(), torch.cat([weight.flatten(), x.grad.flatten()])


def compare(
    make: Callable[[], nn.Module], *sites: str, backend: str = "aot_eager", **options: Any
) -> dict[str, Tensor]:
    """Require the captures of a copy that is not compiled, and the model's own gradient."""
    model = make()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected, _ = run(copy.deepcopy(model), *sites, **options)
    _, plain = run(compiled, "")
    found, gradient = run(compiled, *sites, **options)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, at=name: f"{at}: {text}")
    if backend == "aot_eager":  # the other adds up in an order that depends on where memory lies
        assert torch.equal(gradient, plain)
    return found


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_a_pattern_of_operations_meets_those_in_place(
    make: Callable[[], nn.Module], grads: bool
) -> None:
    assert len(compare(make, "/*", grads=grads)) > 4


def test_operations_in_place_are_heard_by_name_and_number() -> None:
    assert len(compare(Augmenting, "/add_", "/mul[2]", "/mul[-2]", grads=False)) == 3
    assert "/relu_:grad" in compare(Calling, "/relu_", grads=True)


def test_operations_in_place_are_heard_on_inductor() -> None:
    assert len(compare(Augmenting, "/*", "/add:input", backend="inductor", grads=True)) > 10


@pytest.mark.parametrize("make", [Augmenting, Setting, Into])
def test_what_operations_in_place_take_is_heard(make: Callable[[], nn.Module]) -> None:
    compare(make, "/*:input", grads=False)


def test_gradients_of_what_operations_in_place_take_are_of_what_was_there_before() -> None:
    found = compare(Augmenting, "/add_:input", "/mul_:input", grads=True)
    # What was done with it earlier is no part of what the operation took.
    assert not torch.equal(found["/add_:input[0].grad"], found["/mul_:input[0].grad"] * 2 + 6)
    compare(Calling, "/leaky_relu:input", "/mul_:input", "/relu_:input", grads=True)
    compare(OverView, "/add_:input", "/mul_:input", grads=True)


class Sparing(Changing):
    """Call what changes its argument in place at other times, where that must not be changed."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).exp()
        left, right = F.dropout(y, 0.5, False, True).chunk(2, -1)
        F.dropout(left, 0.5, False, True)
        F.dropout(self.fc.weight, 0.5, False, True)
        return (y * left.mean() * right.mean()).sum()


def test_what_an_operation_leaves_as_it_is_may_be_needed_as_it_was() -> None:
    model = Sparing()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    _, plain = run(compiled, "")
    found, gradient = run(compiled, "/dropout", "/dropout:input", grads=True)
    assert torch.equal(gradient, plain)
    assert "/dropout[2]:input.input.grad" in found


EDITS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "what it made": (Augmenting, "/add_"),
    "what it changed": (Augmenting, "/add_:input[0]"),
    "what it took": (Augmenting, "/add_:input[1]"),
    "the gradient of what it made": (Augmenting, "/add_:output.grad"),
    "the gradient of what it changed": (Augmenting, "/add_:input[0].grad"),
    "the gradient of what it took": (Augmenting, "/add_:input[1].grad"),
    "items": (Setting, "/setitem[0]"),
    "a mask": (Calling, "/masked_fill_"),
    "a flag": (Calling, "/leaky_relu:input.input"),
    "out": (Into, "/mul[0]"),
    "a view": (OverView, "/add_"),
    "a part": (OverView, "/mul_"),
    "the gradient of a view": (OverView, "/add_:input[0].grad"),
    "the gradient of a part": (OverView, "/mul_:input[0].grad"),
}


@pytest.mark.parametrize("what", EDITS)
def test_edits_at_operations_in_place_do_what_they_do_eagerly(what: str) -> None:
    make, site = EDITS[what]
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradients = []
    for one in (copy.deepcopy(model), compiled):
        with hl.edit(one, {site: hl.scale(3.0)}) as handle:
            gradients.append(run(one, "")[1])
        assert " 1" in str(handle.report())
    torch.testing.assert_close(*gradients)
    assert not torch.allclose(gradients[1], run(compiled, "")[1])


def test_an_edited_gradient_is_heard_after_the_edit() -> None:
    found = []
    model = Augmenting()
    for one in (copy.deepcopy(model), torch.compile(model, backend="aot_eager", fullgraph=True)):
        with hl.edit(one, {"/add_:input[0].grad": hl.scale(3.0)}):
            found.append(run(one, "/add_:input", grads=True)[0]["/add_:input[0].grad"])
    torch.testing.assert_close(*found)


def test_a_watch_measures_operations_beside_those_in_place() -> None:
    sites = []
    model = Augmenting()
    for one in (copy.deepcopy(model), torch.compile(model, backend="aot_eager", fullgraph=True)):
        with hl.watch(one, sites=["/*"], parameters=None) as watch:
            one(torch.randn(2, 3, 4)).backward()
            watch.step()
        sites.append({row["site"] for row in watch.table()})
    assert sites[0] == sites[1]
    assert "/add_[0]" in sites[0]


class InPlaceLayer(Changing):
    """Have a module write over what was used before."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * 1
        before = y * 3
        return (self.relu(y).square() + before).sum()


def test_the_gradient_of_what_a_module_writes_over_is_of_what_it_took() -> None:
    compare(InPlaceLayer, "relu:input", grads=True)


class Scores(Changing):
    """Change the result of a product in place, as attention does with its scores."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.fc(x) @ x.transpose(-1, -2)
        before = scores * 3
        scores += 1
        scores *= 2
        return (scores.square() + before).sum()


def test_gradients_of_products_that_are_changed_in_place_are_heard() -> None:
    sites = ("/matmul", "@scores", "/add_", "/add_:input", "/mul_", "/mul_:input")
    found = compare(Scores, *sites, grads=True)
    assert {"/matmul:grad", "@scores[0]:grad", "@scores[1]:grad", "/add_:grad"} <= set(found)


@pytest.mark.parametrize("site", ["/matmul:output.grad", "@scores[0].grad", "/add_:output.grad"])
def test_gradients_of_products_that_are_changed_in_place_are_edited(site: str) -> None:
    model, gradients = Scores(), []
    for one in (copy.deepcopy(model), torch.compile(model, backend="aot_eager", fullgraph=True)):
        with hl.edit(one, {site: hl.scale(3.0)}):
            gradients.append(run(one, "")[1])
    torch.testing.assert_close(*gradients)
