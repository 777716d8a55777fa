"""Views inside a forward: looking at their gradients leaves the model's as they are."""

from __future__ import annotations

import warnings

import pytest
import torch
from small_models import is_clean
from torch import Tensor, nn

import hookline as hl


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)


class ViewChanged(_Net):
    """The view is changed in place, and the base is used afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x) * 1
        v = h.view(-1)
        v.mul_(2)
        v[0] = 0
        return h.sin()


class BaseChanged(_Net):
    """The base is changed in place, and the view is used afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x) * 1
        v = h.view(-1)
        h.mul_(3)
        return v.sin()


class PartUsedBefore(_Net):
    """The view is used before its base is changed, and after."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x) * 1
        v = h.view(-1)
        early = v * 2
        h.mul_(3)
        return early + v


class NeighbourChanged(_Net):
    """Another view of the same base is changed with what this one holds."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x) * 1
        v = h[0]
        w = h[1]
        v.mul_(2)
        w += v
        return h.sin()


CHANGED = [ViewChanged, BaseChanged, PartUsedBefore, NeighbourChanged]


class SameObject(_Net):
    """Several names hold one view, and what is computed depends on that."""

    def forward(self, x: Tensor) -> Tensor:
        query = key = value = self.lin(x).t()
        if query is key and key is value:
            return (query * 3).sum(0)
        return query + key * value


class Unchanged(_Net):
    """Views of views, several uses, nothing in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x).view(3, 2, 2)
        v = h.transpose(1, 2)
        a, b = v.unbind(1)
        return (v.sum(1) * a).sin() + b


def run(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    model.zero_grad(set_to_none=True)
    output = model(x)
    (output * torch.arange(output.numel()).view_as(output)).sum().backward()
    return output.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("grads", [True, "all"])
@pytest.mark.parametrize("where", ["@**", "@h", "@v", "/*", "/view", "/getitem"])
@pytest.mark.parametrize("kind", [*CHANGED, SameObject, Unchanged])
def test_gradients_of_views_are_looked_at_without_changing_any(
    kind: type[nn.Module], where: str, grads: object
) -> None:
    model = kind()
    plain, plain_grads = run(model)
    if where in ("@h", "@v") and kind is SameObject:
        where = "@query"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=hl.HooklineWarning)
        with hl.capture(model, where, grads=grads):
            output, found = run(model)
    assert output.equal(plain)
    assert len(found) == 2
    assert all(map(Tensor.equal, found, plain_grads))
    assert is_clean(model)


@pytest.mark.parametrize("kind", CHANGED)
def test_gradient_of_a_view_whose_memory_was_changed_is_missing_with_the_reason(
    kind: type[nn.Module],
) -> None:
    """Torch makes its history anew: a hook hears of a part at most, and no part is given."""
    model = kind()
    message = "it is a view, and its memory was changed in place"
    with pytest.warns(hl.HooklineWarning, match=message), hl.capture(model, "@v:grad") as got:
        run(model)
    with pytest.raises(hl.NotCaptured):
        got["@v:grad"]


def test_gradients_of_unchanged_views_are_what_retain_grad_gives() -> None:
    model = Unchanged()
    kept: dict[str, Tensor] = {}

    def forward(x: Tensor) -> Tensor:
        h = kept["h"] = model.lin(x).view(3, 2, 2)
        v = kept["v"] = h.transpose(1, 2)
        a, b = kept["a"], kept["b"] = v.unbind(1)
        for tensor in kept.values():
            tensor.retain_grad()
        return (v.sum(1) * a).sin() + b

    x = torch.linspace(-1, 1, 12).view(3, 4)
    forward(x).sum().backward()
    with hl.capture(model, "@*", grads="all") as got:
        model(x).sum().backward()
    for name, tensor in kept.items():
        assert got[f"@{name}"].equal(tensor)
        assert got[f"@{name}"].grad.equal(tensor.grad), name


def test_gradient_of_one_view_under_three_names_is_that_of_the_object() -> None:
    model = SameObject()
    with hl.capture(model, "@query", "@key", "@value", grads=True) as got:
        run(model)
    assert got["@query"].grad.equal(got["@key"].grad)
    assert got["@query"].grad.equal(got["@value"].grad)


def test_edited_gradient_of_a_view_equals_a_tensor_hook() -> None:
    model = Unchanged()

    def forward(x: Tensor) -> Tensor:
        h = model.lin(x).view(3, 2, 2)
        v = h.transpose(1, 2)
        v.register_hook(lambda grad: grad * 0.5)
        a, b = v.unbind(1)
        return (v.sum(1) * a).sin() + b

    x = torch.linspace(-1, 1, 12).view(3, 4)
    forward(x).sum().backward()
    by_hand = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    with hl.edit(model, {"@v:grad": hl.scale(0.5)}):
        model(x).sum().backward()
    for parameter, grad in zip(model.parameters(), by_hand, strict=True):
        assert parameter.grad is not None
        assert grad is not None
        assert parameter.grad.equal(grad)
