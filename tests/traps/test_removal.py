"""Removing hooks: at once, from anywhere, and without leaving anything on the model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline as hl

HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


def _hooks(model: nn.Module) -> list[dict[int, Any]]:
    return [dict(getattr(one, table)) for one in model.modules() for table in HOOK_TABLES]


@pytest.mark.parametrize("kind", ["hook", "pre hook", "value", "input"])
def test_removed_between_forward_and_backward_does_not_fire(kind: str) -> None:
    """Torch fires a full backward hook that was removed after the forward."""
    model, seen = _net(), []
    handle = {
        "hook": lambda: hl.register_backward_hook(model, "1", lambda *a: seen.append(a)),
        "pre hook": lambda: hl.register_backward_pre_hook(model, "1", lambda *a: seen.append(a)),
        "value": lambda: hl.hook(model, "1:output.grad", lambda *a: seen.append(a)),
        "input": lambda: hl.hook(model, "1:input.grad", lambda *a: seen.append(a)),
    }[kind]()
    loss = model(torch.ones(1, 2, requires_grad=True)).sum()
    handle.remove()
    loss.backward()
    assert seen == []


def test_gradient_edit_removed_before_backward_changes_nothing() -> None:
    model = _net()
    x = torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    edits = hl.edit(model, {"1:output.grad": hl.zero(), "1:input.grad": hl.scale(5)})
    loss = model(x).sum()
    edits.remove()
    loss.backward()
    assert torch.equal(x.grad, expected)


def test_added_between_forward_and_backward_waits_for_the_next_forward() -> None:
    """Gradients belong to a visit; one that ran before the hook was there has none to give."""
    model, seen = _net(), []
    loss = model(torch.ones(1, 2)).sum()
    hl.register_backward_hook(model, "1", lambda *a: seen.append(a))
    loss.backward()
    assert seen == []
    model(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 1


def test_removed_and_attached_again_in_any_mixture() -> None:
    """Torch never lets a module have a full hook once it had a legacy one, even a removed one."""
    model, seen = _net(), []
    hl.register_backward_hook(model, "1", lambda *a: seen.append("removed")).remove()
    hl.register_backward_pre_hook(model, "1", lambda *a: seen.append("pre"))
    hl.register_backward_hook(model, "1", lambda *a: seen.append("hook"))
    hl.hook(model, "1:output.grad", lambda *a: seen.append("grad"))
    model(torch.ones(1, 2)).sum().backward()
    assert sorted(seen) == ["grad", "hook", "pre"]


@pytest.mark.parametrize("kind", ["legacy", "full"])
def test_torchs_own_backward_hooks_may_stay_beside(kind: str) -> None:
    model, seen = _net(), []
    register = "register_full_backward_hook" if kind == "full" else "register_backward_hook"
    getattr(model[1], register)(lambda *a: seen.append("torch"))
    hl.register_backward_hook(model, "1", lambda *a: seen.append("hookline"))
    x = torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()
    assert sorted(seen) == ["hookline", "torch"]


def test_hook_may_remove_itself() -> None:
    """Torch's dictionaries raise `mutated during iteration` in several of its hook kinds."""
    model = _net()
    handles: dict[str, hl.Handle] = {}
    seen: list[str] = []

    def once(name: str) -> Any:
        def run(*_: Any) -> None:
            seen.append(name)
            handles[name].remove()

        return run

    handles["value"] = hl.hook(model, "0", once("value"))
    handles["gradient"] = hl.hook(model, "1:output.grad", once("gradient"))
    handles["backward"] = hl.register_backward_hook(model, "1", once("backward"))
    handles["parameter"] = hl.hook(model, "2.weight:grad", once("parameter"))
    for _ in range(2):
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert sorted(seen) == ["backward", "gradient", "parameter", "value"]
    assert not any(_hooks(model))


def test_hook_that_removes_another_stops_it_in_the_same_pass() -> None:
    model, seen = _net(), []
    other = hl.hook(model, "0:output.grad", lambda grad, at: seen.append("other"))
    hl.hook(model, "2:output.grad", lambda grad, at: other.remove())
    model(torch.ones(1, 2)).sum().backward()
    assert seen == []


def test_hook_may_attach_another_hook() -> None:
    model, seen = _net(), []

    def attach(value: Tensor, at: hl.At) -> None:
        if at.call == 0:
            hl.hook(model, "2", lambda value, at: seen.append(("later module", at.call)))
            hl.hook(model, "0", lambda value, at: seen.append(("same module", at.call)))

    hl.hook(model, "0", attach)
    model(torch.ones(1, 2))
    first = list(seen)
    model(torch.ones(1, 2))
    assert ("same module", 0) not in first
    assert [name for name, _ in seen].count("later module") == 2
    assert [name for name, _ in seen].count("same module") == 1


def test_model_removed_from_inside_its_own_forward() -> None:
    model = _net()
    handle = hl.hook(model, "**", lambda value, at: handle.remove())
    model(torch.ones(1, 2))
    assert not any(_hooks(model))


def test_nothing_is_left_on_the_model() -> None:
    model = _net()
    before = _hooks(model)
    state, pickled = dict(model.state_dict()), pickle.dumps(model)
    attributes = [dict(vars(one)) for one in model.modules()]
    with (
        hl.capture(model, "**", inputs=True, grads="all", params=True),
        hl.edit(model, {"0": hl.scale(2), "1:output.grad": hl.scale(2), "2.weight": hl.scale(2)}),
        hl.register_backward_hook(model, "**", lambda *a: None),
    ):
        model(torch.ones(1, 2)).sum().backward()
    assert _hooks(model) == before
    assert [list(vars(one)) for one in model.modules()] == [list(one) for one in attributes]
    model.zero_grad()
    assert pickle.dumps(model) == pickled
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True)
    )


def test_copy_of_a_hooked_model_is_free() -> None:
    model, seen = _net(), []
    hl.hook(model, "0", lambda value, at: seen.append(value))
    copied = copy.deepcopy(model)
    copied(torch.ones(1, 2))
    copied(torch.ones(1, 2))
    assert seen == []
    assert not any(_hooks(copied))
    model(torch.ones(1, 2))
    assert len(seen) == 1


def test_removing_twice_or_after_the_model_is_gone_is_fine() -> None:
    model = _net()
    handle = hl.hook(model, "0", lambda value, at: None)
    handle.remove()
    handle.remove()
    assert not handle.is_live
    other = _net()
    handle = hl.hook(other, "0", lambda value, at: None)
    del other
    handle.remove()
